"""What a report claims, on simulated runs whose truth is known."""

from __future__ import annotations

import math
import re

import numpy as np
import pandas as pd
import pytest

from analysis import sheets
from analysis.comparison import by_task
from analysis.pareto import Standing
from analysis.runs import Records
from analysis.statistics import compare, paired

# Of a share of simulations: so many standard errors are allowed. One in 16,000 right programs would fail.
ERRORS = 4


def most(share, trials):
    """The largest count that a true `share` leads to."""
    return trials * share + ERRORS * math.sqrt(trials * share * (1 - share))


def simulated(random, spread, difference=0.0, seeds=3, trials=4000):
    """[seed, trial] of differences of pairs: what a seed shifts in both cells is gone, what it shifts in one stays."""
    both = random.normal(size=(seeds, trials))
    left, right = (both + random.normal(scale=s, size=(seeds, trials)) for s in (spread, 2 * spread))
    return left + difference - right


@pytest.mark.parametrize("seeds", [2, 3, 5])
@pytest.mark.parametrize("level", [0.8, 0.95])
def test_intervals_of_differences_cover_the_truth_at_their_level(seeds, level):
    found = paired(simulated(np.random.default_rng(seeds), 0.1, 0.3, seeds), level=level)
    missed = ((found["mean"] - 0.3).abs() > found["half"]).sum()
    trials = len(found)
    assert abs(missed - trials * (1 - level)) < most(1 - level, trials) - trials * (1 - level)


def test_p_is_below_every_share_that_often_where_cells_are_equal():
    p = paired(simulated(np.random.default_rng(0), 0.1))["p"]
    for share in (0.01, 0.05, 0.2, 0.5):
        assert abs((p < share).sum() - share * len(p)) < most(share, len(p)) - share * len(p)


def test_intervals_cover_where_some_seeds_are_missing():
    random = np.random.default_rng(0)
    values = simulated(random, 0.1, 0.3, seeds=5)
    values[random.random(values.shape) < 0.2] = math.nan
    found = paired(values).query("n > 1")
    missed = ((found["mean"] - 0.3).abs() > found["half"]).sum()
    assert abs(missed - 0.05 * len(found)) < most(0.05, len(found)) - 0.05 * len(found)


def runs_of(values):
    """[cell, seed, value] of values[cell][seed]."""
    rows = [(f"c{cell}", seed, value) for cell, own in enumerate(values) for seed, value in enumerate(own)]
    return pd.DataFrame(rows, columns=["cell", "seed", "value"])


@pytest.mark.parametrize(("cells", "tasks"), [(4, 1), (2, 6)])
def test_equal_cells_are_told_apart_in_at_most_five_percent_of_reports(cells, tasks):
    random, reports = np.random.default_rng(cells), 60
    # A seed shifts all cells, and cells spread unlike each other.
    seeds = random.normal(size=(reports, tasks, 1, 3))
    values = seeds + random.normal(size=(reports, tasks, cells, 3)) * np.arange(1, cells + 1)[:, None]
    claims = sum(any(compare(runs_of(own), families=tasks)["apart"].any() for own in report) for report in values)
    assert claims <= most(0.05, reports)


def test_equal_cells_near_the_bound_of_accuracy_are_rarely_told_apart():
    # 4096 answers a run, nearly all right: the values are few, and two seeds often agree to the last digit.
    random, reports = np.random.default_rng(0), 60
    values = random.binomial(4096, 0.9998, size=(reports, 2, 2)) / 4096
    assert sum(compare(runs_of(own), resolution=0.001)["apart"].any() for own in values) <= 0.05 * reports


def test_what_really_differs_is_told_apart_from_the_side_where_it_is():
    random, reports = np.random.default_rng(0), 30
    found = [compare(runs_of([random.normal(1.0, 0.01, 5), random.normal(0.8, 0.01, 5)])) for _ in range(reports)]
    assert all((one["mean"] > 0).all() for one in found) and sum(one["apart"].all() for one in found) > 0.95 * reports


def records_of(values):
    """Records of finished runs of values[task][cell][seed]; cell i costs i."""
    rows = [
        {"run": f"{task} {cell} {seed}", "status": "FINISHED", "task": f"t{task}", "stack": f"c{cell}",
         "cell": f"c{cell}", "seed": seed, "eval/suite/loss": value, "complexity/parameters": 1.0 + cell,
         "last_tokens": 100.0, "last_step": 10.0}
        for task, cells in enumerate(values) for cell, own in enumerate(cells) for seed, value in enumerate(own)
    ]  # fmt: skip
    empty = ("folder", "reason", "sweep", "sweeps", "started", "seconds", "command", "tuning", "layout")
    runs = pd.DataFrame(rows).assign(**dict.fromkeys(empty))
    return Records(
        runs=runs,
        curves=pd.DataFrame(columns=["run", "metric", "step", "tokens", "value"]),
        environment=pd.DataFrame(index=runs["run"]),
        params=("stack", "layout", "task", "seed"),
        problems=pd.DataFrame(columns=["run", "problem"]),
        unstarted=pd.DataFrame(columns=["sweep", "job"]),
    )


def claimed(records):
    """Every way in which a report says that one cell is better than another."""
    together = by_task(records)
    for about in together:
        yield from (text for text in about.findings if re.search("is told apart", text))
        yield from (row for sheet in (sheets.to_best(about), sheets.pairs(about)) for row in sheet.rows
                    if row[-1] != "not distinguishable")  # fmt: skip
        yield from (cell for cell, place in about.front("complexity/parameters").items() if place is Standing.DOMINATED)
        letters = about.groups.values()
        yield from () if set.intersection(*map(set, letters)) else letters
    yield from (row for row in sheets.overview(together).rows if not all(text.endswith("*") for text in row[1:]))


def test_a_whole_report_on_equal_cells_claims_something_at_most_five_percent_of_the_time():
    random, reports = np.random.default_rng(1), 25
    claims = sum(any(claimed(records_of(random.normal(3.0, 0.1, size=(2, 3, 3))))) for _ in range(reports))
    assert claims <= most(0.05, reports)


def test_the_tests_of_all_tasks_are_corrected_together():
    values = np.array([[[1.0, 1.1, 1.2], [2.0, 2.3, 2.2], [2.5, 2.3, 2.9]]])
    (alone,), both = by_task(records_of(values)), by_task(records_of(values.repeat(2, axis=0)))
    for about in both:
        assert about.pairs["adjusted"].tolist() == pytest.approx(np.minimum(1, 2 * alone.pairs["adjusted"]).tolist())


def test_a_whole_report_finds_what_differs():
    values = np.array([[[1.0, 1.1, 1.2], [2.0, 2.11, 2.2], [2.0, 2.1, 2.21]]])
    (about,) = by_task(records_of(values))
    assert about.cells[0] == "c0" and about.groups == {"c0": "a", "c1": "b", "c2": "b"}
    assert about.front("complexity/parameters") == {
        "c0": Standing.FRONT, "c1": Standing.DOMINATED, "c2": Standing.DOMINATED,
    }  # fmt: skip
    assert [row[-1] for row in sheets.to_best(about).rows] == ["c0 is better"] * 2
    assert [row[-1] for row in sheets.pairs(about).rows] == ["not distinguishable"]
