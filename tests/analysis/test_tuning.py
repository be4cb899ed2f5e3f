"""Reports say how learning rates were chosen, what that took, and where it was not fair; trials are in no mean."""

from __future__ import annotations

import json

import pytest

from analysis import tuning
from analysis.comparison import by_task
from analysis.report import build, headline
from analysis.runs import load, select


@pytest.fixture
def tuned(write):
    """Writes one record whose learning rate was chosen, with 1,000 tokens, 2e12 FLOPs and 30 s behind the choice."""

    def one(stack, seed, lr=0.01, edge=None, scores=((0.001, 0.5), (0.01, 0.25), (0.1, None)), runs=("a", "b")):
        folder = write(stack, seed, params={"lr": lr, "optimizer.lr": lr})
        choice = {"lr": lr, "edge": edge, "method": "grid", "monitor": "val/loss", "seeds": [7, 8], "scores": scores,
                  "runs": [f"{stack} {run}" for run in runs], "tokens": 1000, "flops": 2e12, "seconds": 30.0,
                  "text": "..."}  # fmt: skip
        (folder / "tuning.json").write_text(json.dumps(choice))
        return folder

    return one


def records(folder):
    return load(folder.parent)


def test_how_and_at_what_cost_the_rates_were_chosen_by_hand(tuned):
    tuned("mha", 0)
    tuned("mha", 1)
    found = records(tuned("linear", 0, lr=0.001, scores=((0.001, 0.1), (0.01, 0.2), (0.1, 0.3))))
    (sentence,) = tuning.told(found)
    assert sentence == (
        "Learning rates were chosen by val/loss on seeds 7, 8, which are in no mean here: mha 0.01 (of 3), linear "
        "0.001 (of 3). That took 4 more runs: 2,000 training tokens, 4 TFLOPs, 60 s."
    )
    assert sentence in by_task(found)[0].findings
    assert "That took 4 more runs" in build(found) and "That took 4 more runs" in headline(found)


def test_a_rate_at_an_edge_and_unequal_tuning_are_warned_of(tuned, write):
    tuned("mha", 0, edge="highest")
    tuned("mha", 1, edge="highest")
    tuned("gqa", 0, scores=((0.001, 0.5), (0.01, 0.25)))
    found = records(write("window", 0))
    assert by_task(found)[0].warnings[-3:] == [
        "The learning rate of mha, 0.01, is the highest that was tried: a better one may lie beyond.",
        "Learning rates were tuned for mha, gqa; they were given for window.",
        "The cells were tuned with different numbers of trials: 2, 3.",
    ]


def test_in_another_sweep_a_chosen_rate_is_one_that_was_given(tuned):
    """Which came upon the same run: nothing in it has changed."""
    folder = tuned("mha", 0)
    status, path = json.loads((folder / "status.json").read_text()), folder / "tuning.json"
    (folder / "status.json").write_text(json.dumps(status | {"sweeps": ["grid", "tuned"]}))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sweeps": ["tuned"]}))
    found = records(tuned("linear", 0))
    assert len(list(tuning.told(select(found, "tuned")))) == 1
    assert list(tuning.choices(select(found, "grid"))["mha"]) == [None]


def test_without_tuning_nothing_is_said(write):
    found = records(write("mha", 0))
    assert list(tuning.told(found)) == list(tuning.warnings(found)) == []


def test_trials_are_no_results(tuned, write):
    trial = write("mha", 7, accuracy={4: 0.0})
    status = json.loads((trial / "status.json").read_text())
    (trial / "status.json").write_text(json.dumps(status | {"trial": True, "sweep": None, "trials": ["grid"]}))
    found = records(tuned("mha", 0))
    assert list(found.runs["seed"]) == [0] and found.problems.empty
