"""The tables of a report for other programs: one JSON document, a CSV of all results, or Markdown."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pandas as pd

from analysis import sheets, tables, tuning
from analysis.comparison import Comparison, by_task
from analysis.runs import Records
from analysis.sheets import Sheet
from experiments.metrics import metric


def document(kind: str, records: Records, command: str) -> str:
    """The report as text of one of `FORMATS`."""
    return FORMATS[kind](records, by_task(records) if len(records.runs) else [], command)


def results(comparisons: Sequence[Comparison]) -> pd.DataFrame:
    """[task, cell, metric, unit, better, mean, half, n, seeds, group, deciding], one row a cell and metric it has.

    `half` is half the t interval over the seeds, NaN for one; `group` is that of the deciding metric of the task.
    """
    rows = [
        {"task": about.task, "cell": cell, "metric": name, "unit": metric(name).unit, "better": metric(name).better,
         "mean": found.mean, "half": found.half, "n": found.n, "seeds": about.sizes[cell],
         "group": about.groups[cell], "deciding": name in about.quality[:1]}
        for about in comparisons
        for name in dict.fromkeys([*about.quality, *about.costs, *about.counted.metrics])
        for cell, found in tables.summary(about.counted, [name])[name].items() if found.n
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=list(_RESULTS))


_RESULTS = ("task", "cell", "metric", "unit", "better", "mean", "half", "n", "seeds", "group", "deciding")


def _csv(_: Records, comparisons: Sequence[Comparison], __: str) -> str:
    return results(comparisons).to_csv(index=False).rstrip("\n")


def _json(records: Records, comparisons: Sequence[Comparison], command: str) -> str:
    found = {
        "command": command,
        "results": _rows(results(comparisons)),
        "tasks": [_task(about) for about in comparisons],
        "unstarted": _rows(records.unstarted),
        "problems": _rows(records.problems),
        "environment": _rows(tables.environment(records)),
        "commands": list(dict.fromkeys(records.runs["command"].dropna())),
    }
    return json.dumps(found, indent=1, allow_nan=False)


def _task(about: Comparison) -> dict[str, Any]:
    curves = [
        found.assign(metric=name, cell=cell) for name, cells in about.curves.items() for cell, found in cells.items()
    ]
    return {
        "task": about.task,
        "budget": about.budget,
        "findings": about.findings,
        "warnings": about.warnings,
        "differences": _rows(about.pairs),
        "fronts": _fronts(about),
        "not_counted": _rows(tables.not_counted(about.records)),
        "tuning": {cell: list(filter(None, every)) for cell, every in tuning.choices(about.counted).items()},
        "curves": _rows(pd.concat(curves)) if curves else [],
    }


def _fronts(about: Comparison) -> dict[str, dict[str, str]]:
    """cost -> cell -> front, behind or dominated, of the deciding quality."""
    return {cost: {cell: found.name.lower() for cell, found in about.front(cost).items()} for cost in about.costs}


def _rows(table: pd.DataFrame) -> list[dict[str, Any]]:
    """A list of objects; what is not known is null."""
    found: list[dict[str, Any]] = json.loads(table.to_json(orient="records", double_precision=15))
    return found


def _markdown(records: Records, comparisons: Sequence[Comparison], command: str) -> str:
    lines = list(_overview(comparisons))
    for about in comparisons:
        lines += [f"# {len(about.cells)} cells on {sheets.plain(about.task)}: {about.budget}", ""]
        lines += [*(f"- {sheets.plain(sentence)}" for sentence in (*about.findings, *about.warnings)), ""]
        lines += [part for title, sheet in _sheets(about) for part in _titled(title, sheet)]
    if len(records.unstarted):
        jobs = (f"- {sheets.plain(f'{row.sweep}: {row.job}')}" for row in records.unstarted.itertuples())
        lines += ["## Not begun", "", *jobs, ""]
    return "\n".join([*lines, f"Made by `{command}`"])


def _overview(comparisons: Sequence[Comparison]) -> Iterator[str]:
    sheet = sheets.overview(comparisons)
    if len(sheet.columns) > 2:
        yield from _titled("All tasks", sheet)
        yield from ("\\* the best of its column, and what cannot be told apart from it", "")


def _sheets(about: Comparison) -> list[tuple[str, Sheet]]:
    return [
        ("Quality and cost", sheets.cells(about)),
        ("Differences to the best", sheets.to_best(about)),
        ("Other pairs", sheets.pairs(about)),
        ("Cost of tuning", sheets.tuned(about)),
        ("Not counted", sheets.left(about)),
    ]


def _titled(title: str, sheet: Sheet) -> list[str]:
    return [f"## {title}", "", sheets.markdown(sheet)] if sheet.rows else []


FORMATS: dict[str, Callable[[Records, Sequence[Comparison], str], str]] = {
    "json": _json,
    "csv": _csv,
    "md": _markdown,
}
