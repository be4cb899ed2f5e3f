"""The tables of a report as rows of text, from the one source that the page, Markdown and the terminal all show."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from analysis import tables, tuning
from analysis.comparison import Comparison
from experiments.metrics import direction, format_value, metric

# All pairs of more cells than this are in the JSON alone.
MOST_PAIRED = 12
_ARROWS = {"higher": "↑ better", "lower": "↓ better", None: ""}


@dataclass(frozen=True)
class Column:
    """A head: title, a note under it (unit, what is better), the name of the metric where it is one."""

    title: str
    note: str = ""
    name: str = ""
    number: bool = True


@dataclass(frozen=True)
class Sheet:
    """Rows of text. The first column names the row, mostly a cell; `notes` says more of some."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    notes: Mapping[str, str] = field(default_factory=dict)


def cells(about: Comparison) -> Sheet:
    """Every cell with its qualities and costs, best first."""
    names = list(about.summary)
    group = [Column("Group", number=False)] if about.quality else []
    columns = [Column("Cell", number=False), *group, *map(column, names), Column("Seeds")]
    rows = []
    for cell in about.cells:
        values = [tables.show(name, about.summary.at[cell, name], about.sizes[cell]) for name in names]
        rows.append([cell, *([about.groups[cell]] if group else []), *values, str(about.sizes[cell])])
    return Sheet(columns, rows, dict.fromkeys(about.learning, "still learning at this budget"))


def column(name: str) -> Column:
    """The column of a metric: its title, its unit and what is better."""
    known = metric(name)
    unit = "" if known.unit in known.title else known.unit
    return Column(known.title, ", ".join(filter(None, (unit, _ARROWS[known.better]))), name)


def to_best(about: Comparison) -> Sheet:
    """How far every other cell is from the best."""
    best = about.cells[0] if about.cells else ""
    head = ["Cell", f"Difference to {best}", "Common seeds", "p, corrected", "Verdict"]
    rows = []
    for row in about.to_best.itertuples():
        # By the common seeds alone, where a cell may be better that is not so by the means over all of its own.
        winner = best if (row.mean < 0) == (direction(about.quality[0]) == "higher") else row.cell
        verdict = f"{winner} is better" if row.apart else "not distinguishable"
        rows.append([row.cell, _difference(about, row), str(row.n), _p(row.adjusted), verdict])
    return Sheet([Column(title, number=title not in ("Cell", "Verdict")) for title in head], rows)


def pairs(about: Comparison) -> Sheet:
    """All other pairs; none where there are too many to read."""
    head = ["Cell", "Other cell", "Difference", "Common seeds", "p, corrected", "Verdict"]
    columns = [Column(title, number=title in head[2:5]) for title in head]
    if not 3 <= len(about.cells) <= MOST_PAIRED:
        return Sheet(columns, [])
    others = about.pairs[(about.pairs["left"] != about.cells[0]) & (about.pairs["n"] > 0)]
    rows = []
    for row in others.itertuples():
        verdict = "told apart" if row.apart else "not distinguishable"
        rows.append([row.left, row.right, _difference(about, row), str(row.n), _p(row.adjusted), verdict])
    return Sheet(columns, rows)


def _difference(about: Comparison, row: object) -> str:
    """ "-0.052 ± 0.027" in the unit of the deciding metric."""
    mean, half = row.mean, row.half  # type: ignore[attr-defined]
    # Rounding leaves a sign to what is 0.
    text = f"{round(mean, 3) + 0.0:+.3f}" if abs(mean) < 1000 else f"{mean:+,.0f}"
    return text if math.isnan(half) else f"{text} ± {format_value(about.quality[0], half)}"


def _p(value: float) -> str:
    if math.isnan(value):
        return tables.NOTHING
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def overview(comparisons: Sequence[Comparison]) -> Sheet:
    """Every cell with its deciding quality on every task, from the smallest state to the largest.

    A star marks the best of a column and what cannot be told apart from it.
    """
    known = [about for about in comparisons if about.quality and about.cells]
    columns = [Column("Cell", number=False)]
    for about in known:
        shown = column(about.quality[0])
        columns.append(Column(f"{about.task}: {shown.title}", shown.note, shown.name))
    rows = [[cell, *(_starred(about, cell) for about in known)] for cell in overview_cells(known)]
    return Sheet(columns, rows)


def overview_cells(comparisons: Sequence[Comparison]) -> list[str]:
    """The cells of all tasks, from the smallest state to the largest; of one size, in the order of the first task."""
    found = list(dict.fromkeys(cell for about in comparisons for cell in about.cells))
    return sorted(found, key=lambda cell: min((_state(about, cell) for about in comparisons), default=math.inf))


def _state(about: Comparison, cell: str) -> float:
    """Bytes; infinite where unknown."""
    names = [name for name in about.costs if name.startswith("complexity/state_bytes")]
    if cell not in about.cells or not names or not about.summary.at[cell, names[0]].n:
        return math.inf
    return float(about.summary.at[cell, names[0]].mean)


def _starred(about: Comparison, cell: str) -> str:
    if cell not in about.cells or not about.summary.at[cell, about.quality[0]].n:
        return tables.NOTHING
    top = cell == about.cells[0] or cell in about.same[about.cells[0]]
    return tables.show(about.quality[0], about.summary.at[cell, about.quality[0]], about.sizes[cell]) + " *" * top


def left(about: Comparison) -> Sheet:
    """The runs that no mean contains."""
    rows = []
    for row in tables.not_counted(about.records).to_dict("records"):
        known = {name: value for name, value in row.items() if value == value and value is not None}
        who = f"{row['cell']}, seed {known['seed']}" if "seed" in known else str(row["cell"])
        tokens = f"{known['last_tokens']:,.0f}" if "last_tokens" in known else tables.NOTHING
        reason = (row["reason"].strip().splitlines() or [""])[0]
        rows.append([who, row["status"], reason, tokens, known.get("folder", tables.NOTHING)])
    titles = ("Run", "Status", "Reason", "Training tokens", "Record")
    return Sheet([Column(title, number=title == "Training tokens") for title in titles], rows)


def tuned(about: Comparison) -> Sheet:
    """How the learning rate of every cell was chosen, and what that cost."""
    titles = ("Cell", "Learning rate", "Rates tried", "Runs", "Chosen by", "Training tokens", "FLOPs", "Seconds")
    rows = []
    for cell, record in ((cell, one) for cell, every in tuning.choices(about.counted).items() for one in every if one):
        by = f"{metric(record['monitor']).title}, seeds {', '.join(map(str, record['seeds']))}"
        spent = [f"{record['tokens']:,}", format_value("complexity/flops_per_token_train", record["flops"])]
        tried = [str(len(record["scores"])), str(len(record["runs"]))]
        rows.append([cell, f"{record['lr']:g}", *tried, by, *spent, f"{record['seconds']:,.0f}"])
    return Sheet([Column(title, number=title not in ("Cell", "Chosen by")) for title in titles], rows)


def markdown(sheet: Sheet) -> str:
    """As a table of Markdown; nothing where there is no row."""
    if not sheet.rows:
        return ""
    heads = [" ".join(filter(None, (c.title, f"({c.note})" if c.note else ""))) for c in sheet.columns]
    rules = ["--:" if c.number else "---" for c in sheet.columns]
    noted = [[row[0] + (f" ({sheet.notes[row[0]]})" if row[0] in sheet.notes else ""), *row[1:]] for row in sheet.rows]
    return "\n".join(f"| {' | '.join(map(plain, line))} |" for line in (heads, rules, *noted)) + "\n"


def plain(text: str) -> str:
    """Names come from users: no bar or new line ends a cell and no markup begins."""
    text = text.replace("\n", " ")
    for character in "\\|<*_`[":
        text = text.replace(character, f"\\{character}" if character != "<" else "&lt;")
    return text
