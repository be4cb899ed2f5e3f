"""How far a grid is: what its record and those of its runs say, and how long the rest will take."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, Literal

from experiments import grids, slurm_queue
from experiments.grids import Grid, Started
from experiments.outcomes import Outcome, outcomes
from experiments.record import read_events

State = Literal["finished", "skipped", "failed", "diverged", "running", "interrupted", "waiting", "not started"]
BAD = ("failed", "diverged", "interrupted", "not started")
# Of a speed: over at most so many logged points.
_POINTS = 5


@dataclass(frozen=True)
class Running:
    """A run that is on: what it last logged. Speeds are of the last points, validation included."""

    name: str
    step: int
    steps: int
    values: Mapping[str, float]
    tokens_per_second: float | None
    seconds_left: float | None

    def __str__(self) -> str:
        losses = [f"{name} {value:.4g}" for name, value in self.values.items() if name in ("train/loss", "val/loss")]
        speed = [] if self.tokens_per_second is None else [f"{self.tokens_per_second:,.0f} tokens/s"]
        return "  ".join([f"{self.name}: step {self.step}/{self.steps}", *losses, *speed])


@dataclass(frozen=True)
class Job:
    """One job of a grid. `options`: those that not all jobs share."""

    number: int
    options: str
    state: State
    text: str
    seconds: float | None = None
    run: Running | None = None


@dataclass(frozen=True)
class Progress:
    """A grid at one moment."""

    grid: Grid
    jobs: Sequence[Job]
    # Seconds that a run of this grid took, of those that it made itself, trials included.
    durations: Sequence[float]
    # Runs that tuning has still to make.
    trials_left: int
    trials: int

    @cached_property
    def counts(self) -> Counter[str]:
        return Counter(job.state for job in self.jobs)

    @property
    def active(self) -> bool:
        """Is there something that still happens?"""
        return bool(self.counts["running"] or self.counts["waiting"])

    @property
    def bad(self) -> int:
        """Jobs that ended without a result, or will have none."""
        return sum(self.counts[state] for state in BAD)

    @property
    def seconds_left(self) -> float | None:
        """Of the whole grid, from what runs took and how fast those are that run; None where nothing is known yet.

        Waiting runs are taken to be as long as the median, and to be run as many at a time as now.
        """
        left = [job.run.seconds_left for job in self.jobs if job.run and job.run.seconds_left is not None]
        typical = median(self.durations) if self.durations else None
        if typical is None and left:
            typical = max(job.seconds + job.run.seconds_left for job in self.jobs
                          if job.run and job.run.seconds_left is not None)  # fmt: skip
        if typical is None:
            return None
        unknown = self.counts["running"] - len(left)
        rest = sum(left) + typical * (self.counts["waiting"] + self.trials_left + unknown)
        return max([rest / max(self.counts["running"], 1), *left])

    def __str__(self) -> str:
        """3 of 18 done, 1 failed, 1 running, about 6 min left."""
        done = self.counts["finished"] + self.counts["skipped"]
        parts = [f"{done} of {len(self.jobs)} done"]
        parts += [f"{self.counts[state]} {state}" for state in (*BAD, "running", "waiting") if self.counts[state]]
        if self.trials:
            parts.append(f"{self.trials - self.trials_left} of {self.trials} trials made")
        if self.active and self.seconds_left is not None:
            parts.append(f"about {duration(self.seconds_left)} left")
        return ", ".join(parts)


def progress(grid: Grid) -> Progress:
    """The grid now."""
    begun, ended, trials = grids.started(grid.folder), outcomes(grid.folder), outcomes(grid.folder, "trials")
    results = {outcome.job: outcome for outcome in ended}
    queue = slurm_queue.queue(grid.slurm)
    words = grid.jobs or [[] for _ in range(max([-1, *begun]) + 1)]
    alive = {number: number not in results and _runs(job, queue) for number, job in begun.items()}
    # Slurm starts its jobs without a leader; nobody else does.
    starts = grid.process.alive is not False or (grid.slurm is not None and (any(alive.values()) or bool(queue)))
    waits = starts and not grid.cancelled
    records = _records(grid.runs, [job for number, job in begun.items() if alive[number]])
    jobs = [
        _job(number, options, results.get(number), begun.get(number), alive.get(number, False), waits,
             records.get(number))
        for number, options in enumerate(grids.varying(words))
    ]  # fmt: skip
    made = [outcome.seconds for outcome in (*ended, *trials) if outcome.seconds is not None]
    missing = grid.trials - len({trial.folder for trial in trials})
    return Progress(grid, jobs, made, max(missing, 0), grid.trials)


def _runs(job: Started, queue: set[str] | None) -> bool:
    """Does a started job that has no outcome still run? Of one on another machine, Slurm may know."""
    if job.ended is not None:
        return False
    alive = job.process.alive
    return alive if alive is not None else queue is None or job.slurm in queue


def _job(number: int, options: str, outcome: Outcome | None, begun: Started | None, alive: bool, waits: bool,
         folder: Path | None) -> Job:  # fmt: skip
    if outcome:
        return Job(number, options, outcome.status, outcome.text.partition("\n")[0], outcome.seconds)
    if begun is None:
        return Job(number, options, "waiting" if waits else "not started", "")
    if not alive:
        why = f"{begun.process} is gone" if begun.ended is None else "ended before its time"
        return Job(number, options, "interrupted", why)
    run = running(folder) if folder else None
    text = str(run) if run else f"{begun.process}, before the first logged point"
    return Job(number, options, "running", text, time.time() - begun.started, run)


def _records(runs: Path, jobs: Sequence[Started]) -> dict[int, Path]:
    """The folder of the run that each of these jobs works on, where it has begun one."""
    owners = {str(job.process): job for job in jobs}
    found: dict[int, tuple[float, Path]] = {}
    for path in runs.glob("*/status.json") if jobs else ():
        try:
            changed, owner = path.stat().st_mtime, json.loads(path.read_text()).get("owner")
        except (OSError, ValueError):
            continue
        job = owners.get(owner)
        # What a process of this number left behind earlier is not the job's.
        if job and changed >= max(job.started - 2, found.get(job.number, (0.0,))[0]):
            found[job.number] = changed, path.parent
    return {number: folder for number, (_, folder) in found.items()}


def running(folder: Path) -> Running | None:
    """What the record of a run that is on says; None before its first point of training."""
    events = [event for event in read_events(folder) if "train/loss" in event["metrics"]]
    try:
        params = json.loads((folder / "params.json").read_text())
    except (OSError, ValueError):
        return None
    if not events:
        return None
    values: dict[str, Any] = {}
    for event in read_events(folder):
        values |= event["metrics"]
    first, last = events[-_POINTS:][0], events[-1]
    seconds = last["time"] - first["time"]
    left = None
    if seconds > 0:
        left = (params["steps"] - last["step"]) * seconds / (last["step"] - first["step"])
    name = f"{params['stack']} seed {params['seed']} lr {params['lr']:.3g}"
    speed = (last["tokens"] - first["tokens"]) / seconds if seconds > 0 else None
    return Running(name, last["step"], params["steps"], values, speed, left)


def duration(seconds: float) -> str:
    """For people: 40 s, 6 min, 2.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
