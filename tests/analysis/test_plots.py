from __future__ import annotations

import itertools
import math

import pandas as pd
import pytest

from analysis import canvas, plots
from analysis.pareto import Standing
from analysis.statistics import Interval


def looks(*cells):
    return canvas.styles(pd.DataFrame({"cell": cells, "stack": [cell.split(",")[0] for cell in cells]}))


def band(*means):
    return pd.DataFrame({"tokens": [100.0 * i for i in range(len(means))], "mean": means, "half": [0.1] * len(means)})


def names(figure):
    return {trace.text[0] for trace in figure.data if trace.mode == "text"}


def lines(figure):
    """The traces that carry data: those with a name."""
    return {trace.name: trace for trace in figure.data if trace.name}


def along(found, trained, name="val/accuracy"):
    return plots.along(found, trained, name, ("pairs", "test accuracy"), looks(*found) if found else {})


def shaded(figure):
    return [(shape.x0, shape.x1) for shape in figure.layout.shapes]


def test_a_stack_has_one_colour_and_symbol_and_its_cells_differ_by_dash():
    found = looks("mha, lr=1", "mha, lr=2", "linear")
    one, two = found["mha, lr=1"], found["mha, lr=2"]
    assert (one.colour, one.symbol) == (two.colour, two.symbol) and one.dash != two.dash
    assert found["linear"].colour != one.colour and found["linear"].symbol != one.symbol


def test_the_order_of_cells_does_not_change_their_looks():
    assert looks("a", "b", "c") == looks("c", "a", "b")


def test_fifty_six_stacks_look_different():
    found = looks(*(f"stack {i}" for i in range(56)))
    assert len(set(found.values())) == 56


def relative_luminance(colour):
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("colour", canvas.COLOURS)
@pytest.mark.parametrize("page", ["#ffffff", "#15181c"])
def test_colours_stand_out_from_a_light_and_a_dark_page(colour, page):
    low, high = sorted([relative_luminance(colour), relative_luminance(page)])
    assert (high + 0.05) / (low + 0.05) >= 3


def test_learning_curves_name_every_cell_and_draw_its_interval():
    figure = plots.learning({"mha": band(0.1, 0.9), "linear": band(0.1, 0.2)}, "val/accuracy", looks("mha", "linear"))
    assert names(figure) == {"mha", "linear"} == set(lines(figure))
    (area,) = [trace for trace in figure.data if trace.fill == "toself" and trace.legendgroup == "mha"]
    assert list(area.y) == pytest.approx([0.2, 1.0, 0.8, 0.0])


def test_one_seed_has_a_line_and_no_band():
    figure = plots.learning({"mha": band(0.1, 0.9).assign(half=math.nan)}, "val/accuracy", looks("mha"))
    assert [trace.fill for trace in figure.data if trace.fill] == [] and names(figure) == {"mha"}


def test_accuracy_always_goes_from_zero_to_one_and_a_loss_to_its_highest_mean():
    flat = plots.learning({"mha": band(0.1, 0.2)}, "val/accuracy", looks("mha"))
    assert flat.layout.yaxis.range[0] < 0 and flat.layout.yaxis.range[1] > 1
    loss = plots.learning({"mha": band(5.0, 0.2)}, "val/loss", looks("mha"))
    assert 5.0 < loss.layout.yaxis.range[1] < 5.5


def test_difficulties_that_were_never_trained_are_shaded():
    row = {kv: Interval(0.5, 0.1, 3) for kv in (4, 8, 16, 32)}
    figure = along({"mha": row}, [4, 8, 16])
    ((left, right),) = shaded(figure)
    assert 16 < left < 32 < right
    assert list(figure.layout.xaxis.tickvals) == [4, 8, 16, 32]
    assert shaded(along({"mha": row}, [])) == []
    assert len(shaded(along({"mha": row}, [8, 16]))) == 2


def test_cells_of_equal_accuracy_stand_side_by_side():
    row = {kv: Interval(1.0, 0.0, 3) for kv in (4, 8)}
    found = lines(along({"a": row, "b": row}, [4, 8]))
    assert list(found["a"].x) != list(found["b"].x)
    assert all(4 / 1.1 < trace.x[0] < 4 * 1.1 for trace in found.values())


def test_a_tradeoff_leaves_out_what_is_unknown():
    points = {
        "mha": (100.0, Interval(0.9, 0.1, 3)),
        "linear": (math.nan, Interval(0.5, 0.1, 3)),
        "nsa": (50.0, Interval(math.nan, math.nan, 0)),
    }
    figure = plots.tradeoff(points, "complexity/flops_per_token_train", "eval/kv16/accuracy", looks(*points))
    assert names(figure) == {"mha"}
    low, high = (10**end for end in figure.layout.xaxis.range)
    assert low < 100 < high and all(low <= tick <= high for tick in figure.layout.xaxis.tickvals)


@pytest.mark.parametrize("values", [(1e5, 1.01e5), (1e3, 1e9), (64.0, 64.0), (3e4, 1.5e5)])
@pytest.mark.parametrize("cost", ["complexity/flops_per_token_train", "complexity/state_bytes_at_64"])
def test_a_cost_axis_has_one_to_four_ticks(values, cost):
    points = {f"c{i}": (value, Interval(0.5, 0.0, 2)) for i, value in enumerate(values)}
    assert 1 <= len(plots.tradeoff(points, cost, "val/accuracy", looks(*points)).layout.xaxis.tickvals) <= 4


def test_pictures_without_anything_to_draw_are_empty_not_broken():
    assert lines(plots.learning({}, "val/loss", {})) == {}
    assert lines(along({}, [4])) == {}
    assert lines(plots.tradeoff({}, "complexity/parameters", "val/accuracy", {})) == {}


@pytest.mark.parametrize("best", [1.0, 0.5, 0.003])
def test_names_of_equal_points_do_not_overlap_and_keep_their_order(best):
    cells = [f"cell {i}" for i in range(canvas.MOST_NAMES)]
    figure = plots.learning(
        {cell: band(0.1, best - i * 1e-4) for i, cell in enumerate(cells)}, "val/accuracy", looks(*cells)
    )
    heights = {trace.text[0]: trace.y[0] for trace in figure.data if trace.mode == "text"}
    ordered = [heights[cell] for cell in cells]
    low, high = figure.layout.yaxis.range
    pixels = (figure.layout.height - figure.layout.margin.t - figure.layout.margin.b) / (high - low)
    assert all((a - b) * pixels >= 17.9 for a, b in itertools.pairwise(ordered))
    assert low < min(ordered) and max(ordered) <= high


def test_many_cells_are_drawn_without_names():
    cells = [f"cell {i}" for i in range(canvas.MOST_NAMES + 1)]
    figure = plots.learning({cell: band(0.1, 0.9) for cell in cells}, "val/accuracy", looks(*cells))
    assert names(figure) == set() and set(lines(figure)) == set(cells)


def test_a_swatch_shows_colour_and_dash():
    found = looks("mha, lr=1", "mha, lr=2")
    svgs = {cell: canvas.swatch(style) for cell, style in found.items()}
    assert all(found[cell].colour in svg for cell, svg in svgs.items()) and len(set(svgs.values())) == 2


def markers(figure):
    return {trace.name: trace.marker for trace in figure.data if trace.name}


def test_the_front_is_drawn_and_what_is_behind_it_is_hollow_or_grey():
    points = {"a": (1.0, Interval(0.5, 0.1, 3)), "b": (4.0, Interval(0.9, 0.1, 3)), "c": (5.0, Interval(0.8, 0.1, 3)),
              "d": (6.0, Interval(0.1, 0.1, 3))}  # fmt: skip
    places = dict(zip(points, (Standing.FRONT, Standing.FRONT, Standing.BEHIND, Standing.DOMINATED), strict=True))
    figure = plots.tradeoff(points, "complexity/parameters", "val/accuracy", looks(*points), places)
    found = markers(figure)
    assert found["c"].symbol.endswith("-open") and not found["b"].symbol.endswith("-open")
    own = {cell: style.colour for cell, style in looks(*points).items()}
    assert [found[cell].color == own[cell] for cell in "abcd"] == [True, True, True, False]
    (steps,) = [trace for trace in figure.data if trace.line.shape == "hv"]
    assert list(steps.x[:2]) == [1.0, 4.0] and list(steps.y) == [0.5, 0.9, 0.9]
    # Without places there is no front.
    plain = plots.tradeoff(points, "complexity/parameters", "val/accuracy", looks(*points))
    assert not [trace for trace in plain.data if trace.line.shape == "hv"]


def test_a_ranking_goes_down_from_the_best_and_is_hollow_where_nothing_is_told_apart():
    cells = ("best", "near", "far")
    figure = plots.ranking("best", {"near": (-0.1, 0.2), "far": (-0.5, 0.1)}, ["near"], "val/accuracy", looks(*cells))
    assert [(t.name, t.x[0], t.y[0]) for t in figure.data] == [("best", 0, 0), ("near", -0.1, 1), ("far", -0.5, 2)]
    assert [cell for cell, marker in markers(figure).items() if marker.symbol.endswith("-open")] == ["near"]
    assert list(figure.layout.yaxis.ticktext) == list(cells)
    low, high = figure.layout.yaxis.range
    assert low > 2 and high < 0


def test_dots_begin_at_zero_and_leave_a_row_where_nothing_is_known():
    found = {"a": Interval(2.3, 0.1, 3), "b": Interval(math.nan, math.nan, 0), "c": Interval(2.4, 0.1, 3)}
    figure = plots.dots(found, "val/loss", looks(*found))
    assert figure.layout.xaxis.range[0] == 0 and figure.layout.xaxis.range[1] > 2.4
    assert {trace.name: trace.y[0] for trace in figure.data} == {"a": 0, "c": 2}


def test_losses_against_a_number_show_what_differs_and_accuracies_their_whole_range():
    row = {64: Interval(2.0, 0.1, 3), 128: Interval(2.2, 0.1, 3)}
    low, high = along({"mha": row}, [64], "eval/text/loss").layout.yaxis.range
    assert 1.5 < low < 1.9 and 2.3 < high < 2.7
    low, high = along({"mha": {64: Interval(0.5, 0.1, 3)}}, [64]).layout.yaxis.range
    assert low < 0 and high > 1
