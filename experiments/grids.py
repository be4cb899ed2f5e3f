"""The record of a grid, `runs/.grids/TIME/`: what it is made of is known from its start.

    grid.json        what was asked for, its jobs, the process that leads it
    jobs/N.json      the process that runs, or ran, job N; written when the job starts
    outcomes.jsonl   how jobs ended, a line each (experiments.outcomes)
    trials.jsonl     the same for the trials of tuning
    cancelled        is there once the grid is to end

Jobs may be other processes, on other machines: files are all that they share.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from experiments.processes import Process
from experiments.record import write
from mixers.options import nearest


@dataclass(frozen=True)
class Grid:
    """grid.json.

    Attributes:
        sweep: its name, where it has one.
        started: seconds since 1970.
        arguments: of `python -m experiments.train`, given in the folder `cwd`.
        variables: of the environment, those that are ours.
        jobs: the options of each, all of them.
        trials: how many runs its tuning needs.
        slurm: where the jobs are Slurm's, the folder that they were submitted from.
    """

    folder: Path
    sweep: str | None
    started: float
    arguments: list[str]
    cwd: str
    variables: Mapping[str, str]
    process: Process
    jobs: list[list[str]]
    trials: int = 0
    slurm: str | None = None

    @property
    def name(self) -> str:
        return self.sweep or self.folder.name

    @property
    def runs(self) -> Path:
        """The folder of the runs' records."""
        return self.folder.parents[1]

    @property
    def cancelled(self) -> bool:
        return cancelled(self.folder)

    def control(self, verb: str) -> str:
        """The command that does something with this grid."""
        place = [] if self.runs == Path("runs") else [f"runs={self.runs}"]
        return shlex.join(["python", "-m", "experiments.grid", verb, self.name, *place])


@dataclass(frozen=True)
class Started:
    """jobs/N.json. Times are seconds since 1970; `slurm` is Slurm's id of the job."""

    number: int
    process: Process
    started: float
    slurm: str | None = None
    ended: float | None = None


def begin(grid: Grid) -> None:
    """Write a grid down."""
    grid.folder.mkdir(parents=True, exist_ok=True)
    write(grid.folder / "grid.json", json.dumps(asdict(grid) | {"folder": str(grid.folder)}, indent=1))


def varying(jobs: Sequence[Sequence[str]]) -> list[str]:
    """Of every job, the options that not all jobs have, without Hydra's backslashes."""
    common = set.intersection(*map(set, jobs)) if len(jobs) > 1 else set()
    return [" ".join(re.sub(r"\\(.)", r"\1", word) for word in job if word not in common) for job in jobs]


def forget(folder: Path) -> None:
    """A grid that a mistake has ended before any job started was none."""
    record = folder / "grid.json"
    # There may be no folder, or a file in its place.
    if record.exists() and not started(folder):
        record.unlink()


def start(folder: Path, number: int) -> Started:
    """Write down that this process now runs a job."""
    begun = Started(number, Process.this(), time.time(), _slurm_id() if read(folder).slurm else None)
    _write_job(folder, begun)
    return begun


def end(folder: Path, begun: Started) -> None:
    """Write down that it no longer does."""
    _write_job(folder, replace(begun, ended=time.time()))


def _write_job(folder: Path, job: Started) -> None:
    path = folder / "jobs" / f"{job.number}.json"
    path.parent.mkdir(exist_ok=True)
    write(path, json.dumps(asdict(job)))


def has_started(folder: Path, number: int) -> bool:
    return (folder / "jobs" / f"{number}.json").exists()


def started(folder: Path) -> dict[int, Started]:
    """The jobs that have started, by number."""
    found = [json.loads(path.read_text()) for path in (folder / "jobs").glob("[0-9]*.json")]
    return {job["number"]: Started(**job | {"process": Process(**job["process"])}) for job in found}


def cancel(folder: Path) -> None:
    """No further job starts."""
    (folder / "cancelled").touch()


def cancelled(folder: Path) -> bool:
    return (folder / "cancelled").exists()


def read(folder: Path) -> Grid:
    """The grid in a folder.

    Raises:
        ValueError: its record cannot be read.
    """
    try:
        about = json.loads((folder / "grid.json").read_text())
        return Grid(**about | {"folder": folder, "process": Process(**about["process"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{folder}/grid.json cannot be read: {error}") from None


def moved(grid: Grid) -> bool:
    """Is the grid elsewhere than its command would put it?"""
    begun_in = json.loads((grid.folder / "grid.json").read_text())["folder"]
    return (Path(grid.cwd) / begun_in).resolve() != grid.folder.resolve()


def find(runs: Path, name: str | None) -> Grid:
    """The newest grid with this name of a sweep, the one with this name of a folder, or the newest of all.

    Raises:
        ValueError: there is none.
    """
    if name and (runs / ".grids" / name / "grid.json").exists():
        return read(runs / ".grids" / name)
    found = _all(runs)
    if not found:
        raise ValueError(f"runs={str(runs)!r} has no grid; python -m experiments.train -m ... starts one")
    for grid in found:
        if name in (None, grid.sweep):
            return grid
    known = list(dict.fromkeys(grid.name for grid in found))
    raise ValueError(f"{name!r} is no grid{nearest(name, known)}; in runs={str(runs)!r} are: {', '.join(known)}")


def _all(runs: Path) -> list[Grid]:
    """The grids that can be read, the newest first: folders are named after the time."""
    found = []
    for path in sorted(runs.glob(".grids/*/grid.json"), reverse=True):
        with suppress(ValueError):
            found.append(read(path.parent))
    return found


def _slurm_id() -> str | None:
    """Slurm's name of the job that this process is in; of an array's job, the array and the number in it."""
    of_array, number = (os.environ.get(f"SLURM_ARRAY_{part}_ID") for part in ("JOB", "TASK"))
    return f"{of_array}_{number}" if of_array and number else os.environ.get("SLURM_JOB_ID")
