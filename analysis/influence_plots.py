"""Pictures of influence maps, in the look of all others: see `analysis.canvas`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from torch import Tensor

from analysis import canvas
from analysis.canvas import Style
from analysis.influence_map import MOST, by_distance, shares

# Colours go over so many decades of shares up to 1; what is less, but not 0, has the colour of the least.
DECADES = 4
LEAST = 10.0**-DECADES
_TICKS = ("100%", "10%", "1%", "0.1%", "0.01%")
# Of what is exactly 0.
_NOTHING = "rgba(128,128,128,0.22)"
# More labels than this do not fit beside a map; a longer one loses its end.
_LABELS, _LETTERS = 16, 8


def held(profiles: Mapping[str, Tensor], styles: Mapping[str, Style]) -> go.Figure:
    """How much of the influence the nearest n tokens hold, over n, logarithmic.

    Args:
        profiles: name -> its profile [T], see `analysis.influence_map`; of any lengths.
    """
    longest = max(map(len, profiles.values()), default=1)
    figure = canvas.frame("nearest tokens, the query's own included", "share of the influence", {})
    figure.add_hline(y=MOST, line={"dash": "dot", "width": 1, "color": "#808080"})
    # One step more where there is one token alone: an axis needs a width.
    figure.update_xaxes(type="log", range=(0, math.log10(max(longest, 2))))
    figure.update_xaxes(**_ticked([2**n for n in range(longest.bit_length())]))
    figure.update_yaxes(range=(0, 1.03), tickformat=".0%")
    for name, profile in profiles.items():
        within = profile.cumsum(0).tolist()
        figure.add_scatter(
            x=list(range(1, len(within) + 1)),
            y=within,
            mode="lines",
            **canvas.look(styles[name], name),
            hovertemplate=canvas.hover(name, "%{y:.1%} within %{x} tokens"),
        )
    return figure


def heat_map(values: Tensor, queries: Sequence[int], shown: Sequence[str]) -> go.Figure:
    """Shares of each query's influence (or its attention weights) by distance, in logarithmic colours.

    Args:
        values: [Q, T] at least 0.
        queries: their positions.
        shown: [T] the tokens as text.
    """
    moved, own = by_distance(shares(values), queries), len(shown) - 1
    ahead = own - min(queries) if (moved[:, :own] > 0).any() else 0
    distances = range(-ahead, max(queries) + 1)
    moved = moved[:, own + distances.start : own + distances.stop]
    names = [f"{query}  {_label(shown[query])}" for query in queries]
    figure = canvas.frame("tokens back from the query", "query: position and token", {})
    common = {"x": list(distances), "y": list(range(len(names))), "ygap": 1}
    grey = {"colorscale": [[0, _NOTHING], [1, _NOTHING]], "showscale": False, "hoverinfo": "skip"}
    figure.add_heatmap(z=_cells(moved.where(moved == 0, math.nan)), **grey, **common)
    colours = {"zmin": -DECADES, "zmax": 0, "colorscale": "Viridis"}
    figure.add_heatmap(
        z=_cells(moved.where(moved > 0, math.nan).clamp(min=LEAST).log10()),
        **colours,
        colorbar={"thickness": 12} | _ticked(range(0, -DECADES - 1, -1), _TICKS),
        text=_hovers(moved, queries, distances, shown),
        hovertemplate="%{text}<extra></extra>",
        **common,
    )
    left = 30 + 7 * max(map(len, names))
    figure.update_layout(margin_l=left)
    figure.update_annotations(xshift=8 - left)
    step = -(-len(names) // _LABELS)
    figure.update_yaxes(autorange="reversed", showgrid=False, **_ticked(range(0, len(names), step), names[::step]))
    return figure


def _ticked(values: Sequence[int], texts: Sequence[str] | None = None) -> dict[str, Any]:
    return {"tickvals": list(values), "ticktext": list(texts or map(str, values))}


def _cells(values: Tensor) -> list[list[float | None]]:
    """Rows for Plotly, which leaves cells of None blank."""
    return [[None if math.isnan(value) else value for value in row] for row in values.tolist()]


def _hovers(moved: Tensor, queries: Sequence[int], distances: range, shown: Sequence[str]) -> list[list[str]]:
    """What the mouse shows of each cell."""
    return [
        [
            "" if math.isnan(share) else _told(share, query, back, shown)
            for share, back in zip(row, distances, strict=True)
        ]
        for row, query in zip(moved.tolist(), queries, strict=True)
    ]


def _told(share: float, query: int, back: int, shown: Sequence[str]) -> str:
    token = query - back
    where = f"{back} back" if back >= 0 else f"{-back} ahead"
    return f"{query} {_label(shown[query])} ← {token} {_label(shown[token])} ({where}): {100 * share:.2g}%"


def _label(token: str) -> str:
    """A token with its white space to be seen, and short."""
    seen = token.replace(" ", "␣").replace("\n", "⏎")
    return canvas.escape(seen if len(seen) <= _LETTERS else f"{seen[: _LETTERS - 1]}…")
