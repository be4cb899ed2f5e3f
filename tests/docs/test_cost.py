"""docs/cost.md names every figure, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from arch.cost import FIGURES

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "cost.md").read_text()


def test_every_figure_has_its_row():
    table = TEXT.partition("## The figures")[2].partition("## What the numbers")[0]
    first = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    assert re.findall("`(.+?)`", " ".join(first)) == list(FIGURES)


def test_the_tests_that_it_names_exist():
    named = re.findall(r"`(tests/[\w/]+\.py)`", TEXT)
    assert named and all((ROOT / path).is_file() for path in named)
