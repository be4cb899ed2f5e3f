"""The commands of README and docs as they stand there: what they train composes, what they call knows their options."""

from __future__ import annotations

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser

from experiments import cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# A reader puts a name there, or registers the mixer first (as tests/docs/test_add_a_mixer.py does).
BLANKS = re.compile(r"\.\.\.|KEY|HOST|FOLDER|NAME|TIME|\||\bfading\b|\bdecay\b|my_")


def commands() -> list[tuple[str, str, str]]:
    """(page, module, the rest) of each."""
    found = []
    for page in PAGES:
        text = page.read_text().replace("\\\n", " ")
        for module, rest in re.findall(r"^ *python -m ([\w.]+)(.*)$", text, re.MULTILINE):
            found.append((page.name, module, rest.strip()))
    return found


COMMANDS = commands()
TRAINED = [(page, rest) for page, module, rest in COMMANDS
           if module in ("experiments.train", "experiments.show") and not BLANKS.search(rest.partition(" #")[0])]
OTHERS = sorted({(module, rest) for _, module, rest in COMMANDS
                 if module.partition(".")[0] in ("experiments", "analysis", "mixers", "kernels")
                 and module not in ("experiments.train", "experiments.show", "experiments.bench")})


def test_the_pages_are_full_of_commands():
    assert len(TRAINED) > 30 and len(OTHERS) > 20


@pytest.mark.parametrize(("page", "rest"), TRAINED, ids=[f"{page} {rest}"[:60] for page, rest in TRAINED])
def test_what_is_trained_composes(page, rest):
    words = [word for word in cli.prepare(shlex.split(rest, comments=True), "train") if word != "-m"]
    words = [word for word in words if not word.startswith(("hydra.mode", "explain"))]
    for batch in BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(words), None):
        for job in batch:
            assert cli.composed("train", list(job))["optimizer"]


@pytest.mark.parametrize(("module", "rest"), OTHERS, ids=[f"{module} {rest}"[:60] for module, rest in OTHERS])
def test_what_is_called_knows_the_options(module, rest):
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).read_text()
    for word in shlex.split(rest, comments=True):
        if word.startswith("--") or "=" in word:
            assert re.search(rf"\b{re.escape(word.partition('=')[0].lstrip('-'))}\b", source), word
