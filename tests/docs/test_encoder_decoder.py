"""docs/encoder_decoder.md: its layouts, its example and its commands are those of the code."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from arch.encoder_decoder import EncoderDecoder
from experiments import cli, config, generate

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "encoder_decoder.md").read_text()
COMMANDS = re.findall(r"^    python -m experiments\.train (.+)$", TEXT, re.MULTILINE)
ASKED = re.findall(r"^    python -m experiments\.generate (.+)$", TEXT, re.MULTILINE)
# A cross-attending layer among others: names of mixers and aliases, and the signs between them.
LAYOUTS = set(re.findall(r"`([\w+| ]*\bcross\w*\b[\w+| ]*)`", TEXT)) - {"cross"}
PARAMETERS = dict(re.findall(r"^\| `(.+?)` \| ([\d,]+) \|", TEXT, re.MULTILINE))


@pytest.mark.parametrize("options", COMMANDS)
def test_the_commands_can_be_given(options):
    words = cli.prepare([word for word in shlex.split(options) if word != "-m"], "train")
    # The first cell of the grid.
    words += ["model.layout=mha + cross_mha + mlp"] if "+experiment=bahdanau_vaswani" in words else []
    assert isinstance(config.plan(cli.composed("train", words)).skeleton, EncoderDecoder)


def test_prompts_are_given_as_it_shows():
    options, = ASKED
    assert generate._options(shlex.split(options))[1] == ["3 1 4", "1 5"]


def test_the_example_runs():
    example = re.search(r"```python\n(.*?)```", TEXT, re.DOTALL)[1]
    names = {}
    exec(example, names)
    assert len(names["answers"]) == 2 and all(len(answer) <= 8 for answer in names["answers"])


def test_it_shows_layouts():
    assert len(LAYOUTS) >= 6 and len(PARAMETERS) == 4


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_a_layout_can_be_built_and_has_the_parameters_it_says(layout):
    skeleton = config.plan(cli.composed("train", ["+experiment=bahdanau_vaswani", f"model.layout={layout}"])).skeleton
    if layout in PARAMETERS:
        assert f"{sum(p.numel() for p in skeleton.parameters()):,}" == PARAMETERS[layout]
