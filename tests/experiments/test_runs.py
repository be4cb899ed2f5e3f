"""What happens in a run stays in its outcome; the table of a grid."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from experiments import grids, runs
from experiments.outcomes import Grid, Outcome, headline, table
from experiments.record import read_status
from experiments.runs import ConfigError, execute


@pytest.mark.parametrize(
    "change",
    [
        {"model": 3}, {"model": {"layout": 7}}, {"task": None}, {"task": {}}, {"stack": None}, {"stack": 5},
        {"seed": None}, {"sweep": [1]}, {"optimizer": "fast"}, {"trainer": {"steps": "${nowhere}"}},
        {"extra": {"a": 1}},
    ],
)
def test_a_cell_with_options_of_any_type_fails_with_a_record(plan_of, tmp_path, change):
    settings = plan_of().settings
    tree = {name: getattr(settings, name) for name in settings.__dataclass_fields__}
    tree |= {"runs": str(tmp_path / "runs"), "mlflow": False} | change
    outcome = execute(OmegaConf.to_container(OmegaConf.create(tree)), "command", alone=False)
    assert outcome.status == "failed" and outcome.text.startswith("ValueError: ")
    status = read_status(tmp_path / "runs" / outcome.folder.rpartition("/")[2])
    assert (status.status, status.reason) == ("FAILED", outcome.text)
    with pytest.raises(ConfigError, match=r"\w"):
        execute(tree, "command", alone=True)


def test_a_cell_without_a_place_for_its_record_fails_all_the_same(plan_of, tmp_path):
    (tmp_path / "file").write_text("")
    settings = plan_of().settings
    tree = {name: getattr(settings, name) for name in settings.__dataclass_fields__}
    tree |= {"runs": str(tmp_path / "file"), "mlflow": False}
    outcome = execute(tree, "command", alone=False)
    assert outcome.status == "failed" and "cannot be written" in outcome.text


def test_the_table_by_hand(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "log.txt").write_text("Traceback ...")
    outcomes = [
        Outcome("mha + linear", "mqar", 0, "finished", "val/loss 0.5", "runs/a", 12.34),
        Outcome("gqa", "mqar", 11, "failed", "ValueError: first\nsecond", str(tmp_path / "b"), 0.5),
        Outcome("gqa", "mqar", 2, "skipped", "finished yesterday", "runs/c"),
        Outcome("gqa", "mqar", 3, "diverged", "the training loss was not finite at step 7", "runs/d", 1.0),
    ]
    assert table(outcomes).splitlines() == [
        "stack         task  seed  status    seconds  result",
        "mha + linear  mqar  0     finished  12.3     val/loss 0.5",
        f"gqa           mqar  11    failed    0.5      ValueError: first (log: {tmp_path}/b/log.txt)",
        "gqa           mqar  2     skipped            finished yesterday",
        "gqa           mqar  3     diverged  1.0      the training loss was not finite at step 7",
        "1 finished, 1 skipped, 1 failed, 1 diverged",
    ]
    assert [outcome.good for outcome in outcomes] == [True, False, True, False]


def test_what_would_read_the_same_is_told_apart_by_its_options():
    outcomes = [Outcome("gqa", "mqar", seed, "finished", "", "runs/a", None, job)
                for job, seed in enumerate((0, 0, 1))]  # fmt: skip
    jobs = [["stack=gqa", "a.b=1", "seed=0"], ["stack=gqa", "a.b=mha\\ +\\ mlp", "seed=0"], ["stack=gqa", "seed=1"]]
    assert [line.partition("  ")[0] for line in table(outcomes, grids.varying(jobs)).splitlines()[1:4]] == [
        "gqa (a.b=1 seed=0)", "gqa (a.b=mha + mlp seed=0)", "gqa"]


def test_outcomes_of_other_processes_are_read_back(tmp_path, monkeypatch):
    monkeypatch.setattr(Grid, "folder", None)
    assert Grid.outcomes() is None
    Grid().on_multirun_start(OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path / "grid")}}}))
    assert Grid.outcomes() == []
    outcomes = [Outcome("gqa", "mqar", seed, "finished", "ü\n", "runs/a", 1.5) for seed in (0, 1)]
    for outcome in outcomes:
        Grid.add(tmp_path / "grid", outcome)
    assert Grid.outcomes() == outcomes


def test_the_headline_is_validation_and_the_accuracy_of_each_suite():
    values = {"complexity/parameters": 5, "train/loss": 1.0, "val/loss": 0.25, "val/accuracy": 0.5,
              "eval/kv4/loss": 9.0, "eval/kv4/accuracy": 0.75, "eval/kv8/accuracy": 0.5}
    assert headline(values) == "val/loss 0.25  val/accuracy 0.5  test accuracy  kv4 0.750  kv8 0.500"
    assert headline({"val/loss": 1.0}) == "val/loss 1"


@pytest.mark.parametrize(("mlflow", "uri"), [("http://127.0.0.1:9", "http://127.0.0.1:9"), ("nope", None), (3, None)])
def test_a_refused_cell_goes_where_its_run_would_have_gone(plan_of, tmp_path, monkeypatch, mlflow, uri):
    seen = []

    class Seen(runs.Tracker):
        def __init__(self, folder, about, uri=None):
            seen.append(uri)
            super().__init__(folder, about, None)

    monkeypatch.setattr(runs, "Tracker", Seen)
    settings = plan_of().settings
    tree = {name: getattr(settings, name) for name in settings.__dataclass_fields__}
    tree |= {"runs": str(tmp_path / "runs"), "mlflow": mlflow, "seed": None}
    assert execute(tree, "command", alone=False).status == "failed"
    assert seen == [uri]
