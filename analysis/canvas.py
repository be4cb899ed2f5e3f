"""What all pictures of a report share: the looks of cells, axes, intervals, and names that need no legend.

A stack has one colour and one symbol in all pictures of a report; cells of one stack differ by dash. Names stand at
the right edge, each led to its point. Backgrounds are transparent, and texts, axes and grid get their colours from the
style sheet of the page, so that one figure serves light, dark and print.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from analysis.statistics import Interval
from experiments.metrics import format_value, metric

# Chosen by search: a contrast of 3:1 with a white and a dark page; seen normally or with any of the three colour
# deficiencies, the first six are at least 24 apart in CIELAB, all eight 16.
COLOURS = ("#4d6f8c", "#d97e16", "#11a674", "#cc0036", "#9a7ee5", "#aa00ff", "#ff00aa", "#7a4dbf")
# Plotly's names -> the same as an SVG path around 0. Seven symbols and eight colours: 56 stacks before a pair returns.
SYMBOLS = {
    "circle": "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0-10 0z",
    "square": "M-4.5-4.5h9v9h-9z",
    "diamond": "M0-6L6 0L0 6L-6 0z",
    "triangle-up": "M0-5.5L5.5 4.5h-11z",
    "cross": "M-2-6h4v4h4v4h-4v4h-4v-4h-4v-4h4z",
    "x": "M0-2.5L3-5.5L5.5-3L2.5 0L5.5 3L3 5.5L0 2.5L-3 5.5L-5.5 3L-2.5 0L-5.5-3L-3-5.5z",
    "triangle-down": "M0 5.5L5.5-4.5h-11z",
}
# Plotly's names -> SVG's stroke-dasharray.
DASHES = {"solid": "none", "dash": "7 4", "dot": "2 3", "dashdot": "7 3 2 3"}
# More names than this do not fit beside a picture.
MOST_NAMES = 14

_HEIGHT, _TOP, _BOTTOM, _LEFT = 400, 34, 52, 56
_NAME_HEIGHT, _CHARACTER, _LONGEST, _ROW = 18, 6.6, 20, 28


@dataclass(frozen=True)
class Style:
    """How a cell looks in every picture."""

    colour: str
    symbol: str
    dash: str


def styles(cells: pd.DataFrame) -> dict[str, Style]:
    """A style for every cell of [cell, stack]: colour and symbol by stack, dash by the cell within its stack."""
    symbols, dashes = list(SYMBOLS), list(DASHES)
    found = {}
    for number, (_, own) in enumerate(cells.drop_duplicates("cell").groupby("stack", sort=True)):
        for i, cell in enumerate(sorted(own["cell"])):
            found[cell] = Style(COLOURS[number % len(COLOURS)], symbols[number % len(symbols)], dashes[i % len(dashes)])
    return found


def swatch(style: Style) -> str:
    """The style as a small SVG, its line under its symbol: the legend."""
    return (
        '<svg class="swatch" viewBox="-15 -8 30 16" width="30" height="16" aria-hidden="true">'
        f'<path d="M-15 0H15" stroke="{style.colour}" stroke-width="2" stroke-dasharray="{DASHES[style.dash]}"/>'
        f'<path d="{SYMBOLS[style.symbol]}" fill="{style.colour}"/></svg>'
    )


def axis_title(name: str, title: str = "") -> str:
    """ "validation loss (nats a token), lower is better"; `title` in place of the metric's own."""
    about = metric(name)
    unit, goal = f" ({about.unit})" if about.unit else "", f", {about.better} is better" if about.better else ""
    return (title or about.title) + unit + goal


def row_labels(figure: go.Figure, cells: Sequence[str]) -> None:
    """Cells from top to bottom, named at the left; the height follows their number."""
    labels = [escape(brief(cell)) for cell in cells]
    figure.update_layout(height=_TOP + _BOTTOM + _ROW * len(cells), hovermode="closest")
    left = 16 + _CHARACTER * max(map(len, labels), default=0)
    figure.update_layout(margin={"l": left, "r": 14})
    figure.update_annotations(xshift=8 - left)
    figure.update_yaxes(range=(len(cells) - 0.5, -0.5), tickvals=list(range(len(cells))), ticktext=labels)


def frame(x_title: str, y_title: str, cells: Mapping[str, object]) -> go.Figure:
    """An empty picture with room for the names at the right."""
    longest = max((len(brief(cell)) for cell in cells), default=0) if len(cells) <= MOST_NAMES else 0
    figure = go.Figure()
    figure.update_layout(
        template="none",
        height=_HEIGHT,
        showlegend=False,
        dragmode=False,
        hovermode="closest",
        margin={"l": _LEFT, "t": _TOP, "b": _BOTTOM, "r": 14 + _CHARACTER * longest},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, sans-serif", "size": 12},
    )
    figure.update_xaxes(
        title={"text": x_title, "standoff": 8},
        showgrid=False,
        showline=True,
        ticks="outside",
        ticklen=4,
        zeroline=False,
    )
    figure.update_yaxes(showgrid=True, zeroline=False, showline=False)
    # Above the axis and level, where a phone has room for it.
    place = {"xref": "paper", "yref": "paper", "x": 0, "y": 1, "xshift": 8 - _LEFT, "yshift": 24, "xanchor": "left"}
    figure.add_annotation(text=escape(y_title), showarrow=False, **place)
    return figure


def ranges(figure: go.Figure, x: tuple[float, float], name: str, means: Sequence[float]) -> None:
    """Fix the ranges: accuracy from 0 to 1, so that pictures compare; anything else from 0 to its largest mean."""
    top = 1.0 if name.endswith("accuracy") else max(means, default=0.0) or 1.0
    figure.update_xaxes(range=x)
    figure.update_yaxes(range=(-0.03 * top, 1.05 * top))


def close_ranges(figure: go.Figure, x: tuple[float, float], name: str, found: Sequence[Interval]) -> None:
    """Fix the ranges for points: accuracy from 0 to 1; of anything else only what is there, with its intervals."""
    ends = [i.mean + sign * (0 if math.isnan(i.half) else i.half) for i in found for sign in (-1, 1)]
    if name.endswith("accuracy") or not ends:
        return ranges(figure, x, name, [])
    room = 0.08 * (max(ends) - min(ends)) or 0.1 * abs(ends[0]) or 1.0
    figure.update_xaxes(range=x)
    figure.update_yaxes(range=(min(ends) - room, max(ends) + room))


def area(figure: go.Figure, cell: str, band: pd.DataFrame, colour: str) -> None:
    """The interval around a mean curve; nothing where there is none."""
    if len(band):
        upper, lower = band["mean"] + band["half"], band["mean"] - band["half"]
        figure.add_scatter(
            x=[*band["tokens"], *band["tokens"][::-1]],
            y=[*upper, *lower[::-1]],
            mode="lines",
            line_width=0,
            fill="toself",
            fillcolor=colour,
            opacity=0.18,
            hoverinfo="skip",
            legendgroup=cell,
        )


def cost_axis(figure: go.Figure, cost: str, values: Sequence[float]) -> tuple[float, float]:
    """A logarithmic axis with round ticks, spelled like in the tables; its range, in decades."""
    if not values:
        return (0, 1)
    ends, ticks = decades(values)
    figure.update_xaxes(type="log", tickvals=ticks, ticktext=[format_value(cost, tick) for tick in ticks])
    return ends


def decades(values: Sequence[float]) -> tuple[tuple[float, float], list[float]]:
    """The range of a logarithmic axis, in decades, and its round ticks."""
    low, high = min(values) / 1.25, max(values) * 1.25
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    scales = [
        [digit * 10.0**i for i in powers for digit in digits] for digits in ((1,), (1, 2, 5), (1, 2, 3, 4, 5, 6, 8))
    ]
    # The coarsest scale with three ticks; four fit on a phone.
    choices = [[tick for tick in ticks if low <= tick <= high] for ticks in scales]
    ticks = next((inside for inside in choices if len(inside) > 2), choices[-1] or [values[0]])
    return (math.log10(low), math.log10(high)), ticks[:: math.ceil(len(ticks) / 4)]


def look(style: Style, cell: str, size: int = 9) -> dict[str, Any]:
    """Colour, symbol and dash of a trace; traces of one cell are hidden and shown together."""
    return {
        "line": {"color": style.colour, "dash": style.dash, "width": 2},
        "marker": {"color": style.colour, "symbol": style.symbol, "size": size},
        "name": cell,
        "legendgroup": cell,
        "cliponaxis": False,
    }


def bars(intervals: Sequence[Interval]) -> dict[str, Any]:
    """Error bars of a trace; where there is no interval, none is seen."""
    return {"array": [0 if math.isnan(i.half) else i.half for i in intervals], "thickness": 1.2, "width": 3}


def hover(cell: str, *lines: str) -> str:
    """What the mouse shows, under the name of the cell."""
    return "<br>".join((f"<b>{escape(cell)}</b>", *lines)) + "<extra></extra>"


def escape(text: str) -> str:
    """Plotly reads some HTML in texts."""
    return text.replace("&", "&amp;").replace("<", "&lt;")


def brief(cell: str) -> str:
    """A long name without its middle: cells of one stack differ at the end."""
    return cell if len(cell) <= _LONGEST else f"{cell[: _LONGEST // 2 - 1]}…{cell[-_LONGEST // 2 :]}"


def names(figure: go.Figure, ends: Mapping[str, tuple[float, float]], styles: Mapping[str, Style]) -> None:
    """Every cell's name at the right edge, moved apart vertically, with a thin line from its last point."""
    if len(ends) > MOST_NAMES:
        return
    low, high = figure.layout.yaxis.range
    edge = figure.layout.xaxis.range[1]
    edge = 10**edge if figure.layout.xaxis.type == "log" else edge
    # A range is in decades where the axis is logarithmic.
    logarithmic = figure.layout.yaxis.type == "log"
    pixel = (high - low) / (_HEIGHT - _TOP - _BOTTOM)
    wanted = [min(max(math.log10(y) if logarithmic else y, low), high) / pixel for _, y in ends.values()]
    heights = _apart(wanted, low / pixel + _NAME_HEIGHT / 2, high / pixel, _NAME_HEIGHT)
    for (cell, (x, y)), height in zip(ends.items(), heights, strict=True):
        label = 10 ** (height * pixel) if logarithmic else height * pixel
        figure.add_scatter(
            x=[x, edge],
            y=[y, label],
            mode="lines",
            line={"color": styles[cell].colour, "width": 1},
            opacity=0.6,
            hoverinfo="skip",
            legendgroup=cell,
            cliponaxis=False,
        )
        figure.add_scatter(
            x=[edge],
            y=[label],
            mode="text",
            text=[escape(brief(cell))],
            textposition="middle right",
            hoverinfo="skip",
            legendgroup=cell,
            cliponaxis=False,
        )


def _apart(wanted: Sequence[float], low: float, high: float, gap: float) -> list[float]:
    """Heights near the wanted ones, in their order, at least `gap` apart and within low .. high where there is room."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    placed = [0.0] * len(wanted)
    floor = low
    for i in order:
        placed[i] = max(wanted[i], floor)
        floor = placed[i] + gap
    ceiling = high
    for i in reversed(order):
        placed[i] = min(placed[i], ceiling)
        ceiling = placed[i] - gap
    return placed
