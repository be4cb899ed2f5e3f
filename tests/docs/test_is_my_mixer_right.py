"""The worked example of docs/is_my_mixer_right.md: its code, its mistakes and its commands."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mixers.check import PASS, examine
from mixers.conformance.properties import PROPERTIES
from mixers.registry import register

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "is_my_mixer_right.md").read_text()
CLASS, DECLARED, TEST = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
COMMANDS = re.findall(r"^python -m .*$", "\n".join(re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)), re.MULTILINE)
# Seconds instead of minutes.
TINY = {
    "experiments.train": (
        "model.d_model=8", "model.mlp=none", "task.vocabulary=32", "task.length=16", "task.kv=[2]", "task.test_kv=[2]",
        "task.rows_per_suite=8", "trainer.steps=2", "trainer.batch_size=4", "trainer.threads=1", "mlflow=false",
    ),
    "experiments.bench": ("model.d_model=16", "model.mlp=none", "rounds=1", "mlflow=false"),
}


def built(code):
    """The class of the document, without a place in the registry."""
    assert f'@{register.__name__}("fading")\n' in code
    scope = {"__name__": "fading"}
    exec(compile(code.replace('@register("fading")\n', ""), "fading.py", "exec"), scope)
    return scope["Fading"]


def examined(cls, name):
    return examine(cls, next(each for each in PROPERTIES if each.name == name))


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        ("cuts of extend", {"kv=s, ": "", "document=last, ": ""}),
        ("low precision", {".to(wide)": "", "normalize(q, dim=-1)": "q", "normalize(k, dim=-1)": "k"}),
    ],
)
def test_a_mistake_is_found_as_told(name, mistake):
    code = CLASS
    for right, wrong in mistake.items():
        assert right in code
        code = code.replace(right, wrong)
    told, = re.findall(rf"^ +{name} +(FAIL: .*?)(?:; largest .*)?$", TEXT, re.MULTILINE)
    assert str(examined(built(code), name)).startswith(told)
    assert examined(built(CLASS), name).verdict == PASS


@pytest.mark.parametrize("name", ["flops", "growth", "options", "definition"])
def test_the_declaration_makes_the_rest_apply(name):
    assert examined(built(CLASS), name).verdict == "does not apply"
    assert examined(built(CLASS + DECLARED), name).verdict == PASS


def test_the_code_is_the_recurrence_of_its_docstring():
    torch.manual_seed(0)
    mixer = built(CLASS)(4, n_heads=1, longest=10.0)
    x = torch.randn(1, 9, 4)
    q, k, v = mixer.qkv(x)[0].chunk(3, -1)
    s, rate = torch.zeros(4, 4), torch.exp(-1 / mixer.log_span.exp())
    for t in range(9):
        s = rate * s + torch.outer(k[t] / k[t].norm(), v[t])
        torch.testing.assert_close(mixer(x)[0, t], mixer.out(q[t] / q[t].norm() @ s))


def test_the_test_of_its_own_runs_as_it_is_pasted(tmp_path):
    (tmp_path / "fading.py").write_text(CLASS + "\n\n" + DECLARED)
    (tmp_path / "test_fading.py").write_text(TEST)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    words = ["-q", "-p", "no:cacheprovider", "-k", "shape or causal", "test_fading.py"]
    command = [sys.executable, "-m", "pytest", *words]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^[2-9] passed, 2\d deselected", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.slow
def test_every_command_runs(tmp_path):
    (tmp_path / "fading.py").write_text(CLASS + "\n\n" + DECLARED)
    assert "export MIXERLAB_PLUGINS=$PWD/fading.py" in TEXT
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MIXERLAB_PLUGINS": str(tmp_path / "fading.py")}
    printed = {}
    for command in COMMANDS:
        short = command.replace("stack=fading,gqa length=512,2048,8192", "stack=fading length=16,32")
        words = shlex.split(short.replace("seed=0,1,2", "seed=0"))[1:]
        called = [sys.executable, *words, *TINY.get(words[1], ())]
        done = subprocess.run(called, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        printed[words[1]] = done.stdout
    assert list(printed) == [
        "mixers.check", "experiments.show", "experiments.bench", "experiments.train", "analysis.report"]
    assert " 0 FAIL" in printed["mixers.check"]
    assert re.search(r"^fading +32 ", printed["experiments.bench"], re.MULTILINE)
    assert re.search(r"^fading +decoded token +2 ", printed["experiments.bench"], re.MULTILINE)
    assert "fading" in (tmp_path / "runs" / "report.html").read_text()
