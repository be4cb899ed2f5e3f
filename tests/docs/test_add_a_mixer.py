"""The worked example of docs/add_a_mixer.md: its code and its commands are run as they stand there."""

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

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "add_a_mixer.md").read_text()
CODE = re.search(r"```python\n(.*?)```", TEXT, re.DOTALL)[1]
COMMANDS = re.findall(r"^python -m .*$", "\n".join(re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)), re.MULTILINE)
# Runs of a second instead of the defaults.
TINY = (
    "model.d_model=8", "model.mlp=none", "task.vocabulary=32", "task.length=16", "task.kv=[2]", "task.test_kv=[2]",
    "task.rows_per_suite=8", "trainer.steps=2", "trainer.batch_size=4", "trainer.threads=1", "mlflow=false",
)


@pytest.fixture
def run(tmp_path):
    """A command of the document in an empty folder with decay.py, and the variable as it is set there."""
    (tmp_path / "decay.py").write_text(CODE)
    assert "export MIXERLAB_PLUGINS=$PWD/decay.py" in TEXT

    def run(command):
        words = shlex.split(command)[1:]
        tiny = TINY if "experiments.train" in words and "--help" not in words else ()
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "MIXERLAB_PLUGINS": str(tmp_path / "decay.py")}
        called = [sys.executable, *words, *tiny]
        done = subprocess.run(called, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def command(start):
    """The only command that begins so."""
    (found,) = [line for line in COMMANDS if line.startswith(f"python -m {start}")]
    return found


def test_the_code_is_as_short_as_promised_and_a_running_sum():
    assert CODE.count("\n") <= 26
    scope = {"__name__": "decay"}
    exec(CODE.replace('@register("decay")\n', ""), scope)
    mixer = scope["Decay"](4, longest=10.0)
    x = torch.randn(2, 9, 4)
    sums, rate = torch.zeros(2, 4), torch.exp(-1 / mixer.log_span.exp())
    for t in range(9):
        sums = rate * sums + mixer.value(x[:, t])
        torch.testing.assert_close(mixer.whole(x)[:, t], mixer.out(sums))


def test_help_lists_it(run):
    page = run("python -m experiments.train --help")
    assert re.search(r"stack= [^=]*\bnsa\s+decay\b", page)
    assert re.search(r"^ +decay +longest=64.0 bias=false$", page, re.MULTILINE)
    assert "lists `decay` among the stacks and `longest=64.0 bias=false`" in TEXT


@pytest.mark.slow
def test_it_passes_the_check(run):
    assert " 0 FAIL" in run(command("mixers.check"))


def test_it_is_shown_swept_and_reported(run, tmp_path):
    shown = run(command("experiments.show"))
    assert "1 x  decay" in shown and "its state is all of its inputs" in shown
    grids = [line for line in COMMANDS if line.startswith("python -m experiments.train -m")]
    for grid in grids:
        run(grid)
    params = [json.loads(path.read_text()) for path in (tmp_path / "runs").glob("*/params.json")]
    ours = sorted((p["seed"], p["model.mixers.decay.longest"]) for p in params if p["stack"] == "decay")
    assert ours == [(seed, longest) for seed in range(3) for longest in (16, 64, 256)]
    assert sorted(p["seed"] for p in params if p["stack"] == "gqa") == [0, 1, 2]
    run(command("analysis.report"))
    assert "decay" in (tmp_path / "runs" / "report.html").read_text()
