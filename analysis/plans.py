"""What grids were asked for and never began: the records of grids beside those of runs, in `.grids`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pandas as pd


def unstarted(runs: Path) -> pd.DataFrame:
    """[sweep, job]: the jobs, by their options, that no grid of the sweep has started. Broken records say nothing."""
    asked: dict[tuple[str, str], bool] = {}
    for path in sorted(runs.glob(".grids/*/grid.json")):
        for sweep, job, started in _jobs(path):
            asked[sweep, job] = asked.get((sweep, job), False) or started
    return pd.DataFrame([names for names, started in asked.items() if not started], columns=["sweep", "job"])


def _jobs(path: Path) -> Iterator[tuple[str, str, bool]]:
    """(sweep, options, was it started?) of every job of a grid."""
    try:
        grid = json.loads(path.read_text(encoding="utf-8"))
        sweep, jobs = str(grid["sweep"] or path.parent.name), [" ".join(words) for words in grid["jobs"]]
    except (OSError, ValueError, TypeError, KeyError):
        return
    for number, job in enumerate(jobs):
        yield sweep, job, (path.parent / "jobs" / f"{number}.json").exists()
