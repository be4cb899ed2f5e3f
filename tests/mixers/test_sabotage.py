"""The kit is itself tested: every deliberate fault is caught by the property meant for it, and right mixers pass."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mixers import check
from mixers.conformance.properties import PROPERTIES

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def _load(name):
    """A file beside this one; tests are no package."""
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sabotaged = _load("sabotaged")
BY_NAME = {each.name: each for each in PROPERTIES}


FAULTS = sorted({(cls.__base__.__name__, cls.caught_by) for cls in sabotaged.FAULTY})
BEFORE = [case for case in check.cases(*sabotaged.RIGHT) if (case.label, case.property.name) in FAULTS]


@pytest.mark.parametrize("case", BEFORE, ids=str)
def test_without_the_fault_the_same_mixer_passes(case):
    case.run()


@pytest.mark.parametrize("cls", sabotaged.FAULTY, ids=lambda cls: cls.__name__)
def test_fault_is_caught_by_the_property_meant_for_it(cls):
    result = check.examine(cls, BY_NAME[cls.caught_by])
    assert result.verdict == check.FAIL and result.where
    # Caught by what it does, not by a crash on the way; these two properties are about calls that must not raise.
    if cls.caught_by not in ("meta", "compile"):
        assert "raises" not in result.why
    if cls is not sabotaged.HalfTheTypes:
        assert not check.unusable(cls)


def test_every_property_catches_something():
    assert {cls.caught_by for cls in sabotaged.FAULTY} == set(BY_NAME)
    assert len(sabotaged.FAULTY) >= 16


def test_the_smallest_failing_input_and_the_largest_deviation_are_named():
    block = check.examine(sabotaged.LeakPastBlock, BY_NAME["causality of values"])
    assert block.where.startswith("T=150 later from 64") and 1e-4 < block.deviation < 1e-1
    state = check.examine(sabotaged.StateNotCarried, BY_NAME["cuts of extend"])
    assert state.where == "T=5 cut at [1, 2]" and 0.01 < state.deviation < math.inf
    chunks = check.examine(sabotaged.OnlyWholeChunks, BY_NAME["lengths"])
    assert chunks.where == "T=1"
    assert "smallest failing input T=1; largest deviation" in str(chunks)


def test_nan_is_a_fail():
    nan = check.Property("nan", lambda subject: iter([("T=1", lambda: math.nan)]))
    assert check.examine(sabotaged.Linear, nan).verdict == check.FAIL


def test_a_case_raises_on_a_fail():
    case = check.Case("KeysDetached", sabotaged.KeysDetached, BY_NAME["gradients"])
    with pytest.raises(AssertionError, match="KeysDetached: gradients: FAIL: smallest failing input T="):
        case.run()


def test_a_check_leaves_the_random_state_alone():
    import torch

    torch.manual_seed(3)
    before = torch.get_rng_state()
    check.examine(sabotaged.Linear, BY_NAME["determinism"])
    assert torch.equal(before, torch.get_rng_state())


def test_the_command_says_what_is_wrong_and_goes_on():
    """A class that is no mixer, a required option, a forward that raises or gives the wrong shape: others still run."""
    wrong = {
        "sabotaged:NoMixer": "'NoMixer' is no subclass of mixers.base.Mixer",
        "sabotaged:NeedsAnOption": "cannot be built: raises ValueError: NeedsAnOption needs the option 'order'",
        "sabotaged:Raises": "raises RuntimeError: not today",
        "sabotaged:HalfAsLong": r"forward gives \[1, 3, 16\] of torch.float32 for x \[1, 5, 16\]",
        "sabotaged:Swallows": r"takes \*options: the signature is the config",
        "sabotaged:Missing": "has no attribute 'Missing'",
        "linaer": r"unknown mixer 'linaer' \(did you mean 'linear'",
    }
    command = [sys.executable, "-m", "mixers.check", *wrong, "sabotaged:OnlyWholeChunks"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    assert done.returncode == 1, done.stderr
    for mixer, message in wrong.items():
        assert re.search(rf"^{re.escape(mixer)} +FAIL: .*{message}", done.stdout, re.MULTILINE), (mixer, done.stdout)
    assert re.search(
        r"^sabotaged:OnlyWholeChunks lengths +FAIL: smallest failing input T=1;", done.stdout, re.MULTILINE
    )
    assert re.search(r"permutation +does not apply, because no options are declared", done.stdout)
    assert re.search(r"^lengths +(- +){7}FAIL", done.stdout, re.MULTILINE)


def test_the_command_passes_where_all_is_right(monkeypatch, capsys):
    monkeypatch.setattr(check, "PROPERTIES", PROPERTIES[:2])
    assert check.main(["linear"]) == 0
    assert "2 pass, 0 FAIL, 0 does not apply" in capsys.readouterr().out
