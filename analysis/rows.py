"""One row of a run's test data, to look at what its model does with it."""

from __future__ import annotations

from experiments import resume, tasks
from experiments.record import read_description
from experiments.tasks.base import Item
from mixers.options import call, nearest


def of_suite(run: str, runs: str, suite: str | None, row: int) -> tuple[str, Item]:
    """The suite's name and the row; `suite` None: the test suite of the trained size, or the last.

    Raises:
        ValueError: no such run, suite or row.
    """
    options = dict(read_description(resume.find(run, runs)).config["task"])
    task = call(tasks.get(options.pop("name")), options, "task")
    suites = task.suites("test")
    name = suite or next(iter(task.suites("validation")))
    name = name if name in suites or suite else list(suites)[-1]
    if name not in suites:
        raise ValueError(f"suite={name} does not exist{nearest(name, suites)}; the suites are {', '.join(suites)}")
    if not 0 <= row < len(suites[name]):
        raise ValueError(f"row={row} must be from 0 to {len(suites[name]) - 1}")
    return name, suites[name][row]
