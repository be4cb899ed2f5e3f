"""docs/extrapolation.md: its commands can be given, and its scalings are said as it says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from experiments import cli, config

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "extrapolation.md").read_text()
COMMANDS = re.findall(r"^    python -m experiments\.train (.+)$", TEXT, re.MULTILINE)
EVALUATE, = re.findall(r"^ +(evaluate\..+)$", TEXT, re.MULTILINE)


@pytest.mark.parametrize("options", [*COMMANDS, EVALUATE])
def test_the_commands_can_be_given(options):
    words = [word for word in shlex.split(options) if word != "-m" and not word.startswith("resume=")]
    found = config.plan(cli.composed("train", words))
    assert found.rope_scaling or options not in (EVALUATE, COMMANDS[-1])


@pytest.mark.parametrize("scheme", re.findall(r"`(?:stack=)?(position/\w+)`", TEXT))
def test_the_schemes_exist(scheme):
    assert scheme in config.choices("stack")


def test_all_schemes_are_named():
    named = re.findall(r"`(?:stack=)?(position/\w+)`", TEXT)
    assert sorted(named) == [stack for stack in config.choices("stack") if stack.startswith("position/")]
