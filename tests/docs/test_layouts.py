"""The layouts that docs/layouts.md shows are read as it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from arch.layout import LayoutError, layers

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "layouts.md").read_text()
BLOCK = re.search(r"```layout\n(.*?)```", TEXT, re.DOTALL)[1]
EXAMPLES = {text.strip(): int(n) for text, n in re.findall(r"^(.+?) *# (\d+):", BLOCK, re.MULTILINE)}


def test_every_line_is_an_example():
    assert len(EXAMPLES) == BLOCK.count("\n") == 12


@pytest.mark.parametrize("text", EXAMPLES)
def test_an_example_has_so_many_layers(text):
    assert len(layers(text, EXAMPLES[text])) == EXAMPLES[text]


def test_examples_say_what_stands_behind_them():
    def places(text, layer):
        return [i for i, found in enumerate(layers(text, EXAMPLES[text])) if str(found) == layer]

    assert places("mamba2 + mlp with gqa at 7 18 29 40", "gqa") == [7, 18, 29, 40]
    assert places("4*mamba + gqa + 3*mamba", "gqa") == [4, 12, 20, 28]
    assert places("window|mamba with gqa|mamba at 0 15 31", "gqa|mamba") == [0, 15, 31]
    # One of the earlier places moves the later ones on.
    assert places("mamba2 with gqa@a before 6 12 18", "gqa@a") == [6, 13, 20]


@pytest.mark.parametrize("text", ["gqa|mlp", "gqa,mha", "gqa with mha at 40"])
def test_what_it_cannot_say_is_an_error(text):
    with pytest.raises(LayoutError):
        layers(text, 12)
    assert text != "gqa|mlp" or "`gqa|mlp` is an error" in TEXT
