"""`python -m experiments.bench`, end to end and in its parts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest

from experiments import bench, bench_table, cli
from experiments.bench_cell import DECODE, PREFILL, TRAIN
from experiments.bench_table import Result, table
from experiments.bench_worker import Failed
from experiments.record import read_status
from experiments.timing import Reading

ROOT = Path(bench.__file__).resolve().parents[1]
TINY = ("model.d_model=16", "model.mlp=none", "accelerator=cpu", "rounds=2", "mlflow=false")
# It cannot do 24 tokens, and takes its process with it at 32.
FUSSY = '''
from __future__ import annotations
import os, signal
from mixers.base import Mixer
from mixers.registry import register

@register("fussy")
class Fussy(Mixer):
    def __init__(self, d_model: int):
        super().__init__()

    def whole(self, x):
        if not x.is_meta and x.shape[1] == 24:
            raise RuntimeError("not in this mood")
        if not x.is_meta and x.shape[1] == 32:
            os.kill(os.getpid(), signal.SIGKILL)
        return x
'''


class FakeWorker:
    """Answers at once: a step takes as many ms as there are tokens, and everything that is asked is written down."""

    asked: ClassVar[list[tuple[str, int, str]]]
    broken: ClassVar[dict[tuple[str, int, str], BaseException]]

    def __init__(self, cell):
        self.cell = cell

    def ask(self, name):
        place = self.cell.label, self.cell.settings.length, name
        self.asked.append(place)
        if place in self.broken:
            raise self.broken[place]
        ms = self.cell.settings.length / 1000
        readings = {TRAIN: Reading(2 * ms, ms), PREFILL: Reading(ms, ms), DECODE: Reading(ms, ms)}
        return {"prepare": 1000 * self.cell.settings.length, "round": readings, "peak": 1e12, "shared_cores": 0.0}[name]

    def close(self):
        pass


@pytest.fixture
def call(monkeypatch, tmp_path, capsys):
    """The command line in this process and an empty folder: exit code, what it printed, its errors."""
    def call(*arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["bench", *TINY, *arguments])
        capsys.readouterr()
        return bench.main(), *capsys.readouterr()

    return call


@pytest.fixture
def fake(monkeypatch):
    """Workers that do nothing, and no page at the end."""
    FakeWorker.asked, FakeWorker.broken = [], {}
    monkeypatch.setattr(bench, "Worker", FakeWorker)
    monkeypatch.setattr(bench, "_scaling", lambda folder: None)
    return FakeWorker


def records(tmp_path):
    """Params -> metrics and status of every record."""
    found = {}
    for folder in (tmp_path / "runs" / "bench").glob("*/*/"):
        params = json.loads((folder / "params.json").read_text())
        lines = (folder / "metrics.jsonl").read_text().splitlines() if (folder / "metrics.jsonl").exists() else ["{}"]
        found[params["stack"], params["length"]] = json.loads(lines[0]).get("metrics", {}), read_status(folder)
    return found


@pytest.mark.slow
def test_cells_are_measured_in_processes_of_their_own_and_a_lost_one_harms_no_other(tmp_path):
    (tmp_path / "fussy.py").write_text(FUSSY)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MIXERLAB_PLUGINS": str(tmp_path / "fussy.py")}
    command = [sys.executable, "-m", "experiments.bench", *TINY, "-m", "stack=mha,fussy", "length=24,32"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "")
    found = records(tmp_path)
    assert {cell: status.status for cell, (_, status) in found.items()} == {
        ("mha", 24): "FINISHED", ("mha", 32): "FINISHED", ("fussy", 24): "FAILED", ("fussy", 32): "FAILED"}
    assert found["fussy", 24][1].reason == "RuntimeError: not in this mood"
    assert found["fussy", 32][1].reason == "its process ended with signal SIGKILL, perhaps out of memory"
    names = {name for name in found["mha", 32][0] if name.startswith("measured/")}
    assert {"measured/train_tokens_per_second", "measured/peak_memory_bytes", "measured/decode_ms_at_32"} <= names
    assert found["mha", 32][0]["complexity/flops_per_token_train"] > 0
    assert "2 measured, 2 failed" in done.stdout
    assert re.search(r"fussy +32 +FAILED: its process ended with signal SIGKILL", done.stdout)
    page, = (tmp_path / "runs").glob("bench/*/scaling.html")
    assert "fussy at 32: FAILED" in page.read_text()
    assert re.search(r"mha +training step +2 ", done.stdout)


def test_stacks_of_one_length_take_turns(call, fake):
    code, out, err = call("-m", "stack=mha,linear", "length=64,32")
    assert (code, err) == (0, "")
    short = [("mha", 32, "prepare"), ("linear", 32, "prepare"), *[("mha", 32, "round"), ("linear", 32, "round")] * 2]
    assert fake.asked[:6] == short
    assert [place[1] for place in fake.asked] == sorted(place[1] for place in fake.asked)
    rows = [line.split() for line in out.split("\n\n")[1].splitlines()]
    assert [row[:3] for row in rows[1:]] == [
        ["mha", "64", "128"], ["mha", "32", "64"], ["linear", "64", "128"], ["linear", "32", "64"]]


def test_what_fails_in_any_phase_is_one_row(call, fake, tmp_path):
    fake.broken = {
        ("mha", 16, "prepare"): Failed("MemoryError: too large", "trace of the process"),
        ("linear", 32, "round"): Failed("its process ended with exit code 3"),
    }
    code, out, _ = call("-m", "stack=mha,linear,window", "length=16,32", "model.mixers.window.n_heads=1,3")
    assert code == 1
    found = records(tmp_path)
    statuses = {cell: status.status for cell, (_, status) in found.items()}
    assert statuses["mha", 16] == statuses["linear", 32] == "FAILED"
    assert statuses["mha", 32] == statuses["linear", 16] == "FINISHED"
    # Eight cells: the heads of window make no other mha or linear.
    assert "4 measured, 4 failed" in out
    assert len(re.findall("window +(16|32)  FAILED: .*n_heads=3", out)) == 2


def test_an_impossible_reading_is_a_failed_row_that_says_so(call, fake, tmp_path, monkeypatch):
    # The clock of the fake, seen from a machine of a million FLOPs a second.
    real = FakeWorker.ask
    monkeypatch.setattr(FakeWorker, "ask", lambda self, name: 1e6 if name == "peak" else real(self, name))
    code, out, _ = call("stack=mha", "length=64")
    assert code == 1
    (metrics, status), = records(tmp_path).values()
    assert metrics == {} and status.reason.startswith("WrongReading: wrong reading: train_step in 64 ms")
    assert "FAILED: WrongReading" in out


def test_one_wrong_cell_alone_is_a_mistake(call, fake, tmp_path):
    code, out, err = call("stack=mha", "model.mixers.mha.n_heads=3")
    assert (code, out) == (2, "") and err.startswith("error: model: ") and "n_heads=3" in err
    assert not (tmp_path / "runs" / "bench").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lenght=64"], "lenght is no option (did you mean 'length'?)"),
        (["stack=lineer"], "stack='lineer' does not exist (did you mean 'linear'?)"),
        (["length=64,128"], "python -m experiments.bench -m length=64,128"),
        (["task=mqar"], "task"),
        (["-m", "length=64,128", "hydra/launcher=joblib"], "hydra/launcher"),
    ],
)
def test_a_mistake_on_the_command_line_is_explained(call, fake, arguments, message):
    code, out, err = call(*arguments)
    assert (code, out) == (2, "") and message in err
    assert fake.asked == []


@pytest.mark.parametrize(("phase", "started"), [("prepare", 1), ("round", 2)])
def test_ctrl_c_ends_with_what_there_is(call, fake, tmp_path, phase, started):
    fake.broken = {("mha", 32, phase): KeyboardInterrupt()}
    code, out, _ = call("-m", "stack=mha,linear", "length=16,32")
    assert code == 130
    assert [status.reason for _, status in records(tmp_path).values()].count("interrupted") == started
    assert "2 measured, 2 failed" in out


def test_the_help_page_lists_every_option_with_the_default_in_effect():
    page, composed = cli.help_page("bench"), cli.composed("bench", [])
    for name in set(composed) - {"model", "stack"}:
        assert re.search(rf"^  {name}={re.escape(str(cli._spell(composed[name])))} +\w", page, re.MULTILINE), name
    assert f"model.d_model={composed['model']['d_model']} " in page
    assert "task=" not in page and "+experiment" not in page


def result(label, length, seconds, **values):
    known = {"train_step_ms": 1000 * seconds, "train_step_spread": 0.1, "train_flops_per_second": 8e9 / seconds,
             "train_tokens_per_second": length / seconds, "peak_flops_per_second": 1e11, "shared_cores": 0.0}
    named = {f"measured/{name}": value for name, value in (known | values).items()}
    return Result(label, length, {TRAIN: 8e9}, named)


def test_a_shared_machine_is_marked_at_its_tokens_a_second():
    text = table([result("mha", 64, 0.5), result("linear", 64, 0.5, shared_cores=bench_table.SHARED_CORES)])
    _, mha, linear, *rest = text.splitlines()
    assert " * " not in mha and re.search(r" 128 \* ", linear)
    assert any(line.startswith("* shared machine: others kept up to 0.2 cores busy") for line in rest)
    assert "shared machine" not in table([result("mha", 64, 0.5)])


def test_more_tokens_in_less_time_are_distrusted():
    # Case C21: T -> 2T is never faster.
    assert "distrust mha: 128 tokens took less time than 64" in table([result("mha", 128, 0.4), result("mha", 64, 0.5)])
    assert "distrust" not in table([result("mha", 64, 0.5), result("mha", 128, 0.5), result("linear", 256, 0.1)])


def test_a_row_has_the_units_of_the_metrics():
    row = table([result("mha", 64, 0.5, peak_memory_bytes=2.5e6, decode_ms_at_64=1.25)]).splitlines()[1]
    assert row.split() == ["mha", "64", "500", "10%", "-", "128", "-", "1.25", "2.5", "MB", "8", "G", "16", "G", "16%"]
