"""The local record and MLflow: the same numbers, legal names, no way for the second to harm a run."""

from __future__ import annotations

import math
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from mlflow.entities import ViewType
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from omegaconf import OmegaConf

from experiments import tracking
from experiments.metrics import legal
from experiments.record import Description
from experiments.tracking import Tracker, cut, safe

ABOUT = Description("gqa", {"stack": "gqa", "seed": 1, "lr": 0.5}, {"seed": 1, "model": {"kv": [1, 2]}},
                    {"python": "3"}, "python -m experiments.train seed=1", "mine")


@pytest.fixture
def database(new_database, tmp_path):
    return f"sqlite:///{new_database(tmp_path)}"


@pytest.fixture(autouse=True)
def nothing_was_warned_about(monkeypatch):
    monkeypatch.setattr(tracking.server, "_warned", False)


def client(database):
    return MlflowClient(database)


def runs(database, view=ViewType.ACTIVE_ONLY):
    found = client(database)
    return found.search_runs([found.get_experiment_by_name("mixerlab").experiment_id], run_view_type=view)


def test_numbers_that_are_not_finite_are_stored_nowhere(tmp_path, database, read_events):
    tracker = Tracker(tmp_path / "run", ABOUT, database)
    tracker.log(1, 64, {"train/loss": math.nan, "val/loss": math.inf, "val/accuracy": 0.5})
    tracker.log(2, 128, {"train/loss": -math.inf})
    tracker.finish("DIVERGED", "the loss was not finite")
    assert [event["metrics"] for event in read_events(tracker.folder)] == [{"val/accuracy": 0.5}]
    run, = runs(database)
    assert run.data.metrics == {"val/accuracy": 0.5}


def test_mlflow_has_what_the_record_has(tmp_path, database):
    tracker = Tracker(tmp_path / "run", ABOUT, database)
    assert runs(database)[0].info.status == "RUNNING"
    tracker.log(0, 0, {"complexity/parameters": 7})
    for step in (1, 2, 3):
        tracker.log(step, 64 * step, {"train/loss": 1 / step})
    status = tracker.finish("FINISHED")
    run, = runs(database)
    assert (run.info.run_id, run.info.status, run.info.run_name) == (status.mlflow_run_id, "FINISHED", "gqa seed 1")
    assert run.data.params == {"stack": "gqa", "seed": "1", "lr": "0.5"}
    tags = {"sweep": "mine", "sweeps": "mine", "outcome": "FINISHED", "run_key": "run", "command": ABOUT.command}
    assert tags.items() <= run.data.tags.items()
    history = client(database).get_metric_history(run.info.run_id, "train/loss")
    assert [(point.step, point.value) for point in history] == [(64, 1.0), (128, 0.5), (192, 1 / 3)]
    assert client(database).get_metric_history(run.info.run_id, "complexity/parameters")[0].step == 0
    artifacts = Path(run.info.artifact_uri.removeprefix("file://"))
    for name in ("config.yaml", "environment.json"):
        assert (artifacts / name).read_text() == (tracker.folder / name).read_text()


@pytest.mark.parametrize("outcome", ["FAILED", "DIVERGED"])
def test_mlflow_is_told_the_outcome_and_the_reason(tmp_path, database, outcome):
    Tracker(tmp_path / "run", ABOUT, database).finish(outcome, "because " + 9000 * "x")
    run, = runs(database)
    assert (run.info.status, run.data.tags["outcome"]) == ("FAILED", outcome)
    assert run.data.tags["reason"].startswith("because x")


def test_a_new_try_replaces_its_mlflow_run(tmp_path, database):
    Tracker(tmp_path / "run", ABOUT, database).finish("FAILED", "no")
    status = Tracker(tmp_path / "run", ABOUT, database).finish("FINISHED")
    run, = runs(database)
    assert run.info.run_id == status.mlflow_run_id
    # In the bin, where it can be had back.
    assert len(runs(database, ViewType.ALL)) == 2


def test_long_values_stay_apart_and_illegal_names_too(tmp_path, database):
    # Case C26, with lists that share 250 characters and texts longer than MLflow takes.
    one = [1.0 + i / 7 for i in range(32)]
    other = [*one[:-1], 0.0]
    assert str(one)[:250] == str(other)[:250]
    long = {"long": 7000 * "a", "long2": 7000 * "a" + "b"}
    params = {"one": one, "other": other, **long, "a@b": 1, "a=b": 2, "x" * 300: 3, "x" * 301: 4}
    config = {"model": {"factors": other, **long}}
    tracker = Tracker(tmp_path / "run", Description("x", params, config, {}, ""), database)
    metrics = {"acc@512": 0.1, "acc=512": 0.2, "loss[len=64]": 0.3, "loss(len=64)": 0.4, "../up": 0.5, "val/loss": 0.6}
    tracker.log(1, 1, metrics)
    status = tracker.finish("FINISHED")
    run, = runs(database)
    assert len(run.data.params) == len(params) and len(set(run.data.params.values())) == len(params)
    assert len(run.data.metrics) == 6 and sorted(run.data.metrics.values()) == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    assert run.data.metrics["val/loss"] == 0.6
    stored = Path(run.info.artifact_uri.removeprefix("file://")) / "config.yaml"
    assert OmegaConf.to_container(OmegaConf.load(stored)) == config
    assert status.status == "FINISHED"


@pytest.mark.parametrize(
    "name", ["acc@512", "loss[len=64]", "../x", "/a", "a//b", ".", "", "é", "x" * 251, "[", "a/./b"]
)
def test_safe_names_are_legal_and_keep_legal_ones(name):
    assert legal(safe(name)) and safe(name) != name
    assert safe("eval/kv4/accuracy") == "eval/kv4/accuracy"


def test_cut_keeps_short_texts_and_tells_long_ones_apart():
    assert cut("abc", 3) == "abc"
    assert cut(50 * "a", 40) != cut(51 * "a", 40) and len(cut(51 * "a", 40)) == 40


def test_more_params_than_a_request_takes(tmp_path, database):
    params = {f"p{i}": i for i in range(250)}
    Tracker(tmp_path / "run", Description("x", params, {}, {}, ""), database).finish("FINISHED")
    assert len(runs(database)[0].data.params) == 250


@pytest.mark.parametrize("kind", ["a folder", "no database"])
def test_without_a_database_the_record_goes_on_and_one_line_says_so(tmp_path, capsys, kind):
    if kind == "a folder":
        (tmp_path / "mlflow.db").mkdir()
    else:
        (tmp_path / "mlflow.db").write_text(2000 * "not a database ")
    for name in ("a", "b"):
        tracker = Tracker(tmp_path / name, ABOUT, f"sqlite:///{tmp_path}/mlflow.db")
        tracker.log(1, 64, {"train/loss": 1.0})
        assert tracker.finish("FINISHED").mlflow_run_id is None
        assert (tracker.folder / "metrics.jsonl").exists()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("warning: MLflow fails, the local records go on without it: ")


def test_what_mlflow_missed_is_sent_at_the_end(tmp_path, database, monkeypatch, capsys):
    tracker = Tracker(tmp_path / "run", ABOUT, database)
    tracker.log(1, 64, {"train/loss": 1.0})
    real = tracker.mlflow.client.log_batch

    def down(*_, **__):
        raise MlflowException("the server is away")

    monkeypatch.setattr(tracker.mlflow.client, "log_batch", down)
    tracker.log(2, 128, {"train/loss": 0.5})
    monkeypatch.setattr(tracker.mlflow.client, "log_batch", real)
    # Once broken, it is left alone until the end: a server that is away costs minutes at every call.
    tracker.log(3, 192, {"train/loss": 0.25})
    run, = runs(database)
    assert len(client(database).get_metric_history(run.info.run_id, "train/loss")) == 1
    tracker.finish("FINISHED")
    run, = runs(database)
    history = client(database).get_metric_history(run.info.run_id, "train/loss")
    assert [(point.step, point.value) for point in history] == [(64, 1.0), (128, 0.5), (192, 0.25)]
    assert run.info.status == "FINISHED"
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_trouble_at_the_start_makes_one_run_at_the_end(tmp_path, database, monkeypatch):
    calls = []
    real = MlflowClient.log_artifact

    def once(self, *arguments):
        calls.append(arguments)
        if len(calls) == 1:
            raise OSError("no space left")
        return real(self, *arguments)

    monkeypatch.setattr(MlflowClient, "log_artifact", once)
    tracker = Tracker(tmp_path / "run", ABOUT, database)
    tracker.log(1, 64, {"train/loss": 1.0})
    status = tracker.finish("FINISHED")
    run, = runs(database)
    assert (run.info.run_id, run.info.status) == (status.mlflow_run_id, "FINISHED")
    assert run.data.metrics == {"train/loss": 1.0}


def test_a_deleted_experiment_is_said_with_the_way_back(database):
    client, experiment = tracking.connect(database)
    client.delete_experiment(experiment)
    with pytest.raises(ValueError, match=f"deleted there.* restore --experiment-id {experiment}$"):
        tracking.connect(database)


def test_the_database_writes_ahead_and_artifacts_are_absolute(template):
    with closing(sqlite3.connect(template)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    experiment = client(f"sqlite:///{template}").get_experiment_by_name("mixerlab")
    assert experiment.artifact_location == (template.parent / "artifacts").as_uri()


@pytest.mark.parametrize(("kind", "network"), [("ext4", False), ("nfs4", True), ("lustre", True), ("overlay", False)])
def test_network_file_systems_are_told_by_the_longest_mount(monkeypatch, kind, network):
    table = f"root / ext4 rw 0 0\nserver /home {kind} rw 0 0\ntmp /home2 nfs rw 0 0\n"
    monkeypatch.setattr(Path, "read_text", lambda path: table)
    assert tracking.server._on_network(Path("/home/me/mlflow.db")) is network


START = """
import sys
from multiprocessing import get_context
from pathlib import Path
import mlflow.tracking
from experiments.record import Description
from experiments.tracking import Tracker, address

def work(i, gate):
    gate.wait()
    tracker = Tracker(Path(f"runs/{i}"), Description("x", {"seed": i}, {"seed": i}, {}, ""), address("runs", True))
    for step in range(3):
        tracker.log(step, step, {"train/loss": i + step})
    sys.exit(tracker.finish("FINISHED").mlflow_run_id is None)

context = get_context("fork")
gate = context.Barrier(8)
processes = [context.Process(target=work, args=(i, gate)) for i in range(8)]
for process in processes:
    process.start()
for process in processes:
    process.join()
sys.exit(any(process.exitcode for process in processes))
"""


@pytest.mark.slow
def test_eight_processes_may_start_at_once_on_an_empty_folder(tmp_path):
    # Case C27.
    root = str(Path(tracking.__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", START], cwd=tmp_path, env={"PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
                          capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    database = f"sqlite:///{tmp_path}/runs/mlflow.db"
    assert [e.name for e in client(database).search_experiments()].count("mixerlab") == 1
    found = runs(database)
    assert sorted(run.data.params["seed"] for run in found) == list("01234567")
    assert {run.info.status for run in found} == {"FINISHED"}
    for run in found:
        assert run.data.metrics == {"train/loss": float(run.data.params["seed"]) + 2}
