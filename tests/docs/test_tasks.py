"""docs/tasks.md names every task with its suites, and its commands are those of the programs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from experiments import cli, config, generate, tasks

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "tasks.md").read_text()
# Behind the heading, which is the first line.
ROWS = [line for line in TEXT.splitlines() if line.startswith("| `")][1:]
TABLE = [[cell.strip() for cell in row.split("|")[1:-1]] for row in ROWS]
COMMANDS = re.findall(r"^    python -m experiments\.(train|generate) (.+)$", TEXT, re.MULTILINE)


def test_every_task_has_its_row():
    assert sorted(row[0].strip("`") for row in TABLE) == tasks.names()


@pytest.mark.parametrize("row", [row for row in TABLE if row[0] != "`text`"], ids=lambda row: row[0])
def test_the_suites_are_those_of_the_defaults(row):
    suites = list(tasks.get(row[0].strip("`"))().difficulties("test"))
    named = re.findall(r"`(\w+)`", row[2])
    assert named == (suites if "..." not in row[2] else [suites[0], suites[-1]])


@pytest.mark.parametrize(("program", "options"), COMMANDS)
def test_the_commands_can_be_given(program, options):
    words = shlex.split(options)
    if program == "generate":
        assert generate._options(words)[1]
        return
    # Of a grid, the first cell.
    config.plan(cli.composed("train", [re.sub(r"(=[^\[,]+),.*", r"\1", word) for word in words if word != "-m"]))


def test_the_tests_that_it_names_exist():
    named = re.findall(r"`(tests/[\w/]+\.py)`", TEXT)
    assert named and all((ROOT / path).is_file() for path in named)
