"""The local record: whole at every moment, and refused rather than lost where it cannot be read."""

from __future__ import annotations

import json

import pytest
from omegaconf import OmegaConf

from experiments import record
from experiments.record import Description, Position, Record, Status, lock, read_status, write_status

ABOUT = Description("gqa", {"stack": "gqa", "seed": 1, "lr": 0.5}, {"seed": 1, "model": {"kv": [1, 2]}},
                    {"python": "3"}, "python -m experiments.train seed=1", "mine", "0123")


def test_the_files_of_a_record(tmp_path):
    tracker = Record(tmp_path / "run", ABOUT)
    assert read_status(tracker.folder).status == "RUNNING"
    tracker.log(0, 0, {"complexity/parameters": 7})
    tracker.log(2, 128, {"train/loss": 0.5})
    status = tracker.finish("FINISHED")
    assert sorted(path.name for path in tracker.folder.iterdir()) == [
        "checkpoints", "config.yaml", "environment.json", "metrics.jsonl", "params.json", "status.json"]
    assert OmegaConf.to_container(OmegaConf.load(tracker.folder / "config.yaml")) == ABOUT.config
    assert json.loads((tracker.folder / "params.json").read_text()) == ABOUT.params
    assert json.loads((tracker.folder / "environment.json").read_text()) == ABOUT.environment
    lines = list(record.read_events(tracker.folder))
    assert all(abs(line.pop("time") - tracker.began) < 60 for line in lines)
    assert lines == [{"step": 0, "tokens": 0, "metrics": {"complexity/parameters": 7.0}},
                     {"step": 2, "tokens": 128, "metrics": {"train/loss": 0.5}}]
    assert read_status(tracker.folder) == status
    assert (status.status, status.reason, status.sweep, status.command) == ("FINISHED", None, "mine", ABOUT.command)
    assert status.ended >= status.started and status.seconds >= 0 and status.mlflow_run_id is None


def test_a_failure_keeps_reason_and_traceback(tmp_path):
    tracker = Record(tmp_path / "run", ABOUT)
    tracker.finish("FAILED", "ValueError: no", "Traceback ...")
    assert read_status(tracker.folder).reason == "ValueError: no"
    assert (tracker.folder / "log.txt").read_text() == "Traceback ..."


def test_a_new_try_starts_an_empty_record(tmp_path):
    first = Record(tmp_path / "run", ABOUT)
    first.log(1, 1, {"train/loss": 1.0})
    (first.checkpoints / "last.ckpt").write_text("old")
    first.finish("FAILED", "no", "Traceback ...")
    second = Record(tmp_path / "run", ABOUT)
    assert not (second.folder / "metrics.jsonl").exists() and not list(second.checkpoints.iterdir())
    assert not (second.folder / "log.txt").exists()


def test_a_status_that_cannot_be_written_leaves_the_old_one_whole(tmp_path, monkeypatch):
    status = Status("RUNNING", "now", "command")
    write_status(tmp_path, status)

    def full(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr(record.os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_status(tmp_path, Status("FINISHED", "now", "command"))
    assert read_status(tmp_path) == status and [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_what_is_no_record_is_never_taken_for_an_empty_one(tmp_path):
    assert read_status(tmp_path) is None and read_status(tmp_path / "nothing") is None
    (tmp_path / "status.json").write_text('{"status": "FINI')
    with pytest.raises(ValueError, match=r"status\.json cannot be read"):
        read_status(tmp_path)
    (tmp_path / "status.json").rename(tmp_path / "thesis.tex")
    with pytest.raises(ValueError, match=r"holds files but no status\.json"):
        read_status(tmp_path)


def test_a_record_whose_first_file_was_being_written_is_none(tmp_path):
    (tmp_path / ".status.json-123").write_text("{")
    assert read_status(tmp_path) is None


def test_a_record_goes_on_where_its_checkpoint_was_taken(tmp_path, monkeypatch):
    first = Record(tmp_path / "run", ABOUT)
    first.log(1, 64, {"train/loss": 1.0})
    monkeypatch.setattr(first, "began", first.began - 100)
    position = first.position(1)
    first.log(2, 128, {"train/loss": 0.5})
    with first.metrics.open("a") as file:
        file.write('{"step": 3, "tok')
    second = Record(tmp_path / "run", ABOUT, position)
    assert (second.status.resumed, second.status.started) == ([1], first.status.started)
    second.log(2, 128, {"train/loss": 0.25})
    assert [event["metrics"] for event in record.read_events(second.folder)] == [
        {"train/loss": 1.0}, {"train/loss": 0.25}]
    assert 100 <= second.finish("FINISHED").seconds < 160


def test_a_line_cut_short_is_left_out(tmp_path):
    first = Record(tmp_path / "run", ABOUT)
    first.log(1, 64, {"train/loss": 1.0})
    with first.metrics.open("a") as file:
        file.write('{"step": 2, "metrics": {"tra')
    assert [event["step"] for event in record.read_events(first.folder)] == [1]


def test_a_lock_is_held_once_and_let_go(tmp_path):
    with lock(tmp_path / "run") as mine, lock(tmp_path / "run") as also:
        assert (mine, also) == (True, False)
    with lock(tmp_path / "run") as again:
        assert again


def test_a_status_says_who_runs_it_until_it_ends(tmp_path):
    tracker = Record(tmp_path / "run", ABOUT)
    assert tracker.status.owner.startswith("process ")
    assert tracker.finish("KILLED", "terminated").owner is None


def test_a_position_survives_json(tmp_path):
    position = Record(tmp_path / "run", ABOUT).position(7)
    assert Position(**json.loads(json.dumps(vars(position)))) == position and position.bytes == 0
