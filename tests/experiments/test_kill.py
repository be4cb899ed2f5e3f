"""A grid that is killed again and again, and started again each time, ends as the grid that nobody touched.

MIXERLAB_TEST_KILLS and MIXERLAB_TEST_CELLS make it as long as one likes.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from experiments import checkpoints, record

ROOT = Path(__file__).parents[2]
KILLS = int(os.environ.get("MIXERLAB_TEST_KILLS", "3"))
CELLS = int(os.environ.get("MIXERLAB_TEST_CELLS", "4"))
# Half a second a cell, a checkpoint every 4 steps.
OPTIONS = (
    "model.d_model=8", "model.mlp=none", "task.vocabulary=32", "task.length=16", "task.kv=[2]", "task.test_kv=[2]",
    "task.rows_per_suite=8", "trainer.steps=60", "trainer.batch_size=4", "trainer.log_every=3",
    "trainer.validate_every=8", "trainer.checkpoint_every=4", "trainer.threads=1",
)


def start(folder, *options):
    command = [sys.executable, "-m", "experiments.train", *OPTIONS, *options]
    environment = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "HOME": str(folder)}
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            text=True)


def first_line(process):
    """Waits for what the first run says; the grid has spoken before."""
    while process.stdout.readline().startswith("grid of "):
        pass


def curves(folder):
    """What every run logged and how it ended, without what is measured by a clock."""
    found = {}
    for run in sorted(path.parent for path in (folder / "runs").glob("*/status.json")):
        events = [(e["step"], e["tokens"], name, value) for e in record.read_events(run)
                  for name, value in e["metrics"].items() if not name.startswith("measured/")]
        weights = checkpoints.newest(run)[0].weights
        found[run.name] = (record.read_status(run).status, events, {n: w.tolist() for n, w in weights.items()})
    return found


@pytest.mark.slow
def test_a_grid_that_is_killed_ends_as_one_that_is_not(tmp_path):
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    grid = ("-m", "stack=mha,linear", f"seed={','.join(map(str, range(CELLS // 2)))}")
    began = time.monotonic()
    whole = start(tmp_path / "whole", *grid)
    first_line(whole)
    imports = time.monotonic() - began
    print(whole.communicate(timeout=900)[0])
    assert whole.returncode == 0
    rest = time.monotonic() - began - imports

    moments = random.Random(3)
    kills, output = 0, ""
    while kills < KILLS:
        process = start(tmp_path / "killed", *grid)
        # Now and then before the first run begins: in the imports, or while MLflow makes its database.
        early = moments.random() < 0.2
        if not early:
            first_line(process)
        try:
            output += process.communicate(timeout=moments.uniform(0, imports if early else rest / 2))[0]
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            kills += 1
            output += process.communicate()[0]
            continue
        assert process.returncode == 0, output
        break
    last = start(tmp_path / "killed", *grid)
    output += last.communicate(timeout=900)[0]
    print(output)
    assert last.returncode == 0
    # Nothing that finished was trained again.
    ended = Counter(line.partition(":")[0] for line in output.splitlines() if " FINISHED in " in line)
    assert set(ended.values()) <= {1}
    assert curves(tmp_path / "killed") == curves(tmp_path / "whole")

    client = MlflowClient(f"sqlite:///{tmp_path}/killed/runs/mlflow.db")
    (experiment,) = [e for e in client.search_experiments() if e.name == "mixerlab"]
    found = client.search_runs([experiment.experiment_id], max_results=1000)
    assert len(found) == CELLS and {run.info.status for run in found} == {"FINISHED"}
    for run in found:
        folder = tmp_path / "killed" / "runs" / run.data.tags["run_key"]
        points = [(p.step, p.value) for p in client.get_metric_history(run.info.run_id, "train/loss")]
        assert sorted(points) == [(e["tokens"], e["metrics"]["train/loss"]) for e in record.read_events(folder)
                                  if "train/loss" in e["metrics"]]


@pytest.mark.slow
def test_sigterm_saves_what_was_done_and_the_same_command_goes_on(tmp_path):
    options = ("trainer.steps=500", "trainer.checkpoint_every=100000", "trainer.validate_every=100000",
               "trainer.log_every=5", "optimizer.schedule=constant")
    process = start(tmp_path, *options)
    for line in process.stdout:
        if "step 10/" in line:
            break
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert process.returncode == 143
    (folder,) = [path.parent for path in (tmp_path / "runs").glob("*/status.json")]
    status = record.read_status(folder)
    assert (status.status, status.reason) == ("KILLED", "terminated (SIGTERM)")
    at = checkpoints.newest(folder)[0].position.step
    assert 10 <= at < 500
    client = MlflowClient(f"sqlite:///{tmp_path}/runs/mlflow.db")
    assert client.get_run(status.mlflow_run_id).info.status == "KILLED"
    process = start(tmp_path, *options)
    out = process.communicate(timeout=300)[0]
    assert process.returncode == 0 and f"going on after step {at}" in out
    run = client.get_run(status.mlflow_run_id)
    assert run.info.status == "FINISHED" and "reason" not in run.data.tags
