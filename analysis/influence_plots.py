"""Pictures of influence maps, in the look of `analysis.plots`: the page decides the colours of texts, axes and grid."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from torch import Tensor

from analysis.influence_map import MOST, by_distance, shares
from analysis.plots import Style

# Colours go over so many decades of shares up to 1; what is less, but not 0, has the colour of the least.
DECADES = 4
LEAST = 10.0**-DECADES
_TICKS = ("100%", "10%", "1%", "0.1%", "0.01%")
# Of what is exactly 0.
_NOTHING = "rgba(128,128,128,0.22)"
# More labels than this do not fit beside a map.
_LABELS = 16


def held(profiles: Mapping[str, Tensor], styles: Mapping[str, Style]) -> go.Figure:
    """How much of the influence the nearest n tokens hold, over n, logarithmic.

    Args:
        profiles: name -> its profile [T], see `analysis.influence_map`; of any lengths.
    """
    longest = max(map(len, profiles.values()), default=1)
    figure = _figure(62, "share of the influence")
    figure.add_hline(y=MOST, line={"dash": "dot", "width": 1, "color": "#808080"})
    figure.update_xaxes(
        title={"text": "nearest tokens, the query's own included", "standoff": 8},
        type="log",
        range=(0, math.log10(max(longest, 2))),
        **_ticked([2**n for n in range(longest.bit_length())]),
    )
    figure.update_yaxes(range=(0, 1.03), tickformat=".0%", showgrid=True)
    for name, profile in profiles.items():
        style, within = styles[name], profile.cumsum(0)
        figure.add_scatter(
            x=list(range(1, len(within) + 1)),
            y=within.tolist(),
            mode="lines",
            line={"color": style.colour, "dash": style.dash, "width": 2},
            name=name,
            legendgroup=name,
            hovertemplate=f"<b>{_escape(name)}</b><br>%{{y:.1%}} within %{{x}} tokens<extra></extra>",
        )
    return figure


def heat_map(values: Tensor, queries: Sequence[int], shown: Sequence[str]) -> go.Figure:
    """Shares of each query's influence (or its attention weights) by distance, logarithmic colours.

    Args:
        values: [Q, T] at least 0.
        queries: their positions.
        shown: [T] the tokens as text.
    """
    moved, own = by_distance(shares(values), queries), len(shown) - 1
    ahead = own - min(queries) if (moved[:, :own] > 0).any() else 0
    distances = range(-ahead, max(queries) + 1)
    moved = moved[:, own + distances.start : own + distances.stop]
    names = [f"{query}  {_escape(shown[query])}" for query in queries]
    hover = [
        [_told(value, query, distance, shown) for value, distance in zip(row, distances, strict=True)]
        for row, query in zip(moved.tolist(), queries, strict=True)
    ]
    figure = _figure(90, "query: position and token")
    common = {"x": list(distances), "y": list(range(len(names))), "ygap": 1}
    grey = {"colorscale": [[0, _NOTHING], [1, _NOTHING]], "showscale": False, "hoverinfo": "skip"}
    figure.add_heatmap(z=_cells(moved.where(moved == 0, math.nan)), **grey, **common)
    figure.add_heatmap(
        z=_cells(moved.where(moved > 0, math.nan).clamp(min=LEAST).log10()),
        zmin=-DECADES,
        zmax=0,
        colorscale="Viridis",
        colorbar={"thickness": 12} | _ticked(range(0, -DECADES - 1, -1), _TICKS),
        text=hover,
        hovertemplate="%{text}<extra></extra>",
        **common,
    )
    figure.update_xaxes(title={"text": "tokens back from the query", "standoff": 8})
    step = -(-len(names) // _LABELS)
    figure.update_yaxes(autorange="reversed", **_ticked(range(0, len(names), step), names[::step]))
    return figure


def _figure(left: int, y_title: str) -> go.Figure:
    figure = go.Figure()
    figure.update_layout(
        template="none",
        height=400,
        showlegend=False,
        dragmode=False,
        hovermode="closest",
        margin={"l": left, "t": 34, "b": 52, "r": 14},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, sans-serif", "size": 12},
    )
    figure.update_xaxes(showgrid=False, showline=True, ticks="outside", ticklen=4, zeroline=False)
    figure.update_yaxes(showgrid=False, zeroline=False, showline=False)
    place = {"xref": "paper", "yref": "paper", "x": 0, "y": 1, "xshift": 8 - left, "yshift": 24, "xanchor": "left"}
    figure.add_annotation(text=y_title, showarrow=False, **place)
    return figure


def _ticked(values: Sequence[int], texts: Sequence[str] | None = None) -> dict[str, Any]:
    return {"tickvals": list(values), "ticktext": list(texts or map(str, values))}


def _cells(values: Tensor) -> list[list[float | None]]:
    """Rows for Plotly, which leaves cells of None blank."""
    return [[None if math.isnan(value) else value for value in row] for row in values.tolist()]


def _told(value: float, query: int, distance: int, shown: Sequence[str]) -> str:
    if math.isnan(value):
        return ""
    place = query - distance
    where = f"{distance} back" if distance >= 0 else f"{-distance} ahead"
    return f"{query} {_escape(shown[query])} ← {place} {_escape(shown[place])} ({where}): {100 * value:.2g}%"


def _escape(text: str) -> str:
    """Plotly reads some HTML in texts."""
    return text.replace("&", "&amp;").replace("<", "&lt;")
