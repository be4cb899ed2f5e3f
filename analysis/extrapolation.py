"""Tests past the trained length: every scaling of RoPE that a run was tested under as a cell, and quality by length."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import pandas as pd

from analysis.runs import Records, only
from analysis.statistics import Interval, interval

_SCALED = re.compile(r"eval/(?P<suite>[\w.-]+)/(?P<scaling>[\w-]+)/(?P<metric>\w+)")
# As `experiments.tasks.text` names its suites.
_WINDOWS = re.compile(r"eval/text(?:_x(\d+))?/(bits_per_byte|loss)")
# Of a run as it was trained.
UNSCALED = "none"


def apart(records: Records) -> Records:
    """One more run for each scaling that a run was tested under: `eval/kv8/yarn/loss` becomes its `eval/kv8/loss`.

    The cells of a run then differ in `scaling`. What was counted, measured and validated is said of all of them; the
    curve of the training is that of the run as it was trained alone.
    """
    scaled = {name: match for name in records.metrics if (match := _SCALED.fullmatch(name))}
    if not scaled:
        return records
    plain = records.runs.drop(columns=list(scaled))
    # A run that has not come so far says by its options that it was to be tested so.
    asked = [name for name in records.params if name.startswith("evaluate.rope_scaling.")]
    rescaled = records.runs[[*scaled, *asked]].notna().any(axis="columns")
    rows = [plain.assign(scaling=rescaled.map({True: UNSCALED}))]
    for scaling in dict.fromkeys(match["scaling"] for match in scaled.values()):
        names = {name: f"eval/{m['suite']}/{m['metric']}" for name, m in scaled.items() if m["scaling"] == scaling}
        tested = records.runs[list(names)].rename(columns=names).dropna(how="all")
        own = plain.loc[tested.index].drop(columns=[name for name in plain if name.startswith("eval/")])
        rows.append(pd.concat([own, tested], axis="columns").assign(scaling=scaling, run=own["run"] + " " + scaling))
    runs = pd.concat(rows, ignore_index=True)
    return only(replace(records, params=(*records.params, "scaling")), runs)


def by_length(records: Records) -> tuple[str, dict[str, dict[int, Interval]]]:
    """The metric of a text's windows, and cell -> tokens of a window -> its value; nothing where all are of one length.

    Args:
        records: the runs to count, see `runs.counted`; their windows are multiples of one trained length.
    """
    found = {match[0]: match for match in map(_WINDOWS.fullmatch, records.metrics) if match}
    for metric in ("bits_per_byte", "loss"):
        names = {name: int(match[1] or 1) for name, match in found.items() if match[2] == metric}
        trained = trained_length(records)
        if len(names) > 1 and trained:
            cells = {cell: _values(own, names, trained) for cell, own in records.runs.groupby("cell")}
            return f"eval/text/{metric}", cells
    return "", {}


def trained_length(records: Records) -> int:
    """Tokens of a training row; 0 where runs differ in it or do not say."""
    known = set(records.runs["task.length"].dropna()) if "task.length" in records.runs else set()
    return int(known.pop()) if len(known) == 1 else 0


def _values(runs: pd.DataFrame, names: Mapping[str, int], trained: int) -> dict[int, Interval]:
    return {factor * trained: interval(runs[name]) for name, factor in names.items()}
