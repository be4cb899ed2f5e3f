"""The commands of docs/text.md are read as they stand there, and the files and options that it names exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from experiments import cli, config
from experiments.tasks.text import Text

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "text.md").read_text()
COMMANDS = re.findall(r"^python -m experiments.train (.*)$", TEXT, re.MULTILINE)


@pytest.fixture
def files(tmp_path, monkeypatch):
    """What the commands read, and a data set that is there already."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = " ".join(f"word{i * i} {i}" for i in range(20_000))
    (tmp_path / "my_notes").mkdir()
    (tmp_path / "my_notes" / "a.md").write_text(words)
    (tmp_path / "my_text.txt").write_text(words)
    tokeniser = Text(path="my_text.txt", tokenizer="bpe", vocabulary=300).tokeniser
    (tmp_path / "my_tokeniser.json").write_text(tokeniser.json)
    monkeypatch.setattr("experiments.corpus.sources._stream", lambda *_: iter([words.encode()]))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_makes_a_plan(command, files):
    assert config.plan(cli.composed("train", shlex.split(command))).task.name == "text"


def test_the_files_that_it_names_exist():
    named = re.findall(r"`((?:arch|experiments)/[\w/]+\.py)`", TEXT)
    assert named and all((ROOT / path).is_file() for path in named)
