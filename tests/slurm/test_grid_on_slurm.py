"""A grid on a real Slurm: `tests/slurm/with_slurm python -m pytest tests/slurm`, which `make slurm` does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments.record import read_events, read_status

ROOT = Path(__file__).parents[2]
OPTIONS = (
    "model.d_model=8", "model.mlp=none", "task.vocabulary=32", "task.length=16", "task.kv=[2]", "task.test_kv=[2]",
    "task.rows_per_suite=8", "trainer.batch_size=4", "trainer.log_every=10", "trainer.validate_every=1000000",
    "trainer.checkpoint_every=1000000", "optimizer.schedule=constant",
)

pytestmark = pytest.mark.skipif(
    not shutil.which("sinfo") or subprocess.run(["sinfo"], capture_output=True).returncode != 0,
    reason="no Slurm answers here; tests/slurm/with_slurm starts one",
)


def until(found, process, seconds=900):
    """What `found` gives, once it gives something."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = found()
        if value:
            return value
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.2)
    raise AssertionError("nothing came")


def run_of(folder, seed, least_step):
    """The record of a seed's run, once it is training and has logged so many steps."""
    for path in folder.glob("runs/*/params.json"):
        run = path.parent
        last = max([event["step"] for event in read_events(run)], default=0)
        if f'"seed": {seed},' in path.read_text() and last >= least_step and read_status(run).status == "RUNNING":
            return run
    return None


@pytest.mark.slow
def test_jobs_that_are_put_back_go_on_and_one_that_is_cancelled_is_a_failed_run(tmp_path):
    """Four runs, two at a time: one requeued, one warned of its time limit, one undisturbed, one cancelled."""
    command = [sys.executable, "-m", "experiments.train", *OPTIONS, "-m", "hydra/launcher=submitit_slurm",
               "hydra.launcher.array_parallelism=2", "trainer.steps=1000", "seed=0,1,2,3"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               text=True)
    try:
        _disturb(process, tmp_path)
    finally:
        process.kill()


def _disturb(process, tmp_path):
    array = process.stdout.readline().partition("array ")[2].partition(",")[0]
    orders = (["scontrol", "requeue"], ["scancel", "--signal=USR2"], None, ["scancel"])
    disturbed = {}
    for seed, order in enumerate(orders):
        if order:
            disturbed[seed] = until(lambda seed=seed: run_of(tmp_path, seed, least_step=50), process)
            # Once, whatever it answers: scancel may call a signal a failure that it has sent.
            subprocess.run([*order, f"{array}_{seed}"], check=False)
    out = process.communicate(timeout=1800)[0]
    print(out)
    assert process.returncode == 1 and "3 finished, 0 skipped, 1 failed, 0 diverged" in out
    for seed in (0, 1):
        status = read_status(disturbed[seed])
        # There was no checkpoint but the one that the signal asked for.
        assert status.status == "FINISHED" and len(status.resumed) == 1 and status.resumed[0] >= 50
    assert f"its Slurm job {array}_3 ended without a word: CANCELLED" in out
