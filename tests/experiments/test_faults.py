"""Full disks, servers that are away, two processes on one run, other code: nothing is lost and everything is said."""

from __future__ import annotations

import importlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
from filelock import FileLock
from mlflow.tracking import MlflowClient

from experiments import environment, module, record, runs, sync, tracking
from experiments.record import Description, Record, read_status, write_status
from experiments.tracking import Tracker

ROOT = Path(__file__).parents[2]
ABOUT = Description("gqa", {"stack": "gqa", "seed": 1}, {"seed": 1}, {}, "command", "mine", "0123")


@pytest.fixture(autouse=True)
def nothing_was_warned_about(monkeypatch):
    monkeypatch.setattr(tracking.server, "_warned", False)


def folders(tmp_path):
    return sorted(path.parent for path in (tmp_path / "runs").glob("*/status.json"))


def call_sync(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["sync", *words])
    capsys.readouterr()
    code = sync.main()
    return code, *capsys.readouterr()


# A server that is away

@pytest.fixture
def server(tmp_path_factory):
    """Starts an MLflow server on a free port; its URI, and a function that kills it."""
    folder = tmp_path_factory.mktemp("server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
               "--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--default-artifact-root", str(folder / "a")]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                               start_new_session=True)
    uri = f"http://127.0.0.1:{port}"
    for _ in range(240):
        try:
            urllib.request.urlopen(f"{uri}/health")
            break
        except OSError:
            time.sleep(0.5)
    yield uri, lambda: os.killpg(process.pid, signal.SIGKILL), f"sqlite:///{folder}/mlflow.db"
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.slow
def test_training_goes_on_when_the_server_dies_and_sync_sends_the_rest(
    command_line, tmp_path, server, monkeypatch, capsys, template
):
    uri, kill, database = server
    real = Tracker.log

    def dying(self, step, *rest):
        if step == 2:
            kill()
        real(self, step, *rest)

    monkeypatch.setattr(Tracker, "log", dying)
    code, out, err = command_line(f"mlflow={uri}", "-m", "seed=0,1")
    assert code == 0 and out.count("FINISHED in") == 2
    assert err.count("warning: MLflow fails") == 1 and "experiments.sync" in err and len(err.splitlines()) == 1
    # The database of the server that is no more has half of the first run, and nothing of the second.
    client = MlflowClient(database)
    experiment = client.get_experiment_by_name("mixerlab").experiment_id
    (half,) = client.search_runs([experiment])
    assert half.info.status == "RUNNING" and "eval/kv2/loss" not in half.data.metrics
    code, out, _ = call_sync(monkeypatch, capsys, f"mlflow={database}")
    assert code == 0 and out.count("points sent") == 2
    found = client.search_runs([experiment])
    assert half.info.run_id in {run.info.run_id for run in found}
    assert [run.info.status for run in found] == ["FINISHED", "FINISHED"]
    for run in found:
        folder = tmp_path / "runs" / run.data.tags["run_key"]
        last = {name: value for event in record.read_events(folder) for name, value in event["metrics"].items()}
        assert run.data.metrics == last and read_status(folder).mlflow_run_id == run.info.run_id
        assert len(client.get_metric_history(run.info.run_id, "val/loss")) == 2
    # Once more: nothing is sent twice.
    code, out, _ = call_sync(monkeypatch, capsys)
    assert code == 0 and out.count(f"nothing was missing in {database}") == 2
    assert len(client.search_runs([experiment])) == 2


def test_a_server_that_is_not_there_is_said_once_and_soon(command_line, tmp_path, monkeypatch, capsys):
    began = time.monotonic()
    code, _, err = command_line("mlflow=http://127.0.0.1:9")
    assert code == 0 and len(err.splitlines()) == 1 and "MLflow fails" in err
    # MLflow alone would ask for minutes.
    assert time.monotonic() - began < 100
    assert read_status(folders(tmp_path)[0]).status == "FINISHED"
    # Whoever names no other place means the one that was asked for then.
    code, out, _ = call_sync(monkeypatch, capsys)
    assert code == 1 and "FAILED" in out and not (tmp_path / "runs" / "mlflow.db").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mlflow=somewhere"], "mlflow='somewhere' must be true, false or a URI"),
        (["mlflow=false"], "names nothing to send to"),
        (["runs=nowhere"], "runs='nowhere' has no records"),
        (["stack=gqa"], "'stack=gqa' is no option here"),
    ],
)
def test_a_wrong_sync_is_one_message(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    Record(tmp_path / "runs" / "0123", ABOUT).finish("FINISHED")
    code, out, err = call_sync(monkeypatch, capsys, *words)
    assert (code, out) == (2, "") and message in err and len(err.splitlines()) == 1


def test_sync_closes_what_died_and_leaves_alone_what_runs(tmp_path, monkeypatch, capsys, new_database):
    monkeypatch.chdir(tmp_path)
    new_database(tmp_path / "runs")
    for name in ("dead", "runs", "done"):
        tracker = Tracker(tmp_path / "runs" / name, replace(ABOUT, key=name), None)
        tracker.log(1, 64, {"train/loss": 1.0})
    tracker.finish("DIVERGED", "not finite")
    (tmp_path / "runs" / "broken").mkdir()
    (tmp_path / "runs" / "broken" / "status.json").write_text("{")
    with FileLock(tmp_path / "runs" / ".runs.lock"):
        code, out, _ = call_sync(monkeypatch, capsys)
    assert code == 1
    lines = dict(line.split(": ", 1) for line in out.splitlines())
    assert lines["runs/runs"] == "is being run: left alone" and "cannot be read" in lines["runs/broken"]
    assert read_status(tmp_path / "runs" / "dead").status == "KILLED"
    assert read_status(tmp_path / "runs" / "runs").status == "RUNNING"
    client = MlflowClient(f"sqlite:///{tmp_path}/runs/mlflow.db")
    found = client.search_runs([client.get_experiment_by_name("mixerlab").experiment_id])
    ends = {run.data.tags["run_key"]: (run.info.status, run.data.tags["outcome"]) for run in found}
    assert ends == {"dead": ("KILLED", "KILLED"), "done": ("FAILED", "DIVERGED")}


def test_a_run_that_mlflow_knows_and_the_record_does_not_is_found(tmp_path, new_database):
    """A process may die after MLflow made its run, and before the record could say which one."""
    uri = f"sqlite:///{new_database(tmp_path)}"
    first = Tracker(tmp_path / "run", ABOUT, uri)
    first.log(1, 64, {"train/loss": 1.0})
    write_status(first.folder, replace(read_status(first.folder), mlflow_run_id=None))
    status = Tracker(tmp_path / "run", ABOUT, uri, first.record.position(1)).finish("FINISHED")
    client = MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("mixerlab").experiment_id])
    assert run.info.run_id == status.mlflow_run_id and run.data.metrics == {"train/loss": 1.0}


def test_a_run_that_goes_on_brings_its_past_to_another_database(tmp_path, new_database):
    first = Tracker(tmp_path / "run", ABOUT, None)
    first.log(1, 64, {"train/loss": 1.0})
    uri = f"sqlite:///{new_database(tmp_path / 'other')}"
    second = Tracker(tmp_path / "run", ABOUT, uri, first.record.position(1))
    second.log(2, 128, {"train/loss": 0.5})
    client = MlflowClient(uri)
    points = client.get_metric_history(second.mlflow.run_id, "train/loss")
    assert [(point.step, point.value) for point in points] == [(64, 1.0), (128, 0.5)]


def test_a_run_that_finished_without_mlflow_is_closed_there_when_it_is_skipped(command_line, tmp_path, new_database):
    new_database(tmp_path / "runs")
    command_line("trainer.steps=4")
    (folder,) = folders(tmp_path)
    # As if it had died before its end, and finished without MLflow.
    write_status(folder, replace(read_status(folder), status="RUNNING"))
    client = MlflowClient(f"sqlite:///{tmp_path}/runs/mlflow.db")
    run_id = read_status(folder).mlflow_run_id
    client.update_run(run_id, status="RUNNING")
    assert command_line("mlflow=false")[0] == 0
    assert client.get_run(run_id).info.status == "RUNNING" and read_status(folder).behind
    code, out, _ = command_line()
    assert code == 0 and "skipped, finished" in out
    assert client.get_run(run_id).info.status == "FINISHED" and not read_status(folder).behind
    for name in client.get_run(run_id).data.metrics:
        steps = [point.step for point in client.get_metric_history(run_id, name)]
        assert len(steps) == len(set(steps)), name


def test_a_database_whose_making_was_interrupted_is_made_again(tmp_path):
    (tmp_path / ".mlflow.db-new").write_bytes(b"SQLite format 3\0 half of it")
    client, experiment = tracking.connect(f"sqlite:///{tmp_path}/mlflow.db")
    assert client.get_experiment(experiment).name == "mixerlab"
    assert sorted(p.name for p in tmp_path.iterdir() if "new" in p.name) == []


# A full disk

FULL = """
import resource, signal, sys
from experiments import module, train

limit, *sys.argv[1:] = sys.argv[1:]
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
real = module.Recorder.on_train_start

def on_train_start(self, *rest):
    real(self, *rest)
    # From now on no file may grow beyond this: writing stops in the middle, as on a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), resource.RLIM_INFINITY))

module.Recorder.on_train_start = on_train_start
sys.exit(train.main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("limit", [600, 20_000])
def test_a_full_disk_loses_nothing(tmp_path, limit):
    """At 600 bytes even the record is full; at 20,000 only checkpoints and the database are."""
    options = ["model.d_model=8", "model.mlp=none", "task.vocabulary=32", "task.length=16", "task.kv=[2]",
               "task.test_kv=[2]", "task.rows_per_suite=8", "trainer.steps=6", "trainer.batch_size=4",
               "trainer.log_every=2", "trainer.validate_every=2", "trainer.threads=1"]
    environment_ = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    call = {"cwd": tmp_path, "env": environment_, "capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run([sys.executable, "-c", FULL, str(limit), *options], **call)
    said = done.stdout + done.stderr
    assert done.returncode == 1 and "FAILED" in said and "File too large" in said
    assert said.count("Traceback") == 0
    (folder,) = folders(tmp_path)
    assert read_status(folder).status in ("RUNNING", "FAILED")
    done = subprocess.run([sys.executable, "-m", "experiments.train", *options], **call)
    assert done.returncode == 0 and "FINISHED" in done.stdout, done.stdout + done.stderr
    client = MlflowClient(f"sqlite:///{tmp_path}/runs/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("mixerlab").experiment_id])
    last = {name: value for event in record.read_events(folder) for name, value in event["metrics"].items()}
    assert run.info.status == "FINISHED" and run.data.metrics == last


# One run, twice

def test_the_process_that_runs_it_is_named(command_line, tmp_path, plan_of):
    folder = tmp_path / "runs" / plan_of().key
    Record(folder, ABOUT)
    with FileLock(folder.parent / f".{folder.name}.lock"):
        code, out, _ = command_line("mlflow=false")
    assert code == 0 and f"skipped, process {os.getpid()} on " in out


def test_a_record_of_a_dead_process_goes_on(command_line, tmp_path, plan_of):
    folder = tmp_path / "runs" / plan_of().key
    Record(folder, replace(ABOUT, key=folder.name))
    assert read_status(folder).status == "RUNNING"
    code, out, _ = command_line("mlflow=false")
    assert code == 0 and "FINISHED" in out


# Settled runs and other code

def test_a_diverged_run_is_an_outcome_and_stays_one(command_line, tmp_path, monkeypatch):
    assert command_line("mlflow=false", "optimizer.lr=1e30", "trainer.steps=20")[0] == 1
    calls = []
    monkeypatch.setattr(module, "train", lambda *_: calls.append(1) or {})
    code, out, _ = command_line("mlflow=false", "optimizer.lr=1e30", "trainer.steps=20")
    assert code == 1 and "diverged, val/loss was not finite" in out and "rerun=always" in out and not calls
    code, _, _ = command_line("mlflow=false", "optimizer.lr=1e30", "trainer.steps=20", "rerun=always")
    assert code == 0 and calls


@pytest.mark.parametrize(("rerun", "again"), [("never", False), ("stale", True), ("always", True)])
def test_a_finished_run_of_other_code_is_said_or_run_again(command_line, tmp_path, monkeypatch, rerun, again):
    command_line("mlflow=false")
    monkeypatch.setattr(runs, "code", lambda *_: "other")
    _, out, _ = command_line("mlflow=false", f"rerun={rerun}")
    assert ("FINISHED" in out) == again and ("by other code (rerun=stale runs it again)" in out) != again


@pytest.mark.parametrize(("rerun", "again"), [("never", False), ("stale", False), ("always", True)])
def test_a_finished_run_of_this_code_is_run_again_only_when_always(command_line, tmp_path, rerun, again):
    command_line("mlflow=false")
    _, out, _ = command_line("mlflow=false", f"rerun={rerun}")
    assert ("FINISHED" in out) == again and "other code" not in out


def test_the_code_of_a_run_is_ours_and_that_of_its_mixers(tmp_path, monkeypatch):
    file = tmp_path / "one_mixer.py"
    file.write_text("class Mine:\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    mine = importlib.import_module("one_mixer").Mine
    before = environment.code(mine)
    assert before == environment.code(mine) != environment.code()
    file.write_text("class Mine:\n    changed = 1\n")
    assert environment.code(mine) != before


@pytest.mark.parametrize("content", ["{", "[]", '{"status": 1, "typo": 2}'])
def test_an_unreadable_record_is_named_and_left_as_it_is(command_line, tmp_path, plan_of, content):
    folder = tmp_path / "runs" / plan_of().key
    folder.mkdir(parents=True)
    (folder / "status.json").write_text(content)
    (folder / "metrics.jsonl").write_text("precious")
    code, out, err = command_line("mlflow=false")
    assert (code, out) == (2, "") and f"{folder.name}/status.json cannot be read" in err and len(err.splitlines()) == 1
    code, out, _ = command_line("mlflow=false", "-m", "seed=0,1")
    assert code == 1 and "cannot be read" in out and "1 finished, 0 skipped, 1 failed" in out
    assert (folder / "metrics.jsonl").read_text() == "precious"
