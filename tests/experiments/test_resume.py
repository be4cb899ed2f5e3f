"""A run that was interrupted, and goes on, is the run that was not: bit for bit, on one thread."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import lightning as L
import pytest
import torch
from mlflow.tracking import MlflowClient

import experiments
from experiments import checkpoints, module, record
from experiments.record import Description, read_status
from experiments.signals import Terminated
from experiments.tracking import Tracker


class Death(BaseException):
    """Ends a run where it stands, as kill -9 does: nothing is cleaned up."""


def tracker_of(folder, plan, start=None):
    about = Description("x", plan.params, plan.config, {}, "", None, plan.key)
    return Tracker(folder, about, None, start and start.position)


def run(plan, folder, death=None):
    """Train a plan in a folder, going on where an earlier try stopped; `death` may patch it to die."""
    start = checkpoints.newest(folder, {plan.key})[0] if folder.exists() else None
    tracker = tracker_of(folder, plan, start)
    if death:
        death(tracker)
    try:
        module.train(plan, tracker, lambda line: None, start)
    except Death:
        return None
    tracker.finish("FINISHED")
    return tracker


def outcome(folder):
    """All that a run comes to: its curves, and the weights, optimiser and schedule at its end."""
    events = [(e["step"], e["tokens"], name, value) for e in record.read_events(folder)
              for name, value in e["metrics"].items() if not name.startswith("measured/")]
    content = checkpoints.newest(folder)[0].content
    kept = ("state_dict", "optimizer_states", "lr_schedulers", "tokens", "random", "global_step")
    return events, {name: content[name] for name in kept}


def assert_same(one, other):
    """Equal trees of tensors and plain values, bit for bit."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one:
            assert_same(one[name], other[name])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other)
    else:
        assert one == other


def at_event(number):
    """Dies instead of logging this event of its process, after some events beyond the last checkpoint."""
    def patch(tracker):
        real, seen = tracker.log, []

        def log(*event):
            seen.append(event)
            if len(seen) == number:
                raise Death
            real(*event)

        tracker.log = log

    return patch


CASES = {
    "plain": (),
    "dropout": ("model.mixers.mha.dropout=0.5",),
    "accumulated": ("trainer.accumulate=3", "trainer.batch_size=2"),
    "between": ("trainer.validate_every=5", "trainer.checkpoint_every=3", "trainer.log_every=2"),
    "every step": ("trainer.checkpoint_every=1", "trainer.log_every=4", "trainer.validate_every=4"),
    "scheduled": ("optimizer.schedule=wsd", "optimizer.warmup=0.4", "optimizer.clip=0.1"),
    "double": ("trainer.precision=64",),
    "patient": ("trainer.patience=3", "trainer.validate_every=1"),
    "short stop": ("trainer.target=100", "trainer.validate_every=6"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_is_the_uninterrupted_one(plan_of, tmp_path, case):
    plan = plan_of("trainer.steps=7", "optimizer.lr=0.02", *CASES[case])
    whole = outcome(run(plan, tmp_path / "whole").folder)
    count = len(list(record.read_events(tmp_path / "whole")))
    assert count >= 4
    for number in range(2, count + 1, 2 if count > 6 else 1):
        folder = tmp_path / f"dies-{number}"
        assert run(plan, folder, at_event(number)) is None
        assert_same(outcome(run(plan, folder).folder), whole)


def test_a_run_may_die_again_and_again(plan_of, tmp_path):
    plan = plan_of("trainer.steps=30", "trainer.checkpoint_every=3", "trainer.log_every=2")
    whole = outcome(run(plan, tmp_path / "whole").folder)
    tries = 0
    while run(plan, tmp_path / "dies", at_event(7)) is None:
        tries += 1
    assert tries >= 4 and len(read_status(tmp_path / "dies").resumed) == tries
    assert_same(outcome(tmp_path / "dies"), whole)


def test_a_run_that_died_after_training_is_tested_and_not_trained(plan_of, tmp_path, monkeypatch):
    plan = plan_of()
    whole = outcome(run(plan, tmp_path / "whole").folder)

    def die(tracker):
        def log(step, tokens, metrics, real=tracker.log):
            if any(name.startswith("eval/") for name in metrics):
                raise Death
            real(step, tokens, metrics)

        tracker.log = log

    assert run(plan, tmp_path / "dies", die) is None
    monkeypatch.setattr(module.Training, "training_step", lambda *_: 1 / 0)
    assert_same(outcome(run(plan, tmp_path / "dies").folder), whole)


def test_throughput_counts_the_steps_of_all_tries(plan_of, tmp_path):
    plan = plan_of("trainer.steps=30", "trainer.checkpoint_every=10", "trainer.validate_every=30")

    def die(tracker):
        def log(step, tokens, metrics, real=tracker.log):
            if step == 22:
                raise Death
            real(step, tokens, metrics)

        tracker.log = log

    run(plan, tmp_path / "dies", die)
    start = checkpoints.newest(tmp_path / "dies")[0]
    tokens, seconds = start.content["recorder"]["timed"]
    # A step is 64 tokens; the first 3 of 30 warm up.
    assert (start.position.step, tokens) == (20, 17 * 64) and seconds > 0
    run(plan, tmp_path / "dies")
    tokens, seconds = checkpoints.newest(tmp_path / "dies")[0].content["recorder"]["timed"]
    assert tokens == (17 + 7) * 64


def test_another_rule_of_stopping_does_not_inherit_the_stop(command_line, tmp_path):
    command_line("mlflow=false", "trainer.target=100", "trainer.steps=6")
    (old,) = folders(tmp_path)
    words = (f"resume={old}", "trainer.target=null", "trainer.patience=50")
    code, out, _ = command_line("mlflow=false", *words, tiny=False)
    assert code == 0 and "going on after step 2" in out and "step 6/6" in out


@pytest.mark.parametrize("batch", range(1, 10, 2))
def test_terminated_inside_of_a_step_it_finishes_the_step_first(plan_of, tmp_path, monkeypatch, batch):
    options = ("trainer.accumulate=4", "trainer.steps=4", "trainer.validate_every=2", "model.mixers.mha.dropout=0.1")
    plan = plan_of(*options)
    whole = outcome(run(plan, tmp_path / "whole").folder)
    real, seen = module.Training.training_step, []

    def step(self, *rest):
        seen.append(rest)
        if len(seen) == batch:
            signal.raise_signal(signal.SIGTERM)
        return real(self, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(module.Training, "training_step", step)
        with pytest.raises(Terminated):
            run(plan, tmp_path / "ended")
    found, _ = checkpoints.newest(tmp_path / "ended")
    assert found.position.step == -(-batch // 4)
    assert_same(outcome(run(plan, tmp_path / "ended").folder), whole)


# Checkpoints

def test_the_newest_checkpoints_are_kept(plan_of, tmp_path):
    names = {
        "trainer.keep_checkpoints=1": [4], "trainer.keep_checkpoints=2": [3, 4],
        "trainer.keep_checkpoints=null": [1, 2, 3, 4],
    }
    for option, steps in names.items():
        tracker = run(plan_of("trainer.checkpoint_every=1", option), tmp_path / option)
        found = sorted(path.name for path in tracker.record.checkpoints.iterdir())
        assert found == [f"step={step}.ckpt" for step in steps]


@pytest.mark.parametrize("damage", ["cut", "empty", "overwritten", "another file"])
def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(plan_of, tmp_path, damage):
    plan = plan_of("trainer.steps=8")
    whole = outcome(run(plan, tmp_path / "whole").folder)
    run(plan, tmp_path / "dies", at_event(9))
    folder = tmp_path / "dies" / "checkpoints"
    older, newest = sorted(folder.iterdir())
    content = newest.read_bytes()
    if damage == "another file":
        torch.save({"weights": 1}, newest)
    else:
        newest.write_bytes({"cut": content[: len(content) // 2], "empty": b"", "overwritten": b"x" * 999}[damage])
    start, faults = checkpoints.newest(tmp_path / "dies")
    assert start.path == older and len(faults) == 1 and newest.name in faults[0]
    assert_same(outcome(run(plan, tmp_path / "dies").folder), whole)


def test_without_a_checkpoint_that_loads_the_run_starts_anew(plan_of, tmp_path):
    plan = plan_of()
    run(plan, tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        path.write_bytes(b"")
    start, faults = checkpoints.newest(tmp_path / "run")
    assert start is None and len(faults) == 2


def test_a_checkpoint_of_another_config_is_named(plan_of, tmp_path):
    run(plan_of(), tmp_path / "run")
    with pytest.raises(ValueError, match=r"step=4.ckpt is a checkpoint of another config"):
        checkpoints.newest(tmp_path / "run", {plan_of("seed=1").key})


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("file write failed")])
def test_a_full_disk_at_a_checkpoint_is_said_once_and_training_goes_on(plan_of, tmp_path, monkeypatch, capsys, error):
    plan = plan_of("trainer.steps=6")
    whole = outcome(run(plan, tmp_path / "whole").folder)
    real, full = L.Trainer.save_checkpoint, [1, 2]

    def save(self, path, *rest, **named):
        if full:
            full.pop()
            Path(path).write_bytes(b"half of it")
            raise error
        return real(self, path, *rest, **named)

    monkeypatch.setattr(L.Trainer, "save_checkpoint", save)
    tracker = run(plan, tmp_path / "full")
    out = capsys.readouterr().out
    assert out.count("warning: no checkpoint at step 2") == 1 and "step 4" not in out
    assert [path.name for path in tracker.record.checkpoints.iterdir()] == ["step=6.ckpt"]
    assert_same(outcome(tracker.folder), whole)


# resume=RUN

def test_more_steps_continue_a_finished_run(command_line, tmp_path):
    """Case C28, and the whole of `resume=`: the same record, a new key, the rest of the steps alone."""
    assert command_line("mlflow=false", "optimizer.schedule=constant")[0] == 0
    (old,) = folders(tmp_path)
    code, out, _ = command_line("mlflow=false", f"resume={old}", "trainer.steps=6", tiny=False)
    (new,) = folders(tmp_path)
    assert code == 0 and "going on after step 4" in out and f"{old} is now {new}" in out
    status = read_status(new)
    assert new != old and (status.key, status.earlier_keys, status.resumed) == (new.name, [old.name], [4])
    # The same command again finds it under its old name; the new config alone does too.
    for words in ((f"resume={old.name}", "trainer.steps=6"), (f"resume={new.name}",)):
        code, out, _ = command_line("mlflow=false", *words, tiny=False)
        assert code == 0 and "skipped, finished" in out and folders(tmp_path) == [new]
    code, out, _ = command_line("mlflow=false", "optimizer.schedule=constant", "trainer.steps=6")
    assert code == 0 and "skipped" in out
    # With a constant rate, it is the run that had 6 steps from the start.
    shutil.move(new, tmp_path / "continued")
    command_line("mlflow=false", "optimizer.schedule=constant", "trainer.steps=6")
    ours, theirs = outcome(tmp_path / "continued"), outcome(folders(tmp_path)[0])
    assert_same(ours[1]["state_dict"], theirs[1]["state_dict"])
    # The old config is another run again.
    assert "FINISHED" in command_line("mlflow=false", "optimizer.schedule=constant")[1]
    assert len(folders(tmp_path)) == 2


def test_changed_optimiser_options_hold_from_there_on(command_line, tmp_path):
    command_line("mlflow=false")
    (old,) = folders(tmp_path)
    words = ("trainer.steps=8", "optimizer.lr=0.5", "optimizer.weight_decay=0.25", "optimizer.schedule=constant")
    assert command_line("mlflow=false", f"resume={old}", *words, tiny=False)[0] == 0
    content = checkpoints.newest(folders(tmp_path)[0])[0].content
    groups = content["optimizer_states"][0]["param_groups"]
    assert {group["lr"] for group in groups} == {0.5}
    assert {group["weight_decay"] for group in groups} == {0.25, 0.0}
    assert content["config"]["optimizer"]["lr"] == 0.5


def test_the_same_mlflow_run_goes_on_and_tags_tell_what_changed(command_line, tmp_path, new_database):
    new_database(tmp_path / "runs")
    command_line()
    (old,) = folders(tmp_path)
    before = read_status(old).mlflow_run_id
    command_line(f"resume={old}", "trainer.steps=6", tiny=False)
    (new,) = folders(tmp_path)
    assert read_status(new).mlflow_run_id == before
    client = MlflowClient(f"sqlite:///{tmp_path}/runs/mlflow.db")
    found = client.get_run(before)
    assert found.info.status == "FINISHED" and found.data.params["steps"] == "4"
    assert (found.data.tags["changed.steps"], found.data.tags["run_key"]) == ("6", new.name)
    steps = [point.step for point in client.get_metric_history(before, "val/loss")]
    assert steps == [128, 256, 384]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["resume=nothing"], "run='nothing' is no run"),
        (["resume={old}x"], "is no run (did you mean '{old}'?)"),
        (["resume={old}", "stack=linear"], "'stack=linear' cannot change"),
        (["resume={old}", "optimizer=adamw"], "'optimizer=adamw' is not one option's value"),
        (["resume={old}", "trainer.steps=3"], "trainer.steps=3 must be at least 4"),
        (["resume={old}", "seed=5"], "resume: seed=5 must stay 0"),
        (["resume={old}", "trainer.batch_size=8"], "trainer.batch_size=8 must stay 4"),
        (["resume={old}", "model.d_model=16"], "the options change the weights: embedding.weight has shape [32, 8]"),
        (["resume={old}", "trainer.stps=5"], "trainer.stps is no option (did you mean 'trainer.steps'?)"),
    ],
)
def test_a_wrong_resume_is_one_message_and_changes_nothing(command_line, tmp_path, words, message):
    command_line("mlflow=false")
    (old,) = folders(tmp_path)
    before = {path: path.read_bytes() for path in sorted(old.rglob("*")) if path.is_file()}
    code, out, err = command_line("mlflow=false", *(word.format(old=old.name) for word in words), tiny=False)
    assert (code, out) == (2, "") and message.format(old=old.name) in err and "Traceback" not in err
    assert folders(tmp_path) == [old]
    assert {path: path.read_bytes() for path in sorted(old.rglob("*")) if path.is_file()} == before


def test_a_move_that_died_half_way_is_finished(command_line, tmp_path):
    command_line("mlflow=false")
    (old,) = folders(tmp_path)
    command_line("mlflow=false", f"resume={old}", "trainer.steps=6", tiny=False)
    (new,) = folders(tmp_path)
    new.rename(old)
    assert command_line("mlflow=false")[0] == 0
    assert folders(tmp_path) == sorted([old, new])
    assert read_status(new).key == new.name and read_status(old).key == old.name


# experiments.load

def test_a_trained_model_comes_back_in_one_line(command_line, tmp_path, plan_of):
    command_line("mlflow=false", "stack=linear", "trainer.precision=64")
    (folder,) = folders(tmp_path)
    for run_ in (folder, folder.name):
        model = experiments.load(run_, tmp_path / "runs")
        assert not model.training
        weights = checkpoints.newest(folder)[0].weights
        for name, value in model.state_dict().items():
            assert torch.equal(value, weights[name])
    logits, _ = model.prefill(torch.randint(32, (1, 5)))
    assert logits.shape == (1, 5, 32)


@pytest.mark.parametrize("layout", ["mha + linear", "2*(mha|window)"])
def test_a_model_of_any_layout_comes_back(command_line, tmp_path, layout):
    command_line("mlflow=false", f"model.layout={layout}")
    (folder,) = folders(tmp_path)
    model = experiments.load(folder)
    assert model(torch.randint(32, (2, 7))).shape == (2, 7, 32)


def test_a_model_comes_back_without_the_text_that_it_was_trained_on(command_line, tmp_path):
    (tmp_path / "my.txt").write_text("To be, or not to be. " * 400)
    code, out, err = command_line("mlflow=false", "task=text", "task.path=my.txt", "task.length=16", "trainer.steps=1",
                                  "task.rows_per_suite=2", "model.d_model=8", "trainer.threads=1", tiny=False)
    assert code == 0, out + err
    (tmp_path / "my.txt").unlink()
    assert experiments.load(folders(tmp_path)[0])(torch.zeros(1, 3, dtype=torch.int64)).shape == (1, 3, 256)


def test_what_cannot_be_loaded_is_named(command_line, tmp_path):
    with pytest.raises(ValueError, match="'nothing' is no run"):
        experiments.load("nothing", tmp_path)
    command_line("mlflow=false")
    (folder,) = folders(tmp_path)
    for path in (folder / "checkpoints").iterdir():
        path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"has no checkpoint that can be read; .*step=4.ckpt cannot be read"):
        experiments.load(folder)


def folders(tmp_path):
    return sorted(path.parent for path in (tmp_path / "runs").glob("*/status.json"))
