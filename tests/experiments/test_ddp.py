"""A run of two processes is the run of one: the same losses, metrics and weights, in one record."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from mlflow.tracking import MlflowClient

from experiments import checkpoints, module, ranks
from experiments.config import Trainer
from experiments.record import Description, read_status, write_status
from experiments.tracking import Tracker

# Rows of 1 to 4 labels, so that the processes have different counts; suites of 7 rows, one more in the first process.
OPTIONS = (
    "model.d_model=8", "model.mlp=none", "task.vocabulary=32", "task.length=16", "task.kv=[1,2,4]",
    "task.test_kv=[2,4]", "task.rows_per_suite=7", "trainer.steps=6", "trainer.batch_size=4", "trainer.accumulate=2",
    "trainer.log_every=1",
    "trainer.validate_every=2", "trainer.precision=64", "optimizer.clip=0.1", "trainer.threads=1",
)
TWO = ("trainer=ddp", "trainer.devices=2", "trainer.accelerator=cpu")


def result(folder, read_events):
    """Status, what was logged without what a clock measures, and the weights."""
    found = [(e["step"], e["tokens"], {n: v for n, v in e["metrics"].items() if not n.startswith("measured/")})
             for e in read_events(folder)]
    return read_status(folder).status, found, checkpoints.newest(folder)[0].weights


def assert_same(found, wanted):
    assert found[0] == wanted[0] == "FINISHED"
    assert [event[:2] for event in found[1]] == [event[:2] for event in wanted[1]]
    for (step, _, metrics), (*_, others) in zip(found[1], wanted[1], strict=True):
        assert metrics == pytest.approx(others, rel=1e-9), step
    for name, weight in wanted[2].items():
        torch.testing.assert_close(found[2][name], weight, rtol=1e-9, atol=1e-12, msg=name)


@pytest.fixture
def alone(command_line, tmp_path, read_events):
    """The run of one process: its folder and its result."""
    assert command_line(*OPTIONS, "mlflow=false", tiny=False)[0] == 0
    (folder,) = [path.parent for path in (tmp_path / "runs").glob("*/status.json")]
    return folder, result(folder, read_events)


@pytest.mark.slow
def test_two_processes_do_what_one_does(command_line, tmp_path, read_events, new_database, alone):
    folder, wanted = alone
    shutil.rmtree(tmp_path / "runs")
    new_database(tmp_path / "runs")
    code, out, err = command_line(*OPTIONS, *TWO, tiny=False)
    assert (code, err) == (0, "") and out.count("step 6/6") == 1
    # The same key, hence the same folder; nothing else was left there.
    assert [path.parent for path in (tmp_path / "runs").glob("*/status.json")] == [folder]
    assert_same(result(folder, read_events), wanted)
    environment = json.loads((folder / "environment.json").read_text())
    assert (environment["device_count"], environment["strategy"], environment["threads"]) == (2, "ddp", 1)
    client = MlflowClient(f"sqlite:///{tmp_path}/runs/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("mixerlab").experiment_id])
    assert run.info.status == "FINISHED" and len(client.get_metric_history(run.info.run_id, "train/loss")) == 6


@pytest.mark.slow
def test_a_killed_process_ends_the_run_which_goes_on_with_one(command_line, tmp_path, read_events, monkeypatch, alone):
    """From a checkpoint of one process to two, one of which is killed at step 5; from their checkpoint back to one."""
    folder, wanted = alone
    (folder / "checkpoints" / "step=6.ckpt").unlink()
    write_status(folder, replace(read_status(folder), status="RUNNING"))
    processes, real = [], ranks.Followers.start
    point = module.Recorder.on_train_batch_end

    def start(self, place, log):
        real(self, place, log)
        processes.append(self.processes[-1][0])

    def killing(self, trainer, *rest):
        point(self, trainer, *rest)
        if trainer.global_step == 5 and processes[0].poll() is None:
            os.kill(processes[0].pid, signal.SIGKILL)
            processes[0].wait()

    monkeypatch.setattr(ranks.Followers, "start", start)
    monkeypatch.setattr(module.Recorder, "on_train_batch_end", killing)
    code, out, _ = command_line(*OPTIONS, *TWO, "mlflow=false", tiny=False)
    assert code == 1 and "going on after step 4" in out and "process 1 of 2: ended with exit code -9" in out
    assert read_status(folder).status == "FAILED"
    monkeypatch.undo()
    code, out, _ = command_line(*OPTIONS, "mlflow=false", tiny=False)
    assert code == 0
    assert_same(result(folder, read_events), wanted)


def test_weights_that_are_divided_train_as_whole_ones(plan_of, tmp_path):
    """FSDP in one process, whose share is everything; then on from its own checkpoint. RoPE is scaled for tests too."""
    rope = ("model.mixers.mha.position=rope", "evaluate.rope_scaling={yarn: {rope_type: yarn, factor: 2}}")

    def train(name, strategy, start=None):
        plan = plan_of("trainer.accelerator=cpu", f"trainer.strategy={strategy}", "trainer.log_every=1", *rope)
        tracker = Tracker(tmp_path / name, Description("x", {}, plan.config, {}, ""), None, start and start.position)
        with ranks.joined(ranks.Place(0, 1, 0, 0, f"file://{tmp_path}/meeting-{name}-{start is None}")) as group:
            values = module.train(plan, tracker, lambda line: None, start, group)
        found = {n: v for n, v in values.items() if not n.startswith("measured/")}
        return found, checkpoints.newest(tmp_path / name)[0]

    wanted, whole = train("ddp", "ddp")
    found, last = train("fsdp", "fsdp")
    assert "eval/kv4/yarn/loss" in found
    assert found == pytest.approx(wanted) and last.content["sharded"] and not whole.content["sharded"]
    last.path.unlink()
    again, last = train("fsdp", "fsdp", checkpoints.newest(tmp_path / "fsdp")[0])
    assert again == pytest.approx(wanted)
    for name, weight in whole.weights.items():
        torch.testing.assert_close(last.weights[name], weight, msg=name)


def test_a_run_does_not_go_on_from_weights_that_are_divided_otherwise(command_line, tmp_path, alone):
    folder, _ = alone
    write_status(folder, replace(read_status(folder), status="RUNNING"))
    code, out, err = command_line(*OPTIONS, "trainer=fsdp", *TWO[1:], "mlflow=false", tiny=False)
    assert (code, out) == (2, "") and "is of another trainer than fsdp" in err


def test_the_leader_says_what_a_follower_died_of(tmp_path):
    others = ranks.Followers(ranks.Place(0, 3, 0, 0, ""))
    for rank, said in enumerate(["RuntimeError: Connection closed by peer", "ValueError: out of luck"], 1):
        (tmp_path / str(rank)).write_text(f"Traceback ...\n{said}\n")
        process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])
        others.processes.append((process, tmp_path / str(rank)))
        process.wait()
    with pytest.raises(RuntimeError, match=r"(?m)^process 2 of 3: ValueError: out of luck$"):
        others.explain(RuntimeError("Connection closed by peer"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "ddp", "devices": 3}, "batch_size=32 must be a multiple of 3"),
        ({"devices": 2}, "devices=2 and num_nodes=1 need trainer=ddp or fsdp"),
        ({"strategy": "ddp", "devices": None}, "devices=null is every GPU, and there is none"),
        ({"strategy": "fsdp", "devices": None}, "devices=null is every GPU, and there is none"),
        ({"strategy": "ddp", "devices": 0}, "devices=0 must be a whole number of at least 1"),
    ],
)
def test_wrong_processes_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Trainer(accelerator="cpu", **options)


def test_processes_that_were_started_must_be_those_asked_for():
    two = Trainer(strategy="ddp", devices=2, accelerator="cpu")
    with pytest.raises(ValueError, match="are 2 processes, and 4 were started"):
        ranks.check(two, ranks.Place(0, 4, 0, 0, "env://"))
    with pytest.raises(ValueError, match="start them with torchrun or srun"):
        ranks.check(Trainer(strategy="ddp", devices=2, num_nodes=2, accelerator="cpu"), None)
    ranks.check(two, None)


def test_places_are_read_from_torchrun_and_srun(monkeypatch):
    assert ranks.started() is None
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1",
                        "GROUP_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert ranks.started() == ranks.Place(3, 4, 1, 1, "env://")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    for name, value in {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
                        "SLURM_JOB_ID": "20017", "SLURM_STEP_NODELIST": "node[07-08]"}.items():
        monkeypatch.setenv(name, value)
    assert ranks.started() == ranks.Place(3, 4, 1, 1, "tcp://node07:20017")
