"""One row of a task's test data, to look at what a model does with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments import tasks
from experiments.tasks.base import Item
from mixers.options import nearest


def of_suite(options: Mapping[str, Any], suite: str | None, row: int) -> tuple[str, Item]:
    """The suite's name and the row; `suite` None: the hardest test suite that was trained for, or the last.

    Args:
        options: of the task, its name among them, as a run's config has them.
    Raises:
        ValueError: no such suite or row.
    """
    task = tasks.build(options)
    suites = task.suites("test")
    name = suite or list(task.suites("validation"))[-1]
    name = name if name in suites or suite else list(suites)[-1]
    if name not in suites:
        raise ValueError(f"suite={name} does not exist{nearest(name, suites)}; the suites are {', '.join(suites)}")
    if not 0 <= row < len(suites[name]):
        raise ValueError(f"row={row} must be from 0 to {len(suites[name]) - 1}")
    return name, suites[name][row]
