"""Needles in haystacks: accuracy by the depth of a fact and the length of its row, as heat maps."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import pandas as pd
import plotly.graph_objects as go

from analysis.runs import Records

# As `experiments.tasks.needle` names its suites.
_SUITE = re.compile(r"eval/length(\d+)_depth(\d+)/accuracy")
# Lengths of all cells of a picture: more are not read in its height.
MOST_ROWS = 15
# From nothing to a tone on which text of the page's ink is read, in light and in dark.
_SCALE = [[0, "rgba(77, 111, 140, 0)"], [1, "rgba(77, 111, 140, 0.65)"]]
_HEIGHT, _CHARACTER = 400, 6.6


def grids(records: Records, cells: Sequence[str]) -> dict[str, pd.DataFrame]:
    """Cell -> its mean accuracy over seeds, a row a length and a column a depth; empty where no suite has a depth.

    Args:
        records: the runs to count, see `runs.counted`.
        cells: in the order wanted.
    """
    suites = {match[0]: (int(match[1]), int(match[2])) for match in map(_SUITE.fullmatch, records.metrics) if match}
    if not suites:
        return {}
    means = records.runs.groupby("cell")[list(suites)].mean()
    means.columns = pd.MultiIndex.from_tuples(suites.values(), names=["length", "depth"])
    found = {cell: means.loc[cell].unstack("depth") for cell in cells}
    return {cell: grid.sort_index().sort_index(axis="columns") for cell, grid in found.items()}


def heat_maps(grids: Mapping[str, pd.DataFrame]) -> list[go.Figure]:
    """The grids below each other, numbers on tones; in as many pictures as they need."""
    lengths = max((len(grid) for grid in grids.values()), default=1)
    at_once, cells = max(MOST_ROWS // lengths, 1), list(grids)
    starts = range(0, len(cells), at_once)
    return [_heat_map({cell: grids[cell] for cell in cells[start : start + at_once]}) for start in starts]


def _heat_map(grids: Mapping[str, pd.DataFrame]) -> go.Figure:
    figure = go.Figure()
    for cell, grid in grids.items():
        figure.add_heatmap(
            z=grid.to_numpy().tolist(),
            x=[f"{depth} %" for depth in grid.columns],
            y=[_label(cell, length) for length in grid.index],
            texttemplate="%{z:.2f}",
            hovertemplate="%{y}, depth %{x}: %{z:.3f}<extra></extra>",
            colorscale=_SCALE,
            zmin=0,
            zmax=1,
            showscale=False,
            xgap=1,
            ygap=1,
            name=cell,
            legendgroup=cell,
        )
    longest = max(len(_label(cell, length)) for cell, grid in grids.items() for length in grid.index)
    figure.update_layout(
        template="none",
        height=_HEIGHT,
        dragmode=False,
        margin={"l": 16 + _CHARACTER * longest, "t": 8, "b": 52, "r": 14},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, sans-serif", "size": 12},
    )
    figure.update_xaxes(title={"text": "depth of the fact in its row", "standoff": 8}, type="category", showgrid=False)
    figure.update_yaxes(autorange="reversed", type="category", showgrid=False, ticks="")
    return figure


def _label(cell: str, length: int) -> str:
    """A row's name; a long cell without its middle, as in the other pictures."""
    brief = cell if len(cell) <= 20 else f"{cell[:9]}…{cell[-10:]}"
    return f"{brief}, {length:,}".replace("&", "&amp;").replace("<", "&lt;")
