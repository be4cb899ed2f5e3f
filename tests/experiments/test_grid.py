"""What is on record of a grid, what can be said of it while it runs, and how it is ended and gone on with."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from rich.console import Console

from experiments import checkpoints, grid, grids, progress, record, slurm_queue
from experiments.grids import Grid, Started
from experiments.outcomes import Grid as Ended
from experiments.outcomes import Outcome, outcomes
from experiments.processes import Process, _began

ROOT = Path(__file__).parents[2]
GONE = Process(os.getpid(), Process.this().host, "another time")


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Writes a grid of four jobs by hand into runs/.grids/NAME of an empty folder, which is then the current one."""
    monkeypatch.chdir(tmp_path)

    def one(name="2030-01-01_00-00-00", sweep="mine", process=GONE, **changes):
        jobs = [["stack=mha", f"seed={seed}", "trainer.steps=100"] for seed in range(4)]
        made = Grid(Path("runs/.grids") / name, sweep, 0.0, ["-m"], str(tmp_path), {}, process, jobs, **changes)
        grids.begin(made)
        return made

    return one


def ends(of, job, status, seconds=None):
    Ended.add(of.folder, Outcome("mha", "mqar", job, status, f"text {job}", f"runs/{job}", seconds, job))


def starts(of, job, process, **changes):
    begun = Started(job, process, 1000.0)
    (of.folder / "jobs").mkdir(exist_ok=True)
    (of.folder / "jobs" / f"{job}.json").write_text(json.dumps(asdict(replace(begun, **changes))))


def runs(name, points, process):
    """The record of a run that is on: points are (step, time)."""
    folder = Path("runs") / name
    folder.mkdir(parents=True)
    (folder / "params.json").write_text(json.dumps({"stack": "mha", "seed": 1, "lr": 0.01, "steps": 100}))
    (folder / "metrics.jsonl").write_text("".join(
        json.dumps({"step": step, "tokens": 64 * step, "time": t, "metrics": {"train/loss": 1.5}}) + "\n"
        for step, t in points))  # fmt: skip
    record.write_status(folder, record.Status("RUNNING", "now", "command", owner=str(process)))


def states(of):
    return [job.state for job in progress.progress(of).jobs]


def test_a_grid_that_is_on_by_hand(make):
    this = Process.this()
    mine = make(process=this, trials=3)
    ends(mine, 0, "finished", 30.0)
    ends(mine, 1, "failed", 10.0)
    Ended.add(mine.folder, Outcome("mha", "mqar", 9, "finished", "", "runs/trial", 50.0), "trials")
    starts(mine, 0, this)
    starts(mine, 2, this)
    runs("2", [(10, 100.0), (20, 105.0), (30, 110.0)], this)
    now = progress.progress(mine)
    assert states(mine) == ["finished", "failed", "running", "waiting"]
    assert [job.options for job in now.jobs] == ["seed=0", "seed=1", "seed=2", "seed=3"]
    # 20 steps and 1,280 tokens in 10 s; 70 steps are left, then one job and two trials of the median 30 s.
    assert now.jobs[2].text == "mha seed 1 lr 0.01: step 30/100  train/loss 1.5  128 tokens/s"
    assert now.seconds_left == pytest.approx(35 + 3 * 30)
    assert str(now) == "1 of 4 done, 1 failed, 1 running, 1 waiting, 1 of 3 trials made, about 2 min left"


def test_jobs_whose_process_is_gone_are_interrupted_though_the_number_is_anothers(make):
    mine = make()
    starts(mine, 0, GONE)
    starts(mine, 1, Process.this(), ended=2000.0)
    runs("0", [(10, 100.0)], GONE)
    assert states(mine) == ["interrupted", "interrupted", "not started", "not started"]
    assert not progress.progress(mine).active and progress.progress(mine).bad == 4


def test_without_their_leader_jobs_that_wait_are_started_by_slurm_alone(make, monkeypatch):
    monkeypatch.setattr(slurm_queue, "queue", lambda folder: None)
    mine = make()
    starts(mine, 0, Process.this())
    assert states(mine) == ["running", "not started", "not started", "not started"]
    mine = make("2030-01-02_00-00-00", slurm="/somewhere")
    starts(mine, 0, Process.this())
    assert states(mine) == ["running", "waiting", "waiting", "waiting"]
    grids.cancel(mine.folder)
    assert states(mine) == ["running", "not started", "not started", "not started"]


def test_of_another_machine_slurm_knows(make, monkeypatch):
    mine = make(slurm="/somewhere")
    far = Process(1, "far away", "then")
    starts(mine, 0, far, slurm="7_0")
    starts(mine, 1, far, slurm="7_1")
    ends(mine, 3, "finished")
    monkeypatch.setattr(slurm_queue, "queue", lambda folder: {"7_1", "7_2"})
    assert states(mine) == ["interrupted", "running", "waiting", "finished"]
    monkeypatch.setattr(slurm_queue, "queue", lambda folder: None)
    assert states(mine) == ["running", "running", "waiting", "finished"]


@pytest.fixture
def fake_slurm(tmp_path, monkeypatch):
    """Slurm's commands: squeue prints what is in the file `queue`, scancel writes down its arguments."""
    folder = tmp_path / "bin"
    folder.mkdir()
    lines = {"squeue": f"cat {tmp_path}/queue", "scancel": f'echo "$@" >> {tmp_path}/ended; : > {tmp_path}/queue'}
    for name, line in lines.items():
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return tmp_path


def test_only_jobs_that_were_submitted_from_the_grids_folder_are_ended(make, fake_slurm, command, monkeypatch):
    submitted = fake_slurm / "runs" / ".grids" / "2030-01-01_00-00-00" / ".submitit"
    (fake_slurm / "queue").write_text(f"7_0 {submitted}/a.sh\n8 /elsewhere/a.sh\n7_1 {submitted}/a.sh\n9\n")
    mine = make(slurm=str(submitted))
    assert slurm_queue.queue(mine.slurm) == {"7_0", "7_1"} and slurm_queue.queue(None) is None
    assert states(mine) == ["waiting"] * 4
    # A job of Slurm's gets its one SIGTERM from there: a second one would cost it its checkpoint.
    sleeper = subprocess.Popen(["sleep", "60"])
    starts(mine, 0, replace(Process.this(), number=sleeper.pid, began=_began(sleeper.pid)), slurm="7_0")
    assert states(mine) == ["running", *["waiting"] * 3]
    monkeypatch.setattr(grid, "PATIENCE", 0.0)
    assert command("cancel")[0] == 1 and sleeper.poll() is None
    assert (fake_slurm / "ended").read_text() == "7_0 7_1\n"
    sleeper.kill()
    sleeper.wait()
    assert states(mine) == ["interrupted", *["not started"] * 3]


def test_a_process_is_ended_only_where_it_is_the_one_that_was_written_down():
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        number = replace(Process.this(), number=sleeper.pid)
        assert number.alive is False and not number.terminate() and sleeper.poll() is None
        known = replace(number, began=_began(sleeper.pid))
        assert known.alive and replace(known, host="far away").alive is None
        assert known.terminate() and sleeper.wait(10) == -15
        assert not known.alive and not known.terminate()
    finally:
        sleeper.kill()


@pytest.fixture
def command(monkeypatch, capsys):
    """`python -m experiments.grid ...` in this process: exit code, what it printed, its errors."""

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["grid", *words])
        capsys.readouterr()
        code = grid.main()
        return code, *capsys.readouterr()

    return call


def test_a_grid_is_found_by_its_sweep_its_folder_or_as_the_newest(make, command):
    code, _, err = command("status")
    assert (code, err) == (2, "error: runs='runs' has no grid; python -m experiments.train -m ... starts one\n")
    make("2030-01-01_00-00-00", "mine")
    newer = make("2030-01-02_00-00-00", "mine")
    make("2030-01-03_00-00-00", None)
    assert grids.find(Path("runs"), "mine").folder == newer.folder
    assert grids.find(Path("runs"), None).name == grids.find(Path("runs"), "2030-01-03_00-00-00").name
    code, _, err = command("status", "mien")
    assert code == 2 and err == ("error: 'mien' is no grid (did you mean 'mine'?); in runs='runs' are: "
                                 "2030-01-03_00-00-00, mine\n")  # fmt: skip
    assert command("status", "a", "b")[0] == command("status", "run=x")[0] == 2
    (newer.folder / "grid.json").write_text("{")
    assert grids.find(Path("runs"), "mine").folder.name == "2030-01-01_00-00-00"
    assert "grid.json cannot be read" in command("status", newer.folder.name)[2]


def test_the_exit_code_says_whether_all_have_a_result(make, command):
    mine = make(process=Process.this())
    assert command("status")[0] == 3
    grids.begin(replace(mine, process=GONE))
    for job in range(3):
        ends(mine, job, "finished")
    code, out, _ = command("status", "mine")
    assert code == 1 and out.splitlines()[0] == "mine: 3 of 4 done, 1 not started"
    assert out.splitlines()[2].split() == ["job", "options", "state", "seconds", "about"]
    assert out.splitlines()[-1] == "run again what has no result: python -m experiments.grid retry mine"
    ends(mine, 3, "skipped")
    assert command("status")[0] == 0
    assert command("status", "--watch") == (0, "mine: 4 of 4 done\n", "")
    assert command("cancel") == (0, "mine: nothing runs\n", "")


def test_on_a_terminal_what_runs_and_what_went_wrong_comes_first(make):
    mine = make(process=Process.this())
    ends(mine, 0, "finished")
    ends(mine, 1, "failed")
    starts(mine, 2, Process.this())
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(grid._table(progress.progress(mine), most=2))
    shown = console.export_text()
    assert "failed" in shown and "running" in shown and "finished" not in shown and "waiting" not in shown


def test_a_grid_tells_how_far_it_is_and_knows_its_jobs_from_the_start(command_line, tmp_path):
    code, out, _ = command_line("mlflow=false", "-m", "model.mixers.mha.n_heads=1,3", "sweep=two")
    assert code == 1
    told = [line for line in out.splitlines() if line.startswith("grid: ")]
    assert told[0].startswith("grid: 1 of 2 done, 1 waiting, about ")
    assert told[1] == "grid: 1 of 2 done, 1 failed; run again what has no result: python -m experiments.grid retry two"
    (folder,) = (tmp_path / "runs" / ".grids").iterdir()
    known = grids.read(folder)
    assert [[word for word in job if "n_heads" in word] for job in known.jobs] == [
        ["model.mixers.mha.n_heads=1"], ["model.mixers.mha.n_heads=3"]]  # fmt: skip
    assert (known.sweep, known.cwd, known.process) == ("two", str(tmp_path), Process.this())
    assert known.arguments[0] == "-m" and "sweep=two" in known.arguments
    assert sorted(grids.started(folder)) == [0, 1]


def test_a_retry_is_the_same_command_and_makes_what_is_missing(command_line, command, tmp_path, monkeypatch):
    command_line("mlflow=false", "-m", "seed=0,1", "sweep=two")
    folder = next(path.parent for path in (tmp_path / "runs").glob("*/status.json")
                  if json.loads((path.parent / "params.json").read_text())["seed"] == 1)  # fmt: skip
    record.discard(folder)
    monkeypatch.setenv("MIXERLAB_PLUGINS", "")
    code, out, _ = command("retry", "two")
    assert code == 0 and "1 finished, 1 skipped" in out and "mha seed 1: FINISHED" in out
    assert command("status", "two")[1].startswith("two: 2 of 2 done")


def test_a_grid_whose_folder_was_moved_goes_on_where_it_is(command_line, command, tmp_path):
    command_line("mlflow=false", "-m", "seed=0,1", "sweep=two words")
    (tmp_path / "runs").rename(tmp_path / "new")
    code, out, _ = command("retry", "two words", "runs=new")
    assert code == 0 and "0 finished, 2 skipped" in out and not (tmp_path / "runs").exists()
    assert f"python -m experiments.grid status 'two words' runs={tmp_path}/new" in out


@pytest.mark.parametrize(("words", "message"), [
    (("hydra.sweep.dir=runs/x",), "hydra.sweep.dir=runs/x must be a folder in runs/.grids; runs=FOLDER chooses"),
    (("runs=x,y",), "runs must be the same for the whole grid, not x, y"),
])  # fmt: skip
def test_a_grid_that_nobody_would_find_does_not_start(command_line, tmp_path, words, message):
    code, out, err = command_line("mlflow=false", "-m", *words)
    assert (code, out) == (2, "") and message in err and len(err.splitlines()) == 1
    assert not list(tmp_path.rglob("*.json"))


def test_the_line_of_a_process_that_died_over_it_costs_no_other(make):
    mine = make()
    ends(mine, 0, "finished")
    with (mine.folder / "outcomes.jsonl").open("a") as file:
        file.write('{"label": "mh')
    assert states(mine)[0] == "finished" and len(outcomes(mine.folder)) == 1
    ends(mine, 1, "failed")
    assert states(mine)[:2] == ["finished", "failed"] and len(outcomes(mine.folder)) == 2


def test_jobs_that_end_at_once_are_all_on_record(make):
    mine = make()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda job: ends(mine, job, "finished"), range(40)))
    assert sorted(outcome.job for outcome in outcomes(mine.folder)) == list(range(40))


@pytest.mark.slow
def test_a_cancelled_grid_saves_and_its_retry_goes_on(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ("model.d_model=8", "model.mlp=none", "task.vocabulary=32", "task.length=16", "task.kv=[2]",
               "mlflow=false", "task.test_kv=[2]", "task.rows_per_suite=8", "trainer.steps=200", "trainer.batch_size=4",
               "trainer.log_every=5", "trainer.validate_every=100000", "trainer.threads=1")  # fmt: skip
    environment = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}
    words = [sys.executable, "-m", "experiments.train", *options, "-m", "seed=0,1", "sweep=long"]
    process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    for line in process.stdout:
        if "step 10/" in line:
            break
    code, out, _ = command("status", "long")
    assert code == 3 and "1 running, 1 waiting" in out and "/200  train/loss" in out
    code, _, err = command("retry", "long")
    assert code == 2 and "long is still running" in err
    code, out, _ = command("cancel", "long")
    assert code == 0 and "0 of 2 done, 1 interrupted, 1 not started" in out
    process.communicate(timeout=60)
    assert process.returncode == 143
    (folder,) = [path.parent for path in Path("runs").glob("*/status.json")]
    at = checkpoints.newest(folder)[0].position.step
    assert 10 <= at < 200 and record.read_status(folder).status == "KILLED"
    code, out, _ = command("retry", "long")
    assert code == 0 and f"going on after step {at}" in out and "2 finished" in out
