"""Grids in other processes: shares of a machine, what dies alone, and what is missing before anything starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import BrokenExecutor
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from experiments import slurm
from experiments.launchers import Joblib, Worker, shares
from experiments.record import Description, read_status
from experiments.runs import lost
from experiments.tracking import Tracker

ROOT = Path(__file__).parents[2]
PLUGIN = """
import multiprocessing
import os
import signal
from mixers import registry
from mixers.base import Mixer

@registry.register("mine")
class Mine(Mixer):
    def __init__(self, d_model: int):
        super().__init__()

    def whole(self, x):
        return x

@registry.register("lethal")
class Lethal(Mixer):
    def __init__(self, d_model: int):
        super().__init__()
        # As the system does where memory runs out.
        if multiprocessing.current_process().name != "MainProcess":
            os.kill(os.getpid(), signal.SIGKILL)

    def whole(self, x):
        return x

@registry.register("broken")
class Broken(Mixer):
    def __init__(self, d_model: int):
        raise ValueError("broken in " + multiprocessing.current_process().name)
"""


def test_a_killed_worker_is_a_failed_run_and_harms_no_other(tmp_path):
    """Two at a time, with mixers of a plug-in: the first is killed, the second goes on, the third has a new process."""
    (tmp_path / "plugin.py").write_text(PLUGIN)
    options = [
        "model.d_model=8", "model.mlp=none", "task.vocabulary=32", "task.length=16", "task.kv=[2]", "task.test_kv=[2]",
        "task.rows_per_suite=8", "trainer.steps=2", "trainer.batch_size=4", "trainer.validate_every=2", "mlflow=false",
    ]
    grid = ["-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "stack=lethal,mine,broken"]
    environment = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"], "MIXERLAB_PLUGINS": str(tmp_path / "plugin.py")}
    done = subprocess.run([sys.executable, "-m", "experiments.train", *options, *grid], cwd=tmp_path, env=environment,
                          capture_output=True, text=True, timeout=900)
    print(done.stdout, done.stderr)
    assert done.returncode == 1 and "3 runs, 2 at a time, CPU threads of each: 1" in done.stdout
    assert "1 finished, 0 skipped, 2 failed, 0 diverged" in done.stdout and "Traceback" not in done.stderr
    found = {json.loads((path.parent / "params.json").read_text())["stack"]: path.parent
             for path in (tmp_path / "runs").glob("*/status.json")}
    status = read_status(found["lethal"])
    assert status.status == "FAILED" and "SIGKILL" in status.reason and status.owner is None
    assert "broken in LokyProcess" in read_status(found["broken"]).reason
    assert read_status(found["mine"]).status == "FINISHED"
    assert json.loads((found["mine"] / "environment.json").read_text())["threads"] == 1


def test_a_worker_that_was_killed_while_idle_is_replaced():
    worker = Worker({})
    try:
        assert worker.start(os.getpid).result() == worker.process.result()
        os.kill(worker.process.result(), signal.SIGKILL)
        with pytest.raises(BrokenExecutor):
            while True:
                worker.pool.submit(os.getpid).result()
        assert worker.start(os.getpid).result() == worker.process.result()
    finally:
        worker.close()


def test_a_run_that_died_without_a_word_is_failed_in_its_record_and_in_mlflow(plan_of, tmp_path, new_database):
    database = new_database(tmp_path)
    plan = plan_of(f"runs={tmp_path}")
    tree = {name: getattr(plan.settings, name) for name in plan.settings.__dataclass_fields__}
    tracker = Tracker(tmp_path / plan.key, Description("mha", {}, plan.config, {}, "command", key=plan.key),
                      f"sqlite:///{database}")
    tracker.log(1, 64, {"train/loss": 1.0})
    outcome = lost(tree, "command", "its process was shot")
    assert (outcome.status, outcome.text) == ("failed", "its process was shot")
    status = read_status(tracker.folder)
    assert (status.status, status.reason, status.behind) == ("FAILED", "its process was shot", False)
    run = MlflowClient(f"sqlite:///{database}").get_run(status.mlflow_run_id)
    assert (run.info.status, run.data.tags["reason"]) == ("FAILED", "its process was shot")
    # One that had ended keeps its end.
    tracker.finish("FINISHED")
    assert lost(tree, "command", "too late").status == "skipped"


@pytest.mark.parametrize(
    ("cells", "cores", "gpus", "asked", "threads", "devices"),
    [
        (9, 8, "", (None, 1, 1), "1", [None] * 8),
        (9, 8, "", (None, 3, 1), "3", [None] * 2),
        (9, 2, "", (None, 4, 1), "4", [None]),
        (3, 8, "", (None, None, 1), "2", [None] * 3),
        (9, 8, "", (4, None, 1), "2", [None] * 4),
        (9, 8, "0,1", (None, 2, 1), "2", ["0", "1"]),
        (9, 8, "4,5,6,7", (None, 1, 2), "1", ["4,5", "6,7"]),
        (9, 8, "0,1", (4, 1, 1), "1", ["0", "1", "0", "1"]),
        (9, 8, "0", (None, 4, 0), "4", [None] * 2),
    ],
)
def test_a_machine_is_shared_by_hand(cells, cores, gpus, asked, threads, devices):
    places = shares(cells, cores, gpus.split(",") if gpus else [], Joblib(*asked))
    assert {place["OMP_NUM_THREADS"] for place in places} == {threads}
    assert [place.get("CUDA_VISIBLE_DEVICES") for place in places] == devices


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=0"], "hydra.launcher.n_jobs=0 must be"),
        (["-m", "hydra/launcher=joblib", "hydra.launcher.threads=half"], "hydra.launcher.threads='half' must be"),
        (["-m", "hydra/launcher=joblib", "hydra.launcher.njobs=2"], "(did you mean 'hydra.launcher.n_jobs'?)"),
        (["-m", "hydra/launcher=jobli"], "(did you mean 'joblib'?)"),
        (["-m", "hydra/launcher=submitit_slurm"], "there is no Slurm on this machine (no command sbatch)"),
        (["hydra/launcher=joblib"], "it needs -m"),
    ],
)
def test_what_cannot_run_is_one_message_before_anything_starts(command_line, tmp_path, monkeypatch, words, message):
    monkeypatch.setenv("PATH", str(tmp_path))
    code, out, err = command_line(*words, "seed=0,1" if "-m" in words else "seed=0")
    assert (code, out) == (2, "") and message in err and len(err.splitlines()) == 1
    assert not list(tmp_path.rglob("status.json"))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("time=soon", "hydra.launcher.time='soon' must be a whole number of at least 1"),
        ("array_parallelism=0", "hydra.launcher.array_parallelism=0 must be"),
        ("max_num_timeout=x", "hydra.launcher.max_num_timeout='x' must be"),
        ("setup=abc", "hydra.launcher.setup='abc' must be a list of commands"),
        ("partition=nope", "hydra/launcher=submitit_slurm: Slurm takes no such jobs: sbatch: error: no partition nope"),
    ],
)
def test_what_slurm_would_refuse_is_one_message(command_line, tmp_path, monkeypatch, option, message):
    refusal = "echo 'sbatch: error: no partition nope' >&2; exit 1"
    for name, line in {"sinfo": "", "squeue": "", "sbatch": refusal}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    code, _, err = command_line("-m", "seed=0,1", "hydra/launcher=submitit_slurm", f"hydra.launcher.{option}")
    assert code == 2 and message in err and "Traceback" not in err
    assert not list(tmp_path.rglob("status.json")) and not list(tmp_path.rglob("grid.json"))


def test_slurm_without_its_extra_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "submitit", None)
    monkeypatch.setattr(slurm.shutil, "which", lambda name: f"/usr/bin/{name}")
    with pytest.raises(ValueError, match=r"pip install 'mixerlab\[slurm\]'"):
        slurm.find_slurm()


def test_a_slurm_that_does_not_answer_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "submitit", sys)
    monkeypatch.setattr(slurm.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(slurm, "_ask", lambda *command: (1, "Unable to contact slurm controller"))
    with pytest.raises(ValueError, match=r"does not answer \(Unable to contact slurm controller\)"):
        slurm.find_slurm()
