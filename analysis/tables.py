"""Tables of a comparison: the cells with what they reach and cost, what is not counted and why, the environment."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from analysis.runs import FINISHED, Records, counted
from analysis.statistics import Interval, interval
from experiments.metrics import format_value, metric

NOTHING = "–"
# What the numbers in names of suites count, such as eval/kv16/accuracy; the option task.kv says what was trained.
AXES = {
    "kv": "key-value pairs to remember",
    "length": "tokens of a row",
    "letters": "letters to copy",
    "copies": "tokens to copy",
    "writes": "writes of keys",
    "noise": "percent of noise",
}


def axis(metrics: Iterable[str]) -> str:
    """Which of `AXES` the suites with these metrics are along; kv where along none."""
    words = {match[1] for match in map(re.compile(r"eval/([a-z]+)\d+/accuracy").fullmatch, metrics) if match}
    return next((word for word in AXES if word in words), "kv")


def difficulties(metrics: Iterable[str]) -> dict[int, str]:
    """Difficulty -> the metric with the accuracy at it, from easy to hard; without 0, as its scale is logarithmic."""
    pattern = re.compile(rf"eval/{axis(metrics)}([1-9]\d*)/accuracy")
    found = {int(match[1]): match[0] for match in map(pattern.fullmatch, metrics) if match}
    return dict(sorted(found.items()))


def spelled(name: str, metrics: Iterable[str]) -> str:
    """What the number in the name of a suite counts: " (16 key-value pairs to remember)"; empty where it has none."""
    return next((f" ({n} {AXES[axis(metrics)]})" for n, one in difficulties(metrics).items() if one == name), "")


def trained(records: Records) -> list[int]:
    """The difficulties that some run trained on; empty where that is not recorded."""
    word = axis(records.metrics)
    option = f"task.{word}"
    given = records.runs[option].dropna() if option in records.runs else []
    scale = 100 if word == "noise" else 1
    numbers = [number for text in given for number in re.findall(r"\d+(?:\.\d+)?", str(text))]
    return sorted({round(scale * float(number)) for number in numbers})


def quality(records: Records) -> list[str]:
    """The metrics that say how good a run is, the one to compare by first.

    Accuracy at the hardest difficulty that was trained, then at those beyond it; without difficulties the accuracies of
    the test suites, else their bits per byte, else their losses, else what validation has.
    """
    known = records.metrics
    by_pairs = difficulties(known)
    if by_pairs:
        most = max((kv for kv in by_pairs if kv in trained(records)), default=max(by_pairs))
        return [by_pairs[most], *(name for kv, name in by_pairs.items() if kv > most)]
    test = [rf"eval/[\w.-]+/{name}" for name in ("accuracy", "bits_per_byte", "loss")]
    for pattern in (*test, r"val/accuracy", r"val/loss"):
        found = [name for name in known if re.fullmatch(pattern, name)]
        if found:
            return found
    return []


def costs(records: Records) -> list[str]:
    """The metrics that say what a run costs; the state is taken at the task's length where it was counted there."""
    known = records.metrics
    states = {
        int(name.rsplit("_", 1)[1]): name for name in known if re.fullmatch(r"complexity/state_bytes_at_\d+", name)
    }
    length = _number(records.runs.get("task.length"))
    state = states.get(length or 0) or (states[max(states)] if states else None)
    times = [name for name in known if name.startswith("measured/decode_ms_at_")]
    decode = max(times, key=lambda name: int(name.rsplit("_", 1)[1]), default=None)
    wanted = [
        "complexity/parameters",
        "complexity/flops_per_token_forward",
        "complexity/flops_per_token_train",
        state,
        *reads(records).values(),
        "measured/train_tokens_per_second",
        decode,
    ]
    return [name for name in wanted if name in known]


def reads(records: Records) -> dict[str, str]:
    """Metric of quality -> what attention moves for one more token behind such a row, where that was counted.

    Suites along lengths are each at their own; otherwise the first metric of quality is at the task's length. Only
    where every run has attention: what other mixers move is not in this figure, and 0 bytes beside it would seem free.
    """
    names = quality(records)
    along = {name: re.fullmatch(r"eval/length(\d+)/accuracy", name) for name in names}
    lengths = {name: int(match[1]) for name, match in along.items() if match}
    lengths = lengths or dict.fromkeys(names[:1], _number(records.runs.get("task.length")) or 0)
    found = {name: f"complexity/decode_attention_bytes_at_{length}" for name, length in lengths.items()}
    return {name: cost for name, cost in found.items() if cost in records.metrics and all(records.values(cost) != 0)}


def _number(values: pd.Series | None) -> int | None:
    """The integer that all runs have; None where they differ or none is known."""
    known = set() if values is None else set(values.dropna())
    return known.pop() if len(known) == 1 else None


def summary(records: Records, metrics: Sequence[str]) -> pd.DataFrame:
    """The `Interval` of every metric over the runs of every cell, best cell first.

    Args:
        records: the runs to count, see `runs.counted`.

    Returns:
        One row a cell (the index), one column a metric, sorted by the mean of the first; unknown means come last.
    """
    values = {name: records.values(name) for name in metrics}
    cells = {cell: runs.index for cell, runs in records.runs.groupby("cell")}
    rows = [[interval(values[name][index]) for name in metrics] for index in cells.values()]
    table = pd.DataFrame(rows, index=list(cells), columns=list(metrics), dtype=object)
    if table.empty:
        return table
    means = table[metrics[0]].map(lambda found: found.mean)
    return table.loc[means.sort_values(ascending=metric(metrics[0]).better == "lower", kind="stable").index]


def by_difficulty(records: Records) -> dict[str, dict[int, Interval]]:
    """cell -> difficulty -> accuracy over the counted runs."""
    pairs = difficulties(records.metrics)
    table = summary(records, list(pairs.values()))
    return {cell: {kv: table.at[cell, name] for kv, name in pairs.items()} for cell in table.index}


def show(name: str, found: Interval, runs: int | None = None) -> str:
    """An interval as text: "0.998 ± 0.004". Where not all of `runs` have the metric, their number is added.

    What is counted is exact, and measured speed varies with the machine's load, not the seed: no interval for either.
    """
    if found.n == 0:
        return NOTHING
    text = format_value(name, found.mean)
    if found.n > 1 and not name.startswith(("complexity/", "measured/")):
        text += f" ± {format_value(name, found.half)}"
    return text + (f" (n = {found.n})" if runs is not None and found.n != runs else "")


def groups(same: Mapping[str, Sequence[str]], order: Sequence[str]) -> dict[str, str]:
    """Letters for cells: two share one exactly where they cannot be told apart. Each letter is a largest such set.

    Args:
        same: cell -> the cells it cannot be told apart from.
        order: the cells, best first; letters follow it.
    Source: the compact letter display of Piepho 2004, as the maximal cliques of "cannot be told apart".
    """
    neighbours = {cell: set(same.get(cell, ())) & set(order) for cell in order}
    cliques = sorted(sorted(map(order.index, clique)) for clique in _cliques(set(), set(order), set(), neighbours))
    letters: dict[str, str] = dict.fromkeys(order, "")
    for number, clique in enumerate(cliques):
        for index in clique:
            letters[order[index]] += _letter(number)
    return letters


def _cliques(
    inside: set[str], open_: set[str], done: set[str], neighbours: Mapping[str, set[str]]
) -> Iterable[set[str]]:
    """The maximal cliques that hold `inside` (Bron and Kerbosch, with a pivot)."""
    if not open_ and not done:
        yield inside
        return
    pivot = max(open_ | done, key=lambda cell: len(neighbours[cell] & open_))
    for cell in list(open_ - neighbours[pivot]):
        yield from _cliques(inside | {cell}, open_ & neighbours[cell], done & neighbours[cell], neighbours)
        open_ = open_ - {cell}
        done = done | {cell}


def _letter(number: int) -> str:
    """0 -> a, 25 -> z, 26 -> a1, ..."""
    return chr(ord("a") + number % 26) + (str(number // 26) if number >= 26 else "")


def not_counted(records: Records) -> pd.DataFrame:
    """[cell, seed, status, reason, last_tokens, folder]: runs that no mean contains, and seeds that a cell lacks."""
    runs = records.runs
    rows = [_excuse(run) for run in runs[~runs["run"].isin(counted(records).runs["run"])].to_dict("records")]
    seeds = set(runs["seed"].dropna())
    for cell, own in runs[runs["seed"].notna()].groupby("cell")["seed"]:
        missing = sorted(seeds - set(own), key=lambda seed: (len(str(seed)), str(seed)))
        if missing:
            rows.append(
                {
                    "cell": cell,
                    "seed": ", ".join(map(str, missing)),
                    "status": "MISSING",
                    "reason": "not run; other cells have it",
                }
            )
    return pd.DataFrame(rows, columns=["cell", "seed", "status", "reason", "last_tokens", "folder"], dtype=object)


def _excuse(run: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
    reasons = {
        "RUNNING": "still running, or killed before it could say so",
        FINISHED: "a later run of this cell and seed is counted",
    }
    status = "REPEATED" if run["status"] == FINISHED else run["status"]
    return {**run, "status": status, "reason": run["reason"] or reasons.get(run["status"], "no reason was recorded")}


def environment(records: Records) -> pd.DataFrame:
    """[name, value, runs]: what the runs ran on; several rows of a name where the runs differ."""
    rows = []
    for name in records.environment:
        texts = (
            records.environment[name].dropna().map(lambda value: value if isinstance(value, str) else json.dumps(value))
        )
        rows += [(name, text, runs) for text, runs in texts.value_counts().items()]
    return pd.DataFrame(rows, columns=["name", "value", "runs"])


def settings(records: Records) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The params that all runs have in common, [name, value]; and the others, one row a cell."""
    given = records.runs[[name for name in records.params if name not in ("seed", "stack")]].map(
        str, na_action="ignore"
    )
    differing = [name for name in given if given[name].nunique(dropna=False) > 1]
    common = given.drop(columns=differing).iloc[0].dropna()
    cells = given[differing].groupby(records.runs["cell"], sort=True).first()
    return pd.DataFrame({"name": common.index, "value": common.to_numpy()}), cells


def text(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as aligned columns for a terminal; the first row is the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
