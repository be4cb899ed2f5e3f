from __future__ import annotations

import numpy as np
import pytest

from analysis.pareto import Standing, standings


@pytest.mark.parametrize("better", ["lower", "higher"])
def test_where_all_are_told_apart_a_cell_is_dominated_exactly_when_another_is_better_and_no_dearer(better):
    random = np.random.default_rng(0)
    for _ in range(50):
        points = {f"c{i}": tuple(map(float, pair)) for i, pair in enumerate(random.integers(0, 6, (8, 2)))}
        sign = 1 if better == "higher" else -1
        found = standings(points, better, {})
        for cell, (cost, quality) in points.items():
            beaten = any(sign * q > sign * quality and c <= cost for c, q in points.values())
            cheaper = any(q == quality and c < cost for c, q in points.values())
            expected = Standing.DOMINATED if beaten else Standing.BEHIND if cheaper else Standing.FRONT
            assert found[cell] is expected


def test_a_cell_is_not_dominated_by_what_it_cannot_be_told_apart_from():
    points = {"cheap": (1.0, 0.9), "dear": (2.0, 0.89), "bad": (3.0, 0.1)}
    found = standings(points, "higher", {"dear": ["cheap"], "cheap": ["dear"]})
    assert found == {"cheap": Standing.FRONT, "dear": Standing.BEHIND, "bad": Standing.DOMINATED}


def test_equal_points_are_both_on_the_front():
    assert set(standings({"a": (1.0, 0.5), "b": (1.0, 0.5)}, "higher", {}).values()) == {Standing.FRONT}
