"""What grids were asked for and never began: the records of grids beside those of runs, in `.grids`."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pandas as pd

from experiments import grids


def unstarted(runs: Path) -> pd.DataFrame:
    """[sweep, job]: the jobs, by their options, that no grid of the sweep has started. Broken records say nothing."""
    asked: dict[tuple[str, str], bool] = {}
    for path in sorted(runs.glob(".grids/*/grid.json")):
        with suppress(ValueError, TypeError):
            grid = grids.read(path.parent)
            for number, words in enumerate(grid.jobs):
                job = (grid.name, " ".join(words))
                asked[job] = asked.get(job, False) or grids.has_started(grid.folder, number)
    return pd.DataFrame([names for names, started in asked.items() if not started], columns=["sweep", "job"])
