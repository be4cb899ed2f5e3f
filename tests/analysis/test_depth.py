"""The grid of a needle's depths and lengths, from the suites' names to the picture."""

from __future__ import annotations

import json

import pytest

from analysis import depth, report
from analysis.comparison import by_task
from analysis.runs import load

PARAMS = {"task": "needle", "task.name": "needle", "task.kv": None, "task.length": 64}


@pytest.fixture
def tested(write):
    """One record with these accuracies by (length, depth)."""

    def one(found, **about):
        folder = write(accuracy={}, params=PARAMS, **about)
        metrics = {f"eval/length{length}_depth{deep}/accuracy": value for (length, deep), value in found.items()}
        line = {"step": 200, "tokens": 2000, "metrics": metrics}
        (folder / "metrics.jsonl").write_text((folder / "metrics.jsonl").read_text() + json.dumps(line) + "\n")

    return one


FOUND = {(64, 0): 0.5, (64, 50): 0.75, (256, 0): 0.25, (256, 50): 1.0}


def test_a_grid_is_the_mean_over_seeds_by_length_and_depth(tested, runs):
    # In another order than the numbers'.
    for seed, shift in ((0, 0.0), (1, -0.25)):
        tested(dict(reversed([(at, value + shift) for at, value in FOUND.items()])), seed=seed)
    tested(FOUND, stack="window")
    about, = by_task(load(runs))
    grids = depth.grids(about.counted, ["window", "mha"])
    assert list(grids) == ["window", "mha"]
    mha = grids["mha"]
    assert (list(mha.index), list(mha.columns)) == ([64, 256], [0, 50])
    assert mha.to_numpy().tolist() == [[0.375, 0.625], [0.125, 0.875]]
    figure, = depth.heat_maps(grids)
    assert [trace.name for trace in figure.data] == ["window", "mha"]
    assert [list(trace.y) for trace in figure.data] == [["window, 64", "window, 256"], ["mha, 64", "mha, 256"]]
    assert [list(row) for row in figure.data[1].z] == [[0.375, 0.625], [0.125, 0.875]]
    assert list(figure.data[0].x) == ["0 %", "50 %"]


def test_many_cells_are_several_pictures(tested, runs):
    for i in range(9):
        tested(FOUND, stack=f"stack{i}")
    about, = by_task(load(runs))
    pictures = depth.heat_maps(depth.grids(about.counted, about.cells))
    assert [len(figure.data) for figure in pictures] == [7, 2]


def test_other_tasks_have_no_depth(write, runs):
    write()
    about, = by_task(load(runs))
    assert depth.heat_maps(depth.grids(about.counted, about.cells)) == []


def test_the_report_shows_it(tested, runs):
    tested(FOUND)
    page = report.build(load(runs))
    assert "Accuracy by depth and length" in page and "Trained at 64 tokens" in page and "mha, 256" in page
