from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from analysis.statistics import band, compare, gain, holm, interval, not_apart


def runs_of(**cells):
    return table(**{cell: dict(enumerate(values)) for cell, values in cells.items()})


def table(**cells):
    """One row a run of cell -> seed -> value."""
    rows = [(cell, seed, value) for cell, values in cells.items() for seed, value in values.items()]
    return pd.DataFrame(rows, columns=["cell", "seed", "value"])


def only(comparison):
    (row,) = comparison.to_dict("records")
    return row


def curve(**runs):
    rows = [(run, tokens, value) for run, points in runs.items() for tokens, value in points.items()]
    return pd.DataFrame(rows, columns=["run", "tokens", "value"])


def test_interval_matches_a_hand_worked_one():
    found = interval([1.0, 2.0, 3.0])
    # t(0.975, 2 degrees of freedom) = 4.302653; standard deviation 1.
    assert (found.mean, found.n) == (2.0, 3) and found.half == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)


def test_interval_of_few_or_equal_values_is_defined():
    assert math.isnan(interval([]).mean) and interval([]).n == 0
    one = interval([0.5, math.nan])
    assert (one.mean, one.n) == (0.5, 1) and math.isnan(one.half)
    same = interval([0.1, 0.1, 0.1])
    assert (same.mean, same.half, same.n) == (pytest.approx(0.1), 0.0, 3)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("level", [0.8, 0.95])
def test_intervals_cover_the_truth_at_their_level(n, level):
    trials = 2000
    samples = np.random.default_rng(n).normal(3.0, 2.0, (trials, n))
    found = [interval(sample, level) for sample in samples]
    covered = np.mean([abs(i.mean - 3.0) <= i.half for i in found])
    assert abs(covered - level) < 4 * math.sqrt(level * (1 - level) / trials)


def test_paired_differences_match_scipy_and_take_common_seeds_only():
    left, right = {0: 1.0, 1: 2.5, 2: 3.0, 7: 9.0}, {2: 1.0, 1: 1.0, 0: 0.5, 8: 9.0}
    found = only(compare(table(left=left, right=right)))
    truth = stats.ttest_rel([1.0, 2.5, 3.0], [0.5, 1.0, 1.0])
    assert (found["n"], found["mean"]) == (3, pytest.approx(4 / 3)) and found["p"] == pytest.approx(truth.pvalue)
    assert found["half"] == pytest.approx(truth.confidence_interval(0.95).high - found["mean"])


def test_pairs_of_less_than_two_common_seeds_are_not_tested():
    one, none = compare(runs_of(a=[1.0], b=[0.0])), compare(table(a={0: 1.0, 1: 2.0}, b={2: 0.0, 3: 1.0}))
    assert only(one)["mean"] == 1.0 and math.isnan(only(one)["half"]) and math.isnan(only(one)["p"])
    assert only(none)["n"] == 0 and math.isnan(only(none)["mean"]) and not only(none)["apart"]
    unknown = only(compare(runs_of(a=[1.0, math.nan, 2.0], b=[0.0, 1.0, math.inf])))
    assert unknown["n"] == 1 and not unknown["apart"]


def test_differences_without_spread_are_defined():
    ones, near, zeros = [1.0, 1.0, 1.0], [0.9998, 0.9998, 0.9998], [0.0, 0.0, 0.0]
    assert only(compare(runs_of(a=ones, b=ones)))["p"] == 1.0
    exact = only(compare(runs_of(a=ones, b=zeros)))
    assert exact["p"] == 0.0 and exact["half"] == 0.0 and exact["apart"]
    assert only(compare(runs_of(a=ones, b=zeros), resolution=0.001))["p"] < 1e-5
    assert only(compare(runs_of(a=ones, b=near), resolution=0.001))["p"] > 0.5
    assert compare(runs_of(a=ones)).empty and compare(runs_of()).empty


def test_holm_matches_a_hand_worked_case_and_leaves_out_what_was_not_tested():
    assert holm([0.01, 0.04, 0.03]).tolist() == pytest.approx([0.03, 0.06, 0.06])
    adjusted = holm([math.nan, 0.9, 0.02])
    assert math.isnan(adjusted[0]) and adjusted[1:].tolist() == pytest.approx([0.9, 0.04])
    assert holm([]).tolist() == []


def test_a_clear_difference_is_found_and_the_unclear_one_is_not():
    found = compare(runs_of(good=[0.99, 0.98, 0.99], same=[0.98, 0.99, 0.99], bad=[0.1, 0.12, 0.11]), resolution=0.001)
    assert not_apart(found) == {"good": ["same"], "same": ["good"], "bad": []}
    row = found[(found["left"] == "good") & (found["right"] == "bad")].iloc[0]
    assert (
        row["mean"] == pytest.approx(0.98 + 1 / 150 - 0.11)
        and row["n"] == 3
        and row["adjusted"] == pytest.approx(2 * row["p"], rel=1)
    )


def test_one_seed_tells_nothing_apart():
    assert not_apart(compare(runs_of(a=[1.0], b=[0.0]))) == {"a": ["b"], "b": ["a"]}


def test_band_is_the_mean_and_interval_at_every_token():
    found = band(curve(a={0: 1.0, 10: 3.0}, b={0: 3.0, 10: 3.0}))
    assert found["tokens"].tolist() == [0, 10] and found["mean"].tolist() == [2.0, 3.0]
    assert found["half"].tolist() == [pytest.approx(interval([1.0, 3.0]).half), 0.0]


def test_band_interpolates_and_ends_where_the_first_run_ends():
    found = band(curve(a={0: 0.0, 10: 10.0, 20: 20.0}, b={5: 0.0, 15: 0.0}))
    assert found["tokens"].tolist() == [5, 10, 15] and found["mean"].tolist() == [2.5, 5.0, 7.5]


def test_band_does_not_depend_on_the_order_of_points():
    points = curve(a={0: 1.0, 10: 2.0, 20: 0.0})
    pd.testing.assert_frame_equal(band(points), band(points.iloc[::-1]))


def test_band_of_one_run_has_no_interval_and_of_none_no_points():
    assert band(curve(a={0: 1.0, 10: 2.0}))["half"].isna().all()
    assert band(curve()).empty
    assert band(curve(a={0: 1.0, 1: 1.0}, b={5: 1.0, 6: 1.0})).empty


def test_band_keeps_first_and_last_of_a_long_curve():
    found = band(curve(a={t: float(t) for t in range(1000)}), points=50)
    assert (
        len(found) == 50
        and found["tokens"].iloc[[0, -1]].tolist() == [0, 999]
        and (found["mean"] == found["tokens"]).all()
    )


def test_gain_is_the_rise_over_the_last_share_of_tokens():
    line = band(curve(a={0: 0.0, 100: 10.0, 200: 14.0}))
    assert gain(line, 0.5) == pytest.approx(4.0) and gain(line, 0.25) == pytest.approx(2.0)
    assert math.isnan(gain(band(curve(a={100: 1.0})), 0.5))
