"""One self-contained HTML about a set of runs: `python -m analysis.report [--runs runs] [--sweep NAME] [--html FILE]`.

What was compared, what came out with which certainty, at what cost, and what is missing. Failed and broken runs are
listed, and two means that cannot be told apart are never ranked without saying so.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from analysis import canvas, publish, tables
from analysis.comparison import CATCH_UP, LAST, MARGIN, RESOLUTION, Comparison, by_task
from analysis.pictures import Picture, figures, pictures, styles
from analysis.runs import Records, load, select
from analysis.statistics import LEVEL
from experiments.metrics import metric

__all__ = ["build", "figures", "headline", "main"]

# Of runs that are not counted, in a terminal.
MOST_LINES = 12
TEMPLATE = Path(__file__).with_name("report.html.j2")


def build(records: Records, command: str = "python -m analysis.report") -> str:
    """The report as one HTML text that loads nothing from outside.

    Args:
        records: at least one run, finished or not.
        command: what makes this report again.
    """
    return _page(records, by_task(records), command)


def _page(records: Records, comparisons: Sequence[Comparison], command: str) -> str:
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        parts=[_part(comparison, number) for number, comparison in enumerate(comparisons)],
        runs=len(records.runs),
        problems=records.problems.to_dict("records"),
        environment=tables.environment(records).to_dict("records"),
        commands=list(dict.fromkeys(records.runs["command"].dropna())),
        command=command,
        plotly=Markup(get_plotlyjs()),
        level=f"{LEVEL:.0%}",
        resolution=RESOLUTION,
        last=f"{LAST:.0%}",
        margin=MARGIN,
        catch_up=f"{CATCH_UP:.0%}",
    )


def headline(records: Records) -> str:
    """For a terminal: of every cell its quality, training FLOPs a token and state; then what to know about them."""
    return _told(by_task(records))


def _told(comparisons: Sequence[Comparison]) -> str:
    return "\n\n".join(_headline(comparison) for comparison in comparisons)


def _headline(about: Comparison) -> str:
    telling = ("complexity/flops_per_token_train", "complexity/state_bytes", "complexity/parameters")
    costs = [name for start in telling for name in about.costs if name.startswith(start)]
    names = [*about.quality[:1], *costs[:2]]
    rows = [["cell", *(metric(name).title for name in names), "seeds", "group"]]
    for cell in about.cells:
        values = [tables.show(name, about.summary.at[cell, name], about.sizes[cell]) for name in names]
        rows.append([cell, *values, str(about.sizes[cell]), about.groups[cell]])
    lines = [f"{about.task}: {about.budget}, seeds {', '.join(about.seeds) or 'not recorded'}"]
    if about.cells:
        lines += ["", tables.text(rows), about.group_note, "", *_frontier(about)]
    lost = [f"Not counted: {row['who']}: {row['status']}, {row['reason']}" for row in _left(about)]
    if len(lost) > MOST_LINES:
        lost = [*lost[: MOST_LINES - 1], f"Not counted: {len(lost) - MOST_LINES + 1} more, listed in the report"]
    return "\n".join([*lines, *about.findings, *about.warnings, *lost])


def _frontier(about: Comparison) -> list[str]:
    """Quality at what is read for it, for a terminal, where it was tested along lengths."""
    if len(about.reads) < 2:
        return []
    rows = [["cell", *(metric(name).title for name in about.reads)]]
    for cell in about.cells:
        both = [[tables.show(name, about.summary.at[cell, name]) for name in pair] for pair in about.reads.items()]
        rows.append([cell, *map(" at ".join, both)])
    return ["Each at the bytes that attention moves for one more token behind such a row:", "", tables.text(rows), ""]


def _left(about: Comparison) -> list[dict[str, str]]:
    """The runs that no mean contains, as text: who, status, reason, tokens, folder."""
    return [
        {
            "who": f"{row.cell}, seed {row.seed}" if pd.notna(row.seed) else str(row.cell),
            "status": row.status,
            "reason": row.reason.strip().split("\n")[0],
            "tokens": f"{row.last_tokens:,.0f}" if pd.notna(row.last_tokens) else tables.NOTHING,
            "folder": row.folder if pd.notna(row.folder) else tables.NOTHING,
        }
        for row in tables.not_counted(about.records).itertuples()
    ]


def _part(about: Comparison, number: int) -> dict[str, Any]:
    """What the template says about the runs of one task."""
    looks = styles(about)
    common, differing = tables.settings(about.records)
    return {
        "about": about,
        "stacks": sorted(set(about.records.runs["stack"].dropna().map(str))),
        "options": _task_options(about.records),
        "swatches": {cell: Markup(canvas.swatch(looks[cell])) for cell in about.cells},
        "columns": [_column(name) for name in [*about.quality, *about.costs]],
        "rows": [_row(about, cell) for cell in about.cells],
        "left": _left(about),
        "pictures": [_picture(picture, f"picture-{number}-{picture.slug}") for picture in pictures(about)],
        "common": common.to_dict("records"),
        "differing": {
            "names": list(differing),
            "rows": [(cell, *map(str, row)) for cell, *row in differing.itertuples()],
        },
    }


def _picture(picture: Picture, place: str) -> dict[str, Any]:
    """Plotly's JSON escapes what could end a script element."""
    height = picture.figure.layout.height
    return {"id": place, "about": picture, "height": height, "json": Markup(picture.figure.to_json())}


def _column(name: str) -> dict[str, str]:
    known = metric(name)
    return {
        "name": name,
        "title": known.title,
        "unit": "" if known.unit in known.title else known.unit,
        "better": known.better or "",
    }


def _row(about: Comparison, cell: str) -> dict[str, Any]:
    values = {name: tables.show(name, about.summary.at[cell, name], about.sizes[cell]) for name in about.summary}
    return {
        "cell": cell,
        "seeds": about.sizes[cell],
        "values": values,
        "group": about.groups[cell],
        "learning": cell in about.learning,
    }


def _task_options(records: Records) -> list[tuple[str, str]]:
    """[(option, value)] of the task; the values of an option that differs are joined by "or"."""
    given = [name for name in records.params if name.startswith("task.") and name != "task.name"]
    found = [(name.removeprefix("task."), sorted(set(records.runs[name].dropna().map(str)))) for name in given]
    return [(option, " or ".join(values)) for option, values in found if values]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the result is the exit code: 0, or 2 where no report can be built."""
    parser = argparse.ArgumentParser(
        prog="python -m analysis.report", description="Compare runs: one self-contained HTML page."
    )
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the runs' records (default: runs)")
    parser.add_argument("--sweep", help="only the runs of this sweep (default: all runs)")
    parser.add_argument("--html", type=Path, help="the page to write (default: report.html in the folder of the runs)")
    parser.add_argument("--no-mlflow", action="store_true", help="do not put the report of a sweep into MLflow")
    given = parser.parse_args(arguments)
    page = given.html or given.runs / "report.html"
    try:
        print(_write(given.runs, given.sweep, page))
        if given.sweep is not None and not given.no_mlflow:
            print(*publish.report(given.runs, given.sweep, page), sep="\n")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _write(runs: Path, sweep: str | None, page: Path) -> str:
    """Writes the report and returns what to print."""
    records = load(runs)
    if records.runs.empty:
        raise ValueError(f"{runs} holds no runs; make some first: python -m experiments.train stack=mha task=mqar")
    if sweep is not None:
        records = select(records, sweep)
    options = ["--runs", str(runs), *(["--sweep", sweep] if sweep is not None else []), "--html", str(page)]
    page.parent.mkdir(parents=True, exist_ok=True)
    comparisons = by_task(records)
    command = shlex.join(["python", "-m", "analysis.report", *options])
    page.write_text(_page(records, comparisons, command), encoding="utf-8")
    return f"{_told(comparisons)}\n\nreport: {page}"


if __name__ == "__main__":
    sys.exit(main())
