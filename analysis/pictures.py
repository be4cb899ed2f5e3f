"""Which pictures a comparison has: those that there are numbers for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
import plotly.graph_objects as go

from analysis import canvas, depth, extrapolation, plots, sheets, tables
from analysis.canvas import Style
from analysis.comparison import Comparison, by_task
from analysis.runs import Records
from analysis.statistics import LEVEL
from experiments.metrics import metric

# What a cell costs, in the order of the pictures.
DRAWN_COSTS = (
    "complexity/flops_per_token_train", "complexity/parameters", "complexity/state_bytes", "measured/decode_ms",
)  # fmt: skip


@dataclass(frozen=True)
class Picture:
    """One picture with the words around it.

    Attributes:
        slug: its name in files and links, unlike that of any other picture of its comparison.
    """

    slug: str
    title: str
    caption: str
    figure: go.Figure


def figures(records: Records) -> dict[str, go.Figure]:
    """The pictures of the report by slug, titled, for use outside it; with several tasks, slugs start with the task."""
    comparisons = by_task(records) if len(records.runs) else []
    looks = styles(comparisons)
    found = {picture.slug: _titled(picture) for picture in overview(comparisons, looks)}
    for about in comparisons:
        start = f"{_slug(about.task)}-" if len(comparisons) > 1 else ""
        found |= {start + picture.slug: _titled(picture, about.task) for picture in pictures(about, looks)}
    return found


def _titled(picture: Picture, task: str = "") -> go.Figure:
    """The figure with its title, which stands outside of it in the report."""
    figure, room = picture.figure, 30
    title = {"text": canvas.escape(f"{picture.title} ({task})" if task else picture.title), "x": 0.01, "y": 0.97}
    layout = figure.layout
    return figure.update_layout(title=title, height=layout.height + room, margin_t=layout.margin.t + room)


def styles(comparisons: Sequence[Comparison], others: pd.DataFrame | None = None) -> dict[str, Style]:
    """The looks of every cell that is counted: the same under every task.

    Args:
        others: further runs, as in `Records`, whose cells are drawn too.
    """
    tables = [about.counted.runs for about in comparisons] + ([others] if others is not None else [])
    runs = pd.concat([pd.DataFrame(columns=_LABELS), *(table[_LABELS] for table in tables)])
    return canvas.styles(runs.assign(stack=runs["stack"].fillna(runs["layout"]).map(str)))


_LABELS = ["cell", "stack", "layout"]


def overview(comparisons: Sequence[Comparison], styles: Mapping[str, Style]) -> list[Picture]:
    """One small picture a task, all with the same cells in the same order; none of one task alone."""
    known = [about for about in comparisons if about.quality and about.cells]
    if len(known) < 2:
        return []
    order = sheets.overview_cells(known)
    return [_overview(about, [cell for cell in order if cell in about.cells], styles) for about in known]


def _overview(about: Comparison, cells: Sequence[str], styles: Mapping[str, Style]) -> Picture:
    name = about.quality[0]
    found = {cell: about.summary.at[cell, name] for cell in cells}
    caption = f"From the smallest state to the largest; bars are {LEVEL:.0%} intervals over seeds."
    return Picture(f"overview-{_slug(about.task)}", about.task, caption, plots.dots(found, name, styles))


def pictures(about: Comparison, styles: Mapping[str, Style]) -> list[Picture]:
    """All pictures of one task, the most telling first."""
    return [picture for draw in _DRAWN for picture in draw(about, styles)]


def _ranking(about: Comparison, styles: Mapping[str, Style]) -> Iterator[Picture]:
    found = about.to_best
    if found.empty:
        return
    best, name = about.cells[0], about.quality[0]
    caption = (
        f"Mean difference to the best over common seeds, with its {LEVEL:.0%} t interval. Hollow: it cannot be told "
        "apart from the best once all tests of this report are corrected for; an interval may then end short of 0."
    )
    differences = {row.cell: (row.mean, row.half) for row in found.itertuples()}
    unclear = list(found.loc[~found["apart"].astype(bool), "cell"])
    yield Picture("ranking", "How far from the best", caption, plots.ranking(best, differences, unclear, name, styles))


def _difficulty(about: Comparison, styles: Mapping[str, Style]) -> Iterator[Picture]:
    if len(tables.difficulties(about.counted.metrics)) > 1:
        what = tables.AXES[tables.axis(about.counted.metrics)]
        caption = (
            f"Test accuracy against {what}; bars are {LEVEL:.0%} intervals over seeds. "
            "Points of one difficulty stand side by side only to be seen."
        )
        found, trained = tables.by_difficulty(about.counted), tables.trained(about.records)
        figure = plots.along(found, trained, "val/accuracy", (what, "test accuracy"), styles)
        yield Picture("difficulty", "Accuracy by difficulty", caption, figure)


def _lengths(about: Comparison, styles: Mapping[str, Style]) -> Iterator[Picture]:
    name, found = extrapolation.by_length(about.counted)
    if found:
        caption = (
            f"The same text in windows of several lengths; bars are {LEVEL:.0%} intervals over seeds. "
            "Points of one length stand side by side only to be seen."
        )
        trained = [extrapolation.trained_length(about.counted)]
        figure = plots.along(found, trained, name, (tables.AXES["length"], metric(name).title), styles)
        yield Picture("length", f"{_capital(metric(name).title)} by length", caption, figure)


def _depths(about: Comparison, styles: Mapping[str, Style]) -> Iterator[Picture]:
    for number, figure in enumerate(depth.heat_maps(depth.grids(about.counted, about.cells))):
        length = extrapolation.trained_length(about.counted)
        trained = f" Trained at {length} tokens." if length else ""
        caption = f"Mean test accuracy over seeds, a row a cell and length.{trained}"
        yield Picture(f"depth-{number}" if number else "depth", "Accuracy by depth and length", caption, figure)


def _learning(about: Comparison, styles: Mapping[str, Style]) -> Iterator[Picture]:
    for name, bands in about.curves.items():
        caption = f"Mean over seeds; the band is its {LEVEL:.0%} interval."
        title = f"{_capital(metric(name).title)} over training"
        yield Picture(f"learning-{_slug(name)}", title, caption, plots.learning(bands, name, styles))


def _tradeoffs(about: Comparison, styles: Mapping[str, Style]) -> Iterator[Picture]:
    """The deciding quality with its front against every cost; what is read, at its own length."""
    if not about.quality:
        return
    best = about.quality[0]
    for start in DRAWN_COSTS:
        for cost in (cost for cost in about.costs if cost.startswith(start)):
            if _decides(about, cost):
                yield _tradeoff(about, best, cost, styles)
    for name, cost in about.reads.items():
        if _decides(about, cost):
            yield _tradeoff(about, name, cost, styles)


def _decides(about: Comparison, cost: str) -> bool:
    """A cost that all cells share decides nothing."""
    return len({about.summary.at[cell, cost].mean for cell in about.cells}) > 1 or len(about.cells) == 1


def _tradeoff(about: Comparison, name: str, cost: str, styles: Mapping[str, Style]) -> Picture:
    points = {cell: (about.summary.at[cell, cost].mean, about.summary.at[cell, name]) for cell in about.cells}
    # Only the deciding quality is tested, so only there a cell can be dominated.
    front = about.front(cost) if name == about.quality[0] else {}
    corner = "Lower" if metric(name).better == "lower" else "Upper"
    caption = f"One point a cell; bars are {LEVEL:.0%} intervals over seeds. {corner} left is better and cheaper."
    if front:
        caption += (
            " The dotted line is the Pareto front. Grey: a cell that costs no more is better, and told apart. "
            "Hollow: behind the front, but not told apart from what is there."
        )
    title = f"{_capital(metric(name).title)} against {metric(cost).title}"
    figure = plots.tradeoff(points, cost, name, styles, front)
    return Picture(f"{_slug(name)}-against-{_slug(cost)}", title, caption, figure)


_DRAWN = (_ranking, _difficulty, _lengths, _depths, _tradeoffs, _learning)


def _slug(name: str) -> str:
    """eval/kv16/accuracy -> eval-kv16-accuracy"""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
