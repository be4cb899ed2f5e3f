"""The command line, end to end."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from mlflow.tracking import MlflowClient

from experiments import cli, module, train
from experiments.record import read_status

ROOT = Path(train.__file__).resolve().parents[1]


def folders(tmp_path):
    """The runs of a folder, in the order in which they started."""
    found = [path.parent for path in (tmp_path / "runs").glob("*/status.json")]
    return sorted(found, key=lambda path: path.stat().st_ctime_ns)


def test_a_run_is_recorded_and_mlflow_has_the_same_numbers(command_line, tmp_path, read_events):
    code, out, err = command_line("stack=gqa", "seed=3", "sweep=mine")
    assert (code, err) == (0, "")
    folder, = folders(tmp_path)
    status = read_status(folder)
    assert (status.status, status.sweep, status.reason) == ("FINISHED", "mine", None)
    assert {path.name for path in folder.iterdir()} == {
        "checkpoints", "config.yaml", "environment.json", "metrics.jsonl", "params.json", "status.json"}
    environment = json.loads((folder / "environment.json").read_text())
    assert {"commit", "precision", "compile", "deterministic", "backend", "device_count"} <= set(environment)
    assert environment["torch_version"] == torch.__version__ and environment["threads"] == 1
    assert environment["device"] == ("cuda" if torch.cuda.is_available() else "cpu")
    run = MlflowClient(f"sqlite:///{tmp_path}/runs/mlflow.db").get_run(status.mlflow_run_id)
    assert run.info.status == "FINISHED"
    params = json.loads((folder / "params.json").read_text())
    assert run.data.params == {name: str(value) for name, value in params.items()}
    assert (run.data.params["stack"], run.data.params["task"], run.data.params["seed"]) == ("gqa", "mqar", "3")
    recorded = {name: value for event in read_events(folder) for name, value in event["metrics"].items()}
    assert run.data.metrics == pytest.approx(recorded)
    first, last = out.splitlines()[0], out.splitlines()[-1]
    assert first == "gqa seed 3: 4 steps of 64 tokens, 256 in all"
    assert last.startswith("gqa seed 3: FINISHED in ") and "kv4" in last and str(folder.relative_to(tmp_path)) in last


def test_a_finished_run_is_skipped_under_any_spelling_and_a_failed_one_is_not(command_line, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "train", lambda *_: 1 / 0)
    assert command_line("mlflow=false")[0] == 1
    monkeypatch.undo()
    code, out, _ = command_line("mlflow=false")
    assert code == 0 and "FINISHED" in out
    code, out, _ = command_line("mlflow=false", "model.layout=2*mha", "trainer.log_every=1")
    assert code == 0 and out.splitlines()[0].startswith("mha seed 0: skipped, finished ")
    assert len(folders(tmp_path)) == 1


def test_a_finished_run_joins_another_sweep(command_line, tmp_path):
    """It is not trained again, and a report on either sweep has it."""
    for sweep in ("first", "second", "second"):
        command_line("mlflow=false", f"sweep={sweep}")
    (folder,) = folders(tmp_path)
    status = read_status(folder)
    assert (status.sweep, status.sweeps) == ("first", ["first", "second"])


def test_a_run_that_another_process_works_on_is_left_alone(command_line, tmp_path, plan_of):
    (tmp_path / "runs").mkdir()
    with FileLock(tmp_path / "runs" / f".{plan_of().key}.lock"):
        code, _, _ = command_line("mlflow=false", "-m", "seed=0,1")
    assert code == 0
    assert len(folders(tmp_path)) == 1


def test_the_recorded_command_repeats_the_run(command_line, tmp_path):
    command_line("mlflow=false", "-m", "model.layout=mha,mha + linear")
    for folder in folders(tmp_path):
        words = shlex.split(read_status(folder).command)
        assert words[:3] == ["python", "-m", "experiments.train"]
        code, out, _ = command_line(*words[3:], tiny=False)
        assert code == 0 and "skipped" in out and folder.name in out


def test_one_failing_cell_leaves_the_others_alone(command_line, tmp_path, new_database):
    new_database(tmp_path / "runs")
    # Case C25: the second of three cells has heads that do not divide the width.
    code, out, err = command_line("-m", "model.mixers.mha.n_heads=1,3,2")
    assert (code, err) == (1, "")
    assert [read_status(folder).status for folder in folders(tmp_path)] == ["FINISHED", "FAILED", "FINISHED"]
    failed = folders(tmp_path)[1]
    status = read_status(failed)
    assert "n_heads=3" in status.reason and "d_model=8" in status.reason
    assert "Traceback" in (failed / "log.txt").read_text()
    run = MlflowClient(f"sqlite:///{tmp_path}/runs/mlflow.db").get_run(status.mlflow_run_id)
    assert (run.info.status, run.data.tags["reason"]) == ("FAILED", status.reason)
    assert (run.data.params["stack"], run.data.params["seed"]) == ("mha", "0")
    *rows, counts, compare, served = out.split("\n\n")[-1].strip().splitlines()
    assert compare.startswith("compare: ") and served.endswith("python -m experiments.ui")
    assert counts == "2 finished, 0 skipped, 1 failed, 0 diverged"
    assert [re.split("  +", row)[3] for row in rows] == ["status", "finished", "failed", "finished"]
    assert [re.split("  +", row)[0] for row in rows[1:]] == [f"mha (model.mixers.mha.n_heads={n})" for n in (1, 3, 2)]
    assert "n_heads=3" in rows[2].partition("failed")[2] and f"{failed.relative_to(tmp_path)}/log.txt" in rows[2]


def test_an_exception_in_training_ends_that_run_alone(command_line, tmp_path, monkeypatch):
    real = module.train

    def sometimes(plan, *rest):
        if plan.settings.seed == 1:
            raise RuntimeError("out of luck")
        return real(plan, *rest)

    monkeypatch.setattr(module, "train", sometimes)
    code, out, _ = command_line("mlflow=false", "-m", "seed=0,1,2")
    assert code == 1
    assert [read_status(folder).status for folder in folders(tmp_path)] == ["FINISHED", "FAILED", "FINISHED"]
    assert "sometimes" in (folders(tmp_path)[1] / "log.txt").read_text()
    assert "RuntimeError: out of luck" in out


def test_a_loss_that_is_not_finite_is_diverged_and_never_a_number(command_line, tmp_path, read_events, new_database):
    new_database(tmp_path / "runs")
    code, out, _ = command_line("optimizer.lr=1e30", "trainer.steps=20")
    assert code == 1 and "DIVERGED" in out
    folder, = folders(tmp_path)
    status = read_status(folder)
    assert status.status == "DIVERGED" and "not finite" in status.reason
    text = (folder / "metrics.jsonl").read_text()
    assert text and "NaN" not in text and "Infinity" not in text
    run = MlflowClient(f"sqlite:///{tmp_path}/runs/mlflow.db").get_run(status.mlflow_run_id)
    assert (run.info.status, run.data.tags["outcome"], run.data.tags["reason"]) == ("FAILED", "DIVERGED", status.reason)
    assert run.data.metrics == {n: v for event in read_events(folder) for n, v in event["metrics"].items()}


def test_ctrl_c_ends_the_grid_and_the_run_says_so(command_line, tmp_path, monkeypatch):
    real = module.train

    def interrupted(plan, *rest):
        if plan.settings.seed == 1:
            raise KeyboardInterrupt
        return real(plan, *rest)

    monkeypatch.setattr(module, "train", interrupted)
    code, out, _ = command_line("mlflow=false", "-m", "seed=0,1,2")
    assert code == 130
    ends = [(status.status, status.reason) for status in map(read_status, folders(tmp_path))]
    assert ends == [("FINISHED", None), ("KILLED", "interrupted (Ctrl-C)")]
    counts, rest = out.splitlines()[-2:]
    assert counts == "1 finished, 0 skipped, 0 failed, 0 diverged"
    assert rest.startswith("2 of 3 have not ended: python -m experiments.grid status ")


def test_a_grid_kept_as_yaml_needs_no_flag_and_gives_way_to_the_command_line(command_line, tmp_path):
    code, _, _ = command_line("+experiment=quickstart", "mlflow=false", "seed=7", "model.layout=linear,mha|window",
                              "model.mixers.window.window=4")
    assert code == 0
    params = [json.loads((folder / "params.json").read_text()) for folder in folders(tmp_path)]
    assert [(p["stack"], p["seed"]) for p in params] == [("linear", 7), ("mha|window", 7)]
    assert {read_status(folder).sweep for folder in folders(tmp_path)} == {"quickstart"}


def test_a_budget_in_tokens_is_said_in_steps(command_line):
    code, out, _ = command_line("mlflow=false", "trainer.tokens=100", "trainer.steps=null")
    assert code == 0
    assert out.splitlines()[0] == "mha seed 0: 2 steps of 64 tokens, 128 in all, the first whole step at or above 100"


@pytest.mark.parametrize("layout", ["2*(mha + linear)", "2*(mha + linear),linear", "mha|linear + window"])
def test_any_layout_in_shell_quotes_runs(command_line, layout, tmp_path):
    code, _, _ = command_line("mlflow=false", "-m", f"model.layout={layout}")
    assert code == 0
    found = [json.loads((folder / "params.json").read_text())["layout"] for folder in folders(tmp_path)]
    assert found == layout.split(",")


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["stack=gqaa"], ["stack='gqaa' does not exist (did you mean 'gqa'?)", "gemma3", "mha"]),
        (["-m", "stack=mha,lineer"], ["stack='lineer' does not exist (did you mean 'linear'?)"]),
        (["task=mqra"], ["task='mqra' does not exist (did you mean 'mqar'?)"]),
        (["task=in_context_recal"], ["does not exist (did you mean 'mad/in_context_recall'?)", "allowed: copying, "]),
        (["optimizer=adam"], ["optimizer='adam' does not exist (did you mean 'adamw'?)", "allowed: adamw"]),
        (["+experiment=quikstart"], ["+experiment='quikstart' does not exist (did you mean 'quickstart'?)"]),
        (["experiment=quickstart"], ["is written with a plus: +experiment=quickstart"]),
        (["stak=mha"], ["stak is no option (did you mean 'stack'?)", "allowed: "]),
        (["model.layuot=mha"], ["model.layuot is no option (did you mean 'model.layout'?)", "model.d_model"]),
        (["model.mixers.gqa.n_kv_head=1"], ["(did you mean 'model.mixers.gqa.n_kv_heads'?)"]),
        (["stack=gemma3", "model.mixers.windw.window=1"], ["(did you mean 'model.mixers.window.window' or "]),
        (["lr=1"], ["lr is no option (did you mean 'optimizer.lr'?)"]),
        (["model.d_model.x=1"], ["model.d_model.x is no option: model.d_model is a single value"]),
        (["~sed"], ["sed is no option (did you mean 'seed'?)"]),
        (["+seed=1"], ["seed exists: write seed=VALUE"]),
        (["seed=1,2"], ["seed=1,2 has several values, which needs -m"]),
        (["seed", "1"], ["'seed' is no option: options are written NAME=VALUE"]),
        (["seed=[1"], ["'seed=[1' cannot be read"]),
        (["+model.typo=1"], ["model has no option 'typo'", "layout"]),
        (["+typo=1"], ["config has no option 'typo'"]),
        (["model.d_model=wide"], ["d_model='wide' must be a whole number"]),
        (["model.mixers.mha.n_heads=3"], ["n_heads=3", "d_model=8"]),
        (["model.layout=mha + + mha"], ["layout: expected a mixer, found '+'", "^"]),
        (["model.layout=mha", "+", "linear", "seed=1"], ["needs quotes", "'model.layout=mha + linear'"]),
        (["-m", "model.layout=mha,2*(mha", "+", "linear)"], ["needs quotes", "'model.layout=mha,2*(mha + linear)'"]),
        (["task.length=4"], ["length=4 must be at least"]),
        (["runs=/proc/nothing/runs"], ["/proc/nothing", "runs="]),
        (["--config-name=nothing"], ["nothing"]),
    ],
)
def test_a_mistake_is_one_message_and_leaves_nothing(command_line, tmp_path, arguments, messages):
    code, out, err = command_line(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.count("error") == 1 and "Traceback" not in err
    for message in messages:
        assert message in err
    assert not list((tmp_path / "runs").glob("[!.]*"))


@pytest.mark.parametrize("grid", [(), ("-m", "seed=0,1")])
@pytest.mark.parametrize("runs", ["a_file", "a_file/below"])
def test_a_runs_folder_that_cannot_be_written_is_one_message(command_line, tmp_path, runs, grid):
    (tmp_path / "a_file").write_text("")
    code, out, err = command_line(f"runs={runs}", *grid)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and len(err.splitlines()) == 1 and "a_file" in err and "runs=" in err


def test_the_help_page_is_whole_and_true():
    page = cli.help_page("train")
    for part in ("python -m experiments.train stack=gqa task=mqar seed=0", "-m +experiment=quickstart",
                 "-m 'model.layout=mha,linear,mha + linear' seed=0,1", "mha gqa", "gemma3", "adamw", "quickstart",
                 "model.d_model=64", "optimizer.lr=1e-3", "trainer.steps=300", "task.length=64", "seed=0", "runs=runs",
                 "n_heads=null", "window=128"):
        assert part in page, part
    assert max(map(len, page.splitlines())) < 140


QUICK = """
import sys
sys.argv = ["train", *sys.argv[1:]]
from experiments import train
try:
    train.main()
except SystemExit:
    pass
slow = {"lightning", "mlflow", "pandas", "sklearn"} & {name.partition(".")[0] for name in sys.modules}
sys.exit(f"imported: {slow}" if slow else 0)
"""


@pytest.mark.parametrize("flags", [("--help",), ("--cfg", "job")])
def test_looking_around_imports_nothing_slow(tmp_path, flags):
    # It is the imports of Lightning and MLflow that take seconds.
    done = subprocess.run([sys.executable, "-c", QUICK, *flags], cwd=tmp_path, capture_output=True, text=True,
                          env={"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert "optimizer" in done.stdout and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_module_runs_as_a_command(tmp_path):
    command = [sys.executable, "-m", "experiments.train", "-m", "stack=linear", "seed=0,1", "mlflow=false",
               "model.d_model=8", "task.vocabulary=32", "task.length=16", "task.kv=[2]", "task.test_kv=[2]",
               "task.rows_per_suite=8", "trainer.steps=2", "trainer.threads=1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300,
                          env={"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]})
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "2 finished, 0 skipped, 0 failed, 0 diverged"
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}
