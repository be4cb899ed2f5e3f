"""Records of a benchmark beside those of runs: the measured time of a decoded token, and how costs grow.

`python -m experiments.bench` leaves one folder a benchmark in `runs/bench`; see `analysis.scaling` for the exponents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from analysis import scaling
from analysis.canvas import Style
from analysis.pictures import Picture
from analysis.runs import FINISHED, Records, load
from analysis.sheets import Column, Sheet


@dataclass(frozen=True)
class Growth:
    """The section about cost against length."""

    folder: str
    sheet: Sheet
    summary: str
    warnings: list[str]
    pictures: list[Picture]


def newest(folder: Path, records: Records) -> Path | None:
    """The newest benchmark in a folder of runs that has a layout of these runs; their names are their times."""
    layouts = set(records.runs["layout"].dropna())
    for path in sorted((path for path in (folder / "bench").glob("*") if path.is_dir()), reverse=True):
        runs = load(path).runs
        if layouts & set(runs.loc[runs["status"] == FINISHED, "layout"]):
            return path
    return None


def read(folder: Path) -> Records:
    """The records of one benchmark.

    Raises:
        ValueError: `folder` is no folder, or holds none.
    """
    if not folder.is_dir():
        raise ValueError(f"--bench={folder} is not a folder; python -m experiments.bench makes one in runs/bench")
    records = load(folder)
    if records.runs.empty:
        raise ValueError(f"--bench={folder} holds no records of a benchmark")
    return records


def joined(records: Records, measured: Records) -> Records:
    """`records` with the decoding times of the same models: those that agree in every option of the model."""
    options = [name for name in records.params if name.startswith("model.") and name in measured.params]
    times = [name for name in measured.metrics if name.startswith("measured/decode_ms_at_")]
    if not options or not times or records.runs.empty:
        return records
    finished = measured.runs[measured.runs["status"] == FINISHED]
    # Vocabularies and lengths differ between tasks and benchmarks; a mean over batches of one model is still its own.
    found = finished[times].groupby(_keys(finished, options)).mean()
    return replace(records, runs=records.runs.join(found, on=pd.Series(_keys(records.runs, options), name="model")))


def _keys(runs: pd.DataFrame, options: list[str]) -> pd.Series:
    return runs[options].map(str).agg("\n".join, axis="columns")


def growth(measured: Records, looks: Mapping[str, Style]) -> Growth | None:
    """How measured costs grow with the length; None without a stack that was measured at two lengths.

    Args:
        looks: of cells, those of the benchmark among them.
    """
    known = scaling.cells(measured)
    found = scaling.exponents(known)
    if found.empty:
        return None
    head, *rows = scaling.rows(found)
    columns = [Column(title.capitalize(), number=i > 1) for i, title in enumerate(head)]
    folder = str(Path(measured.runs["folder"].iloc[0]).parent)
    said = (scaling.summary(found), scaling.warnings(known))
    return Growth(folder, Sheet(columns, rows), *said, scaling.pictures(known, looks))
