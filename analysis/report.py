"""All about a set of runs: `python -m analysis.report [--runs runs] [--sweep NAME] [--html FILE]`, one HTML page.

    python -m analysis.report                          runs/report.html, and the result in the terminal
    python -m analysis.report --sweep NAME             of the runs of one sweep
    python -m analysis.report --format json|csv|md     the same tables, on standard output
    python -m analysis.report --bench runs/bench/TIME  measured times beside them (default: the newest benchmark)
    python -m analysis.report --influence              which tokens the models depend on, too: it loads one a cell

What was compared, what came out with which certainty, at what cost, and what is missing. Failed and broken runs are
listed, and two means that cannot be told apart are never ranked without saying so.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from analysis import bench, canvas, export, publish, scaling, sheets, tables
from analysis.canvas import Style
from analysis.comparison import CATCH_UP, LAST, MARGIN, RESOLUTION, Comparison, by_task
from analysis.pictures import Picture, figures, overview, pictures, styles
from analysis.runs import Records, load, select
from analysis.statistics import LEVEL
from analysis.terminal import told
from mixers.options import nearest

__all__ = ["build", "figures", "headline", "main"]

FORMATS = ("html", *export.FORMATS)
TEMPLATE = Path(__file__).with_name("report.html.j2")


def build(
    records: Records,
    command: str = "python -m analysis.report",
    measured: Records | None = None,
    missing: str = "",
    influence: bool = False,
) -> str:
    """The report as one HTML text that loads nothing from outside.

    Args:
        records: of runs, finished or not; they may be none.
        command: what makes this report again.
        measured: those of a benchmark.
        missing: why there are no runs.
        influence: look at what the models depend on, see `analysis.influence`; seconds a cell.
    """
    records = bench.joined(records, measured) if measured else records
    return _page(records, _compared(records), command, measured, missing, influence)


def headline(records: Records) -> str:
    """For a terminal: of every cell its quality, training FLOPs a token and state; then what to know about them."""
    return told(records, _compared(records))


def _compared(records: Records) -> list[Comparison]:
    return by_task(records) if len(records.runs) else []


def _page(
    records: Records,
    comparisons: Sequence[Comparison],
    command: str,
    measured: Records | None,
    missing: str,
    influence: bool,
) -> str:
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    looks = styles(comparisons, scaling.cells(measured).runs if measured else None)
    grown = bench.growth(measured, looks) if measured else None
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        missing=missing,
        parts=[_part(comparison, looks, number, influence) for number, comparison in enumerate(comparisons)],
        influence=influence,
        together=sheets.overview(comparisons),
        overview=[_picture(picture, picture.slug) for picture in overview(comparisons, looks)],
        cells=list(styles(comparisons)),
        swatches={cell: Markup(canvas.swatch(look)) for cell, look in looks.items()},
        runs=len(records.runs),
        unstarted=records.unstarted.to_dict("records"),
        problems=records.problems.to_dict("records"),
        growth=grown,
        growing=[_picture(picture, picture.slug) for picture in grown.pictures] if grown else [],
        environment=tables.environment(records).to_dict("records"),
        commands=list(dict.fromkeys(records.runs["command"].dropna())),
        command=command,
        plotly=Markup(get_plotlyjs()),
        level=f"{LEVEL:.0%}",
        mistakes=f"{1 - LEVEL:.0%}",
        resolution=RESOLUTION,
        last=f"{LAST:.0%}",
        margin=MARGIN,
        catch_up=f"{CATCH_UP:.0%}",
    )


def _part(about: Comparison, looks: Mapping[str, Style], number: int, influence: bool) -> dict[str, Any]:
    """What the template says about the runs of one task."""
    common, differing = tables.settings(about.records)
    maps, unmapped = _influence(about, looks) if influence else ([], [])
    return {
        "about": about,
        "stacks": sorted(set(about.records.runs["stack"].dropna().map(str))),
        "options": _task_options(about.records),
        "cells": sheets.cells(about),
        "to_best": sheets.to_best(about),
        "pairs": sheets.pairs(about),
        "tuning": sheets.tuned(about),
        "left": sheets.left(about),
        "pictures": [_picture(picture, f"{number}-{picture.slug}") for picture in pictures(about, looks)],
        "maps": [_picture(picture, f"{number}-{picture.slug}") for picture in maps],
        "unmapped": unmapped,
        "common": common.to_dict("records"),
        "differing": {
            "names": list(differing),
            "rows": [(cell, *map(str, row)) for cell, *row in differing.itertuples()],
        },
    }


def _influence(about: Comparison, looks: Mapping[str, Style]) -> tuple[list[Picture], list[str]]:
    # It reads checkpoints, and so imports what trains.
    from analysis.influence import section

    return section(about.counted, looks)


def _picture(picture: Picture, place: str) -> dict[str, Any]:
    """Plotly's JSON escapes what could end a script element."""
    return {
        "id": f"picture-{place}",
        "slug": picture.slug,
        "title": picture.title,
        "caption": picture.caption,
        "height": picture.figure.layout.height,
        "json": Markup(picture.figure.to_json()),
    }


def _task_options(records: Records) -> list[tuple[str, str]]:
    """[(option, value)] of the task; the values of an option that differs are joined by "or"."""
    given = [name for name in records.params if name.startswith("task.") and name != "task.name"]
    found = [(name.removeprefix("task."), sorted(set(records.runs[name].dropna().map(str)))) for name in given]
    return [(option, " or ".join(values)) for option, values in found if values]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code: 0; 2 where there is nothing to compare, or nowhere to write it."""
    parser = argparse.ArgumentParser(prog="python -m analysis.report", description="Compare runs.")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the runs' records (default: runs)")
    parser.add_argument("--sweep", help="only the runs of this sweep (default: all runs)")
    parser.add_argument("--format", default="html", help=f"{', '.join(FORMATS)}; all but html are printed")
    parser.add_argument("--html", type=Path, help="the page to write (default: report.html in the folder of the runs)")
    parser.add_argument("--bench", type=Path, help="records of a benchmark (default: the newest of these stacks)")
    parser.add_argument("--influence", action="store_true", help="load the models: which tokens do they depend on?")
    parser.add_argument("--no-mlflow", action="store_true", help="do not put the report of a sweep into MLflow")
    given = parser.parse_args(arguments)
    try:
        said, missing = _make(given)
    except (ValueError, OSError) as error:
        said, missing = "", str(error)
    if said:
        print(said)
    if missing:
        print(f"error: {missing}", file=sys.stderr)
    return 2 if missing else 0


def _make(given: argparse.Namespace) -> tuple[str, str]:
    """What to print, and why there is nothing to compare; then there is a page all the same, which says so."""
    if given.format not in FORMATS:
        raise ValueError(f"--format={given.format}{nearest(given.format, FORMATS)}; allowed are {', '.join(FORMATS)}")
    if given.html and given.format != "html":
        raise ValueError(f"--html={given.html} is for a page, and --format={given.format} is printed: leave one out")
    records, missing = _chosen(load(given.runs), given)
    folder = given.bench or bench.newest(given.runs, records)
    measured = bench.read(folder) if folder else None
    records = bench.joined(records, measured) if measured else records
    if given.format != "html":
        return export.document(given.format, records, _command(given)), missing
    page = given.html or given.runs / "report.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    command = _command(given, page, folder)
    comparisons = _compared(records)
    page.write_text(_page(records, comparisons, command, measured, missing, given.influence), encoding="utf-8")
    places = [f"report: {page}"]
    if given.sweep is not None and not missing and not given.no_mlflow:
        places += publish.report(records, given.runs, given.sweep, page)
    return "\n\n".join(filter(None, (told(records, comparisons), "\n".join(places)))), missing


def _chosen(records: Records, given: argparse.Namespace) -> tuple[Records, str]:
    """The runs that are asked for, and why there are none."""
    none = replace(records, runs=records.runs.iloc[:0], curves=records.curves.iloc[:0])
    if records.runs.empty:
        first = "make some first: python -m experiments.train stack=mha task=mqar"
        return none, f"{given.runs} holds no runs; {first}"
    if given.sweep is None:
        return records, ""
    try:
        chosen = select(records, given.sweep)
    except ValueError as error:
        return replace(none, problems=none.problems.iloc[:0], unstarted=none.unstarted.iloc[:0]), str(error)
    return chosen, "" if len(chosen.runs) else f"no job of the sweep {given.sweep!r} has begun"


def _command(given: argparse.Namespace, page: Path | None = None, folder: Path | None = None) -> str:
    """What makes this report again."""
    options = ["--runs", str(given.runs), *(["--sweep", given.sweep] if given.sweep is not None else [])]
    options += ["--bench", str(folder)] if folder else []
    options += ["--influence"] if given.influence else []
    options += ["--html", str(page)] if page else ["--format", given.format]
    return shlex.join(["python", "-m", "analysis.report", *options])


if __name__ == "__main__":
    sys.exit(main())
