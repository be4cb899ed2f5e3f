"""The pictures of a comparison, as Plotly figures that say everything without a mouse."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from analysis import canvas
from analysis.canvas import Style
from analysis.pareto import Standing
from analysis.statistics import Interval
from experiments.metrics import format_value, metric

_GREY = "#8a9099"


def learning(bands: Mapping[str, pd.DataFrame], name: str, styles: Mapping[str, Style]) -> go.Figure:
    """Learning curves: the mean over seeds as a line, its interval as a band, over training tokens.

    Args:
        bands: cell -> `statistics.band` of the metric `name`.
    """
    bands = {cell: band for cell, band in bands.items() if len(band)}
    figure = canvas.frame("training tokens", canvas.axis_title(name), bands)
    last = max((band["tokens"].iloc[-1] for band in bands.values()), default=1)
    canvas.ranges(figure, (0, last * 1.04), name, [value for band in bands.values() for value in band["mean"]])
    for cell, band in bands.items():
        canvas.area(figure, cell, band[band["half"].notna()], styles[cell].colour)
    for cell, band in bands.items():
        # Few points are measurements to be seen; many are a line.
        figure.add_scatter(
            x=band["tokens"],
            y=band["mean"],
            mode="lines+markers" if len(band) <= 12 else "lines",
            **canvas.look(styles[cell], cell, size=7),
            hovertemplate=canvas.hover(cell, "%{x:,} tokens", f"{metric(name).title}: %{{y:.4g}}"),
        )
    last = {cell: (band["tokens"].iloc[-1], band["mean"].iloc[-1]) for cell, band in bands.items()}
    canvas.names(figure, last, styles)
    return figure


def along(
    found: Mapping[str, Mapping[int, Interval]],
    trained: Sequence[int],
    name: str,
    titles: tuple[str, str],
    styles: Mapping[str, Style],
) -> go.Figure:
    """Quality against a number, such as pairs to remember or tokens of a row; numbers never trained are shaded.

    Args:
        found: cell -> number -> quality over seeds.
        trained: the numbers in training; empty where unknown, then nothing is shaded.
        name: a metric of the same kind as the quality.
        titles: what is counted by the numbers, and the quality: "key-value pairs to remember", "test accuracy".
    """
    found = {cell: {at: i for at, i in row.items() if i.n} for cell, row in found.items()}
    found = {cell: row for cell, row in found.items() if row}
    numbers = sorted({at for row in found.values() for at in row})
    figure = canvas.frame(titles[0], canvas.axis_title(name, titles[1]), found)
    if not numbers:
        return figure
    ends = (math.log10(numbers[0]) - 0.1, math.log10(numbers[-1]) + 0.16)
    canvas.close_ranges(figure, ends, name, [i for row in found.values() for i in row.values()])
    shown = numbers[:: math.ceil(len(numbers) / 8)]
    figure.update_xaxes(type="log", tickvals=shown, ticktext=[f"{at:,}" for at in shown])
    if trained:
        _shade(figure, numbers, trained)
    # Side by side, so that cells of equal quality do not hide each other.
    shifts = dict(zip(found, np.linspace(-0.035, 0.035, max(len(found), 2)), strict=False))
    for cell, row in found.items():
        figure.add_scatter(
            x=[at * 10 ** shifts[cell] for at in row],
            y=[i.mean for i in row.values()],
            error_y=canvas.bars(list(row.values())),
            mode="lines+markers",
            **canvas.look(styles[cell], cell),
            customdata=list(row),
            hovertemplate=canvas.hover(cell, f"%{{customdata:,}} {titles[0]}", f"{titles[1]}: %{{y:.4g}}"),
        )
    last = {cell: (max(row) * 10 ** shifts[cell], row[max(row)].mean) for cell, row in found.items()}
    canvas.names(figure, last, styles)
    return figure


def tradeoff(
    points: Mapping[str, tuple[float, Interval]],
    cost: str,
    name: str,
    styles: Mapping[str, Style],
    standings: Mapping[str, Standing] | None = None,
) -> go.Figure:
    """Quality against a cost, one point a cell.

    Args:
        points: cell -> (its `cost`, its quality `name` over seeds).
        standings: cell -> its place by the Pareto front, which is drawn then; None: no front.
    """
    points = {cell: (x, i) for cell, (x, i) in points.items() if i.n and x > 0}
    standings = standings or {}
    figure = canvas.frame(metric(cost).title, canvas.axis_title(name), points)
    ends = canvas.cost_axis(figure, cost, [x for x, _ in points.values()])
    canvas.close_ranges(figure, ends, name, [i for _, i in points.values()])
    _front(figure, [(x, i.mean) for cell, (x, i) in points.items() if standings.get(cell) is Standing.FRONT], ends)
    for cell, (x, i) in points.items():
        standing = standings.get(cell, Standing.FRONT)
        figure.add_scatter(
            x=[x],
            y=[i.mean],
            error_y=canvas.bars([i]),
            mode="markers",
            **_stand(canvas.look(styles[cell], cell, size=12), standing),
            customdata=[format_value(cost, x)],
            hovertemplate=canvas.hover(
                cell, f"{metric(name).title}: %{{y:.4g}}", "%{customdata}", *([standing.value] if standings else [])
            ),
        )
    canvas.names(figure, {cell: (x, i.mean) for cell, (x, i) in points.items()}, styles)
    return figure


def _stand(look: dict[str, Any], standing: Standing) -> dict[str, Any]:
    """The looks of a point by its place: hollow behind the front, grey where it is dominated."""
    marker = dict(look["marker"])
    if standing is Standing.BEHIND:
        marker |= {"symbol": marker["symbol"] + "-open", "line": {"width": 2}}
    if standing is Standing.DOMINATED:
        marker |= {"color": _GREY, "opacity": 0.6}
    return look | {"marker": marker}


def _front(figure: go.Figure, points: Sequence[tuple[float, float]], ends: tuple[float, float]) -> None:
    """The best quality at each cost or less, as steps up to the right edge."""
    if points:
        costs, quality = zip(*sorted(points), strict=True)
        line = {"color": _GREY, "width": 1.5, "shape": "hv", "dash": "dot"}
        steps = {"x": [*costs, 10 ** ends[1]], "y": [*quality, quality[-1]]}
        figure.add_scatter(**steps, mode="lines", line=line, hoverinfo="skip")


def ranking(
    best: str,
    differences: Mapping[str, tuple[float, float]],
    unclear: Collection[str],
    name: str,
    styles: Mapping[str, Style],
) -> go.Figure:
    """How far every cell is from the best, paired by seed; hollow where the two cannot be told apart.

    Args:
        differences: cell -> (its mean difference to the best, half its interval), best first, without the best.
        unclear: the cells that cannot be told apart from the best.
    """
    about = metric(name)
    unit = f" ({about.unit})" if about.unit else ""
    figure = canvas.frame(f"difference{unit}", f"{about.title}: difference to {canvas.brief(best)}", {})
    canvas.row_labels(figure, [best, *differences])
    figure.update_xaxes(zeroline=True, showgrid=True)
    for row, (cell, (mean, half)) in enumerate(({best: (0.0, math.nan)} | dict(differences)).items()):
        look = canvas.look(styles[cell], cell, size=11)
        figure.add_scatter(
            x=[mean],
            y=[row],
            error_x=canvas.bars([Interval(mean, half, 2)]),
            mode="markers",
            **(_stand(look, Standing.BEHIND) if cell in unclear else look),
            hovertemplate=canvas.hover(cell, "%{x:+.4g}" + ("" if math.isnan(half) else f" ± {half:.2g}")),
        )
    return figure


def dots(found: Mapping[str, Interval], name: str, styles: Mapping[str, Style]) -> go.Figure:
    """One quality of every cell, in rows; the axis starts at 0, so that what is nearly equal looks it.

    Args:
        found: cell -> its quality `name` over seeds, from top to bottom.
    """
    figure = canvas.frame("", canvas.axis_title(name), {})
    canvas.row_labels(figure, list(found))
    top = 1.0 if name.endswith("accuracy") else max((i.mean for i in found.values() if i.n), default=1.0)
    figure.update_xaxes(range=(0, 1.08 * top), showgrid=True)
    for row, (cell, i) in enumerate(found.items()):
        if i.n:
            figure.add_scatter(
                x=[i.mean],
                y=[row],
                error_x=canvas.bars([i]),
                mode="markers",
                **canvas.look(styles[cell], cell, size=11),
                hovertemplate=canvas.hover(cell, f"{metric(name).title}: %{{x:.4g}}"),
            )
    return figure


def growth(points: Mapping[str, pd.DataFrame], title: str, name: str, styles: Mapping[str, Style]) -> go.Figure:
    """What was measured against the length, both logarithmic, and the counted growth dotted through its middle.

    Args:
        points: cell -> [length, measured, counted], by length; counted NaN where nothing was.
        title: of the measured values, with their unit.
        name: a metric of the same unit, to spell values.
    """
    figure = canvas.frame("tokens of a sequence", title, points)
    if not points:
        return figure
    # Only the slopes compare: the units differ.
    counted = {
        cell: own["counted"] * np.exp(np.log(own["measured"] / own["counted"]).mean()) for cell, own in points.items()
    }
    lengths = sorted({length for own in points.values() for length in own["length"]})
    seen = pd.concat([*(own["measured"] for own in points.values()), *counted.values()]).dropna()
    ends, ticks = canvas.decades(list(seen))
    figure.update_xaxes(type="log", tickvals=lengths, ticktext=[f"{length:,}" for length in lengths])
    figure.update_xaxes(range=(math.log10(lengths[0]) - 0.05, math.log10(lengths[-1]) + 0.12))
    # The title says ms already; bytes need their prefix.
    texts = [format_value(name, tick).removesuffix(" ms") for tick in ticks]
    figure.update_yaxes(type="log", range=ends, tickvals=ticks, ticktext=texts)
    for cell, own in points.items():
        look = canvas.look(styles[cell], cell)
        hover = canvas.hover(cell, "%{x:,} tokens: %{y:.4g}")
        figure.add_scatter(x=own["length"], y=own["measured"], mode="lines+markers", **look, hovertemplate=hover)
        dotted = {"mode": "lines", "line": {"color": styles[cell].colour, "dash": "dot"}, "hoverinfo": "skip"}
        figure.add_scatter(x=own["length"], y=counted[cell], legendgroup=cell, **dotted)
    last = {cell: (own["length"].iloc[-1], own["measured"].iloc[-1]) for cell, own in points.items()}
    canvas.names(figure, last, styles)
    return figure


def _shade(figure: go.Figure, pairs: Sequence[int], trained: Sequence[int]) -> None:
    """Grey behind the difficulties that were never trained, named once a stretch."""
    edges = [pairs[0] / 1.2, *(math.sqrt(a * b) for a, b in pairwise(pairs)), pairs[-1] * 1.45]
    for never, stretch in groupby(range(len(pairs)), key=lambda i: pairs[i] not in trained):
        indices = list(stretch)
        if never:
            left, right = edges[indices[0]], edges[indices[-1] + 1]
            figure.add_vrect(x0=left, x1=right, fillcolor="#808080", opacity=0.14, line_width=0, layer="below")
            # Along its edge, between two numbers: nothing is drawn there but lines.
            place = {"x": math.log10(left), "xanchor": "left", "y": 0.98, "yref": "paper", "yanchor": "top"}
            figure.add_annotation(text="never trained", textangle=-90, showarrow=False, font_size=11, **place)
