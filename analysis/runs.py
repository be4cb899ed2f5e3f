"""Local records of runs as dataframes: what was run, what came out, what is broken.

A record is a folder with status.json, params.json, environment.json and metrics.jsonl, written by experiments.tracking.
A run may die at any moment, so each file may be missing or cut short: what is readable is used, the rest is named.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.plans import unstarted
from arch import layout
from experiments.config import canonical
from mixers.options import nearest

FINISHED = "FINISHED"
# No status is known: the record is broken.
UNKNOWN = "UNKNOWN"

_FILES = ("status.json", "params.json", "metrics.jsonl", "config.yaml")
_FACTS = (
    "run", "folder", "status", "reason", "sweep", "sweeps", "started", "seconds", "command", "last_step", "last_tokens",
    "earlier_keys", "tuning",
)  # fmt: skip
_PARAMS = ("stack", "layout", "task", "seed")
_POINT = ("metric", "step", "tokens", "value")
# Of status.json: what is used as text. Of tuning.json: without one of these there is nothing to tell.
_TEXTS = ("status", "reason", "sweep", "started", "command")
_TUNING = {"lr", "edge", "monitor", "seeds", "scores", "runs", "tokens", "flops", "seconds"}


@dataclass(frozen=True)
class Records:
    """What is known of a set of runs.

    Attributes:
        runs: one row a run: run, folder, status, reason, sweep (which made it), sweeps (all it is in), started, seconds
            (wall time), command, last_step, last_tokens (training tokens seen), earlier_keys (of what it was before it
            was continued under changed options), tuning (how its learning rate was chosen, a dict, where it was), cell,
            every param (stack, layout, task, seed, d_model, ...), the last value of every metric. Of params, null,
            true, false and lists are JSON text.
        curves: run, metric, step, tokens, value: one row a logged value, in the order of logging.
        environment: one row a run, indexed by run: versions, commit, device, ...
        params: the columns of `runs` that are params.
        problems: run, problem: what is broken in the records.
        unstarted: sweep, job: what grids were asked for and did not begin.
    """

    runs: pd.DataFrame
    curves: pd.DataFrame
    environment: pd.DataFrame
    params: tuple[str, ...]
    problems: pd.DataFrame
    unstarted: pd.DataFrame

    @property
    def metrics(self) -> list[str]:
        """The metrics that at least one of these runs has a value of."""
        named = [column for column in self.runs if column not in (*_FACTS, "cell", *self.params)]
        return [column for column in named if self.runs[column].notna().any()]

    def values(self, metric: str) -> pd.Series:
        """The last value of `metric`, indexed like `runs`; NaN where it was not logged."""
        return self.runs[metric] if metric in self.runs else pd.Series(math.nan, index=self.runs.index)


def load(folder: str | Path) -> Records:
    """The records in the subfolders of `folder`. A subfolder without any file of a record is not a run.

    Trials of tuning are left out: they are no results, and on seeds that results must not have.

    Raises:
        ValueError: `folder` is not a folder.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"runs={folder} is not a folder; it is made by the first python -m experiments.train")
    found = [_read(path) for path in sorted(folder.iterdir()) if any((path / name).is_file() for name in _FILES)]
    found = [record for record in found if not record.trial]
    params = tuple(dict.fromkeys((*_PARAMS, *(name for record in found for name in record.params))))
    names = [record.facts["run"] for record in found]
    curves = [record.points.assign(run=name) for name, record in zip(names, found, strict=True) if len(record.points)]
    problems = [(name, problem) for name, record in zip(names, found, strict=True) for problem in record.problems]
    runs = _table(found, params)
    return Records(
        runs=runs.assign(cell=_cells(runs, params)),
        curves=(pd.concat(curves, ignore_index=True) if curves else pd.DataFrame(columns=_POINT).assign(run=""))[
            ["run", *_POINT]
        ],
        environment=pd.DataFrame([record.environment for record in found], index=names, dtype=object),
        params=params,
        problems=pd.DataFrame(problems, columns=["run", "problem"]),
        unstarted=unstarted(folder),
    )


def select(records: Records, sweep: str) -> Records:
    """The runs of one sweep.

    Raises:
        ValueError: no run belongs to it.
    """
    known = sorted({name for names in records.runs["sweeps"] for name in names} | set(records.unstarted["sweep"]))
    if sweep not in known:
        raise ValueError(
            f"no run belongs to the sweep {sweep!r}{nearest(sweep, known)}; sweeps: {', '.join(known) or 'none'}"
        )
    own = records.unstarted[records.unstarted["sweep"] == sweep]
    runs = records.runs[[sweep in names for names in records.runs["sweeps"]]]
    # A rate may have been chosen in another sweep, which came upon the same run.
    chosen = [choice if isinstance(choice, dict) and sweep in choice.get("sweeps", [sweep]) else None
              for choice in runs["tuning"]]  # fmt: skip
    return only(replace(records, unstarted=own), runs.assign(tuning=pd.Series(chosen, runs.index, dtype=object)))


def only(records: Records, runs: pd.DataFrame) -> Records:
    """`records` with these rows of `runs` alone. Cells are named anew, by what varies among them."""
    return replace(
        records,
        runs=runs.assign(cell=_cells(runs, records.params)),
        curves=records.curves[records.curves["run"].isin(runs["run"])],
        environment=records.environment[records.environment.index.isin(runs["run"])].dropna(axis="columns", how="all"),
        problems=records.problems[records.problems["run"].isin(runs["run"])],
    )


def counted(records: Records) -> Records:
    """The runs that means are taken over: finished, and one a cell and seed (the one started last)."""
    runs = records.runs[records.runs["status"] == FINISHED]
    newest = runs.sort_values("started", kind="stable", na_position="first")
    # A run whose seed is not recorded stands for itself.
    seed = newest["seed"].where(newest["seed"].notna(), newest["run"]).map(str)
    runs = newest[~(newest["cell"] + "\n" + seed).duplicated(keep="last")].sort_index()
    return replace(records, runs=runs, curves=records.curves[records.curves["run"].isin(runs["run"])])


@dataclass(frozen=True)
class _Record:
    facts: dict[str, Any]
    params: dict[str, Any]
    environment: dict[str, Any]
    points: pd.DataFrame
    problems: list[str]
    trial: bool


def _read(path: Path) -> _Record:
    status, status_fault = _mapping(path / "status.json")
    status, types_fault = _typed(status)
    params, params_fault = _mapping(path / "params.json")
    environment, environment_fault = _mapping(path / "environment.json")
    logged, points_faults = _points(path / "metrics.jsonl")
    # A run that was killed and resumed from a checkpoint logs some points twice: the later one led to the result.
    points = logged[logged["value"].abs() < math.inf].drop_duplicates(["metric", "tokens"], keep="last")
    tuning, tuning_fault = _tuning(path / "tuning.json")
    # Without params nobody knows which cell the run belongs to, whatever its status.
    unusable = status_fault or params_fault
    facts = {
        **{name: status.get(name) for name in _FACTS},
        "run": path.name,
        "folder": str(path),
        "status": UNKNOWN if unusable else str(status.get("status") or UNKNOWN),
        "reason": unusable or status.get("reason"),
        "sweeps": tuple(map(str, status.get("sweeps") or filter(None, [status.get("sweep")]))),
        "last_step": logged["step"].max(),
        "last_tokens": logged["tokens"].max(),
        "earlier_keys": tuple(status.get("earlier_keys") or ()),
        "tuning": tuning or None,
    }
    found = (status_fault, types_fault, params_fault, environment_fault, tuning_fault, *points_faults)
    faults = [fault for fault in found if fault]
    known = {
        name: _plain(v) for name, v in params.items() if name not in _FACTS and not (name in _PARAMS and v is None)
    }
    return _Record(facts, known, environment, points, faults, status.get("trial") is True)


def _mapping(path: Path) -> tuple[dict[str, Any], str | None]:
    """The mapping in a JSON file, and what is wrong with it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}, f"{path.name} is missing"
    except (OSError, ValueError) as error:
        return {}, f"{path.name} is not readable ({str(error).splitlines()[0]})"
    return (content, None) if isinstance(content, dict) else ({}, f"{path.name} holds no mapping")


def _typed(status: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    """A status without the entries that are not of their type, and which they were."""
    types = dict.fromkeys(_TEXTS, str) | {"sweeps": list}
    wrong = [name for name, kind in types.items() if not isinstance(status.get(name), kind | None)]
    fault = f"status.json has no sense in {', '.join(wrong)}: left out" if wrong else None
    return {name: value for name, value in status.items() if name not in wrong}, fault


def _tuning(path: Path) -> tuple[dict[str, Any], str | None]:
    """How the learning rate was chosen, and what is wrong with the file; it is there only where it was."""
    if not path.exists():
        return {}, None
    tuning, fault = _mapping(path)
    lacking = ", ".join(sorted(_TUNING - tuning.keys()))
    return ({}, fault or f"{path.name} lacks {lacking}: left out") if lacking else (tuning, fault)


def _points(path: Path) -> tuple[pd.DataFrame, list[str]]:
    """[metric, step, tokens, value] in the order of logging, finite or not, and what is wrong with the file."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return pd.DataFrame(columns=_POINT), [f"{path.name} is missing: nothing was logged"]
    rows: list[tuple[str, int, int, float]] = []
    broken = []
    for number, line in enumerate(lines, start=1):
        try:
            rows += list(_values(line))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            broken.append(str(number))
    points = pd.DataFrame(rows, columns=_POINT)
    faults = [f"{path.name} is broken in line {', '.join(broken)} of {len(lines)}: left out"] if broken else []
    infinite = points[~(points["value"].abs() < math.inf)]
    counts = infinite.groupby("metric").size()
    faults += [f"{metric} is not finite in {n} places: left out" for metric, n in counts.items()]
    return points, faults


def _values(line: str) -> Iterator[tuple[str, int, int, float]]:
    """(metric, step, tokens, value) of one logging event."""
    event = json.loads(line)
    step, tokens = int(event["step"]), int(event["tokens"])
    for metric, value in event["metrics"].items():
        yield metric, step, tokens, float(value)


def _plain(value: Any) -> Any:
    """A param as one hashable value, never taken for a missing one: null, booleans and lists as JSON text.

    1.0 is 1, as in a run's key.
    """
    value = canonical(value)
    return json.dumps(value) if value is None or isinstance(value, (bool, list, dict)) else value


def _table(found: list[_Record], params: tuple[str, ...]) -> pd.DataFrame:
    """One row a run."""
    index = range(len(found))
    facts = pd.DataFrame([record.facts for record in found], index=index, columns=_FACTS, dtype=object)
    numbers = ["seconds", "last_step", "last_tokens"]
    facts[numbers] = facts[numbers].apply(pd.to_numeric, errors="coerce")
    # As objects, so that an integer stays one beside a run that lacks it.
    given = pd.DataFrame([record.params for record in found], index=index, columns=params, dtype=object)
    last = [record.points.groupby("metric", sort=False)["value"].last() for record in found]
    metrics = pd.DataFrame([values.to_dict() for values in last], index=index, dtype=float)
    return pd.concat([facts, given, metrics.drop(columns=[*_FACTS, *params], errors="ignore")], axis="columns")


def _cells(runs: pd.DataFrame, params: tuple[str, ...]) -> pd.Series:
    """The name of every run's cell: its stack, and the params that vary within the runs of one stack.

    A cell is all params without the seed; `stack` is a label. Two cells of one label differ in a param, which is then
    in the name.
    """
    label = runs["stack"].fillna(runs["layout"]).where(runs["status"] != UNKNOWN).fillna("run " + runs["run"]).map(str)
    given = runs[[name for name in params if name not in ("seed", "stack")]].map(str, na_action="ignore")
    for name in {"layout", "model.layout"} & set(given):
        given[name] = [_one_spelling(text, depth) for text, depth in zip(given[name], _depths(runs), strict=True)]
    # A finished run that lacks what others of its stack have comes from another version. Of a run whose options were
    # refused few params are known, and a stack has none for mixers that it does not use: that makes no difference.
    finished = (runs["status"] == FINISHED).to_numpy()[:, None]
    given = given.mask(given.isna() & finished & given.notna().groupby(label).transform("any"), "?")
    inside = pd.Series("", index=runs.index)
    for name, brief in _varying(given, label).items():
        inside = inside + (", " + brief + "=" + given[name]).fillna("")
    return label.where(inside == "", label + " (" + inside.str.removeprefix(", ") + ")")


def _depths(runs: pd.DataFrame) -> pd.Series:
    return runs["n_layers"] if "n_layers" in runs else pd.Series(None, index=runs.index, dtype=object)


@cache
def _one_spelling(text: Any, depth: Any) -> Any:
    """One layout for all spellings of a stack of layers: seeds of `mha + mha` and `2*mha` are of one cell."""
    try:
        return layout.describe(layout.layers(text, depth if isinstance(depth, int) else None))
    # Of a run whose options were refused, it may be anything.
    except (ValueError, TypeError):
        return text


def _varying(given: pd.DataFrame, label: pd.Series) -> dict[str, str]:
    """The params that vary within a label -> their short names. A param that repeats another one is left out."""
    varying = [name for name in given if (given[name].groupby(label).nunique() > 1).any()]
    # Params have the important options twice: under a short name and under their place in the config.
    varying = [
        name for i, name in enumerate(varying) if not any(given[name].equals(given[other]) for other in varying[:i])
    ]
    short = [name.rsplit(".")[-1] for name in varying]
    return {name: brief if short.count(brief) == 1 else name for name, brief in zip(varying, short, strict=True)}
