"""The trials of tuning: runs like any other, each made once, by whichever job of a grid comes to it first."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.record import Status, lock, read_events, read_status
from experiments.tuning import Tuned

if TYPE_CHECKING:
    from experiments.config import Plan

# Seconds between two looks at trials that other jobs are making.
_LOOK = 1.0
_FLOPS = "complexity/flops_per_token_train"


class NoRate(Exception):
    """All trials of a cell came to nothing."""


def tune(plan: Plan, run: Callable[[Plan], None], settled: Callable[[Plan], bool]) -> Plan:
    """The plan at the best learning rate; the trials are made where they are missing.

    Args:
        run: makes one of them; called with the right to work in its folder.
        settled: is there nothing to be done for this one?
    Raises:
        NoRate: every rate diverged or failed.
        ValueError: `tune.monitor` is no metric of the task.
    """
    trials: dict[Path, Plan] = {}

    def measure(rates: Sequence[float]) -> list[float]:
        new = [plan.trial(rate, seed) for rate in rates for seed in plan.search.seeds]
        complete(new, run, settled)
        trials.update({trial.folder: trial for trial in new})
        results = [result(trial.folder, plan.search.monitor) for trial in new]
        size = len(plan.search.seeds)
        return [plan.search.score(results[i * size : (i + 1) * size]) for i in range(len(rates))]

    scores = plan.search.find(measure)
    if all(score == float("inf") for _, score in scores):
        raise NoRate(f"all {len(trials)} trials of tuning came to nothing: {_reasons(list(trials))}")
    keys = [trial.key for trial in trials.values()]
    return plan.tuned(Tuned(plan.search, scores, keys, *_cost(list(trials))))


def complete(trials: Sequence[Plan], run: Callable[[Plan], None], settled: Callable[[Plan], bool]) -> None:
    """Make those that are not settled; those that others are making are waited for, after all the rest."""
    left = list(trials)
    while left:
        busy = [trial for trial in left if not _made(trial, run, settled)]
        if busy:
            time.sleep(_LOOK)
        left = busy


def _made(trial: Plan, run: Callable[[Plan], None], settled: Callable[[Plan], bool]) -> bool:
    """Is a trial settled, if need be by running it? Not where another process has it."""
    if settled(trial):
        return True
    with lock(trial.folder) as free:
        if free and not settled(trial):
            run(trial)
    return free


def result(folder: Path, monitor: str) -> float | None:
    """The last value of a metric in the record of a run; None where the run came to nothing.

    Raises:
        ValueError: the run is finished, and has no such metric.
    """
    status = read_status(folder)
    if status is None or status.status != "FINISHED":
        return None
    last = {name: value for event in read_events(folder) for name, value in event["metrics"].items()}
    if monitor not in last:
        known = ", ".join(name for name in last if name.startswith("val/"))
        raise ValueError(f"tune.monitor={monitor!r} is no metric of this task; it has {known}")
    return last[monitor]


def ended_since(status: Status, moment: float) -> bool:
    """Did a run end at this time (seconds since 1970) or later? Records tell whole seconds."""
    return status.ended is not None and datetime.fromisoformat(status.ended).timestamp() >= int(moment)


def _cost(folders: Sequence[Path]) -> tuple[int, float, float]:
    """Training tokens, training FLOPs and seconds of some runs, finished or not."""
    tokens, flops, seconds = 0, 0.0, 0.0
    for folder in folders:
        a_token, seen = 0.0, 0
        for event in read_events(folder):
            a_token, seen = event["metrics"].get(_FLOPS, a_token), max(seen, event["tokens"])
        status = read_status(folder)
        tokens, flops, seconds = tokens + seen, flops + a_token * seen, seconds + (status.seconds or 0.0)
    return tokens, flops, seconds


def _reasons(folders: Sequence[Path]) -> str:
    """Why runs came to nothing: each reason once, with the first folder that has it."""
    found: dict[str, Path] = {}
    for folder in folders:
        found.setdefault((read_status(folder).reason or "").partition("\n")[0], folder)
    return "; ".join(f"{reason} ({folder})" for reason, folder in found.items())
