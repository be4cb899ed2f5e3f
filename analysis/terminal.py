"""The result of a comparison as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from analysis import sheets, tables
from analysis.comparison import Comparison
from analysis.runs import Records
from experiments.metrics import metric

# Of runs that are not counted.
MOST_LINES = 12
# Characters of a cell's name in a table.
LONGEST = 48


def told(records: Records, comparisons: Sequence[Comparison]) -> str:
    """Of every cell its quality, training FLOPs a token and state; then what to know about them."""
    parts = [_headline(comparison) for comparison in comparisons]
    together = sheets.overview(comparisons)
    if len(together.columns) > 2:
        rows = [[column.title for column in together.columns], *([_brief(row[0]), *row[1:]] for row in together.rows)]
        parts.append(f"{tables.text(rows)}\n* the best of its column, and what cannot be told apart from it")
    if len(records.unstarted):
        sweeps = ", ".join(sorted(set(records.unstarted["sweep"])))
        parts.append(f"Not begun: {len(records.unstarted)} jobs of {sweeps}")
    return "\n\n".join(parts)


def _headline(about: Comparison) -> str:
    telling = ("complexity/flops_per_token_train", "complexity/state_bytes", "complexity/parameters")
    costs = [name for start in telling for name in about.costs if name.startswith(start)]
    names = [*about.quality[:1], *costs[:2]]
    rows = [["cell", *(metric(name).title for name in names), "seeds", "group"]]
    for cell in about.cells:
        values = [tables.show(name, about.summary.at[cell, name], about.sizes[cell]) for name in names]
        rows.append([_brief(cell), *values, str(about.sizes[cell]), about.groups[cell]])
    lines = [f"{about.task}: {about.budget}, seeds {', '.join(about.seeds) or 'not recorded'}"]
    if about.cells:
        lines += ["", tables.text(rows), about.group_note, "", *_frontier(about)]
    lost = [f"Not counted: {who}: {status}, {reason}" for who, status, reason, *_ in sheets.left(about).rows]
    if len(lost) > MOST_LINES:
        lost = [*lost[: MOST_LINES - 1], f"Not counted: {len(lost) - MOST_LINES + 1} more, listed in the report"]
    return "\n".join([*lines, *about.findings, *about.warnings, *lost])


def _brief(cell: str) -> str:
    """A long name without its middle: cells of one stack differ at the end."""
    return cell if len(cell) <= LONGEST else f"{cell[: LONGEST // 2 - 1]}…{cell[-LONGEST // 2 :]}"


def _frontier(about: Comparison) -> list[str]:
    """Quality at what is read for it, where it was tested along lengths."""
    if len(about.reads) < 2:
        return []
    rows = [["cell", *(metric(name).title for name in about.reads)]]
    for cell in about.cells:
        both = [[tables.show(name, about.summary.at[cell, name]) for name in pair] for pair in about.reads.items()]
        rows.append([_brief(cell), *map(" at ".join, both)])
    return ["Each at the bytes that attention moves for one more token behind such a row:", "", tables.text(rows), ""]
