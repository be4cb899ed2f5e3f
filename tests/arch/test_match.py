"""The solver of equal budgets against an exhaustive search over the knob."""

from __future__ import annotations

import pytest

from arch.match import TOLERANCE, Match, solve


def nearest(figures, target):
    """Knob and figure nearest to the target; None where none is within 1%."""
    value, figure = min(figures.items(), key=lambda item: (abs(item[1] - target), item[0]))
    return Match(value, figure) if abs(figure - target) <= TOLERANCE * target else None


def heads(value):
    """Refuses what does not divide 96."""
    if 96 % value:
        raise ValueError(f"n_heads={value} must divide 96")
    return 96 * 96 / value


SHAPES = {
    "linear": lambda value: 700 + 768 * value,
    "quadratic": lambda value: 12 * value**2 + 300 * value + 5,
    "falling": lambda value: 5_000_000 - 700 * value,
    "saturating": lambda value: 1000 * min(value, 2048),
    "with steps": lambda value: 64 * (value // 50) * 7 + 1,
}


EVERY = {shape: {value: figure(value) for value in range(1, 200_000)} for shape, figure in SHAPES.items()}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("target", [1009.0, 54_321.0, 1_000_000.0, 1_777_777.7])
def test_a_monotone_figure_is_matched_as_by_exhaustive_search(shape, target):
    expected = nearest(EVERY[shape], target)
    if expected is None:
        with pytest.raises(ValueError, match=r"within 1% of"):
            solve(SHAPES[shape], target)
    else:
        found = solve(SHAPES[shape], target)
        assert found.achieved == expected.achieved == SHAPES[shape](found.value)


def test_only_multiples_of_the_step_are_tried():
    tried = []
    found = solve(lambda value: tried.append(value) or SHAPES["linear"](value), 1_000_000, step=8)
    assert found == nearest({value: SHAPES["linear"](value) for value in range(8, 8000, 8)}, 1_000_000)
    assert all(value % 8 == 0 for value in tried)


def test_a_figure_that_rises_and_falls_is_searched_around():
    """The state of linear attention when heads follow from the width: most crossings of the target jump over it."""

    def state(width):
        count = next(n for n in range(max(1, width // 64), 0, -1) if width % n == 0)
        return 8 * width * (width // count + 1)

    fitting = {value for value in range(1, 600) if abs(state(value) / 196_608 - 1) <= 0.01}
    found = solve(state, 196_608)
    assert found.value in fitting and found.achieved == state(found.value) and len(fitting) < 10


def test_refused_values_are_passed_over():
    assert solve(heads, 96 * 96 / 24) == Match(24, 384)
    with pytest.raises(ValueError, match="nearest below: 384 with knob=24, above: 576 with knob=16"):
        solve(heads, 500)


@pytest.mark.parametrize(("shape", "most"), [("linear", 6), ("quadratic", 16), ("falling", 6)])
def test_a_match_takes_few_counts(shape, most):
    """A count builds a model: some hundred would take longer than five seconds."""
    tried = []
    solve(lambda value: tried.append(value) or SHAPES[shape](value), 1_000_000.0)
    assert len(tried) == len(set(tried)) <= most


def test_what_cannot_be_met_says_the_nearest_on_both_sides():
    with pytest.raises(ValueError, match="no n_layers brings parameters within 1% of 1,000; nearest below: 750 with "
                                         "n_layers=3, above: 1,250 with n_layers=5"):
        solve(lambda value: 250 * value + 1000 * (value == 4), 1000, what="parameters", knob="n_layers")
    with pytest.raises(ValueError, match="nearest below: nothing, above: 768,700 with knob=1000"):
        solve(SHAPES["linear"], 10, step=1000)
    with pytest.raises(ValueError, match=r"nearest below: 2,048,000 with knob=\d+, above: nothing"):
        solve(SHAPES["saturating"], 3e6)


def test_a_knob_without_effect_is_said():
    with pytest.raises(ValueError, match="knob does not change figure: it is 7, the target 1,000"):
        solve(lambda value: 7, 1000)


def test_a_knob_without_a_value_that_works_says_why():
    def refuse(value):
        raise ValueError("bias=3 must be true or false")

    with pytest.raises(ValueError, match="no value of knob works: bias=3 must be true or false"):
        solve(refuse, 1000)
