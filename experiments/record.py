"""The local record of a run, the truth about it: a folder of plain files.

    status.json       RUNNING, FINISHED, FAILED, DIVERGED or KILLED, with reason and times; always written first
    config.yaml       the semantic config
    environment.json  versions, commit, device, threads, precision
    params.json       what runs are told apart and grouped by
    tuning.json       how the learning rate was chosen, where it was
    metrics.jsonl     {"step", "tokens", "time", "metrics"}, one line an event
    log.txt           the traceback of a failure
    checkpoints/

A process may die at any moment. So every file but metrics.jsonl is replaced as a whole, and of metrics.jsonl a
checkpoint knows how much belongs to it: whoever goes on from there drops the rest.
"""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout
from omegaconf import OmegaConf

Outcome = Literal["FINISHED", "FAILED", "DIVERGED", "KILLED"]


@dataclass(frozen=True)
class Status:
    """status.json. Times are ISO 8601 with their zone; reason and end are None while the run is on.

    Attributes:
        sweep, sweeps: the one that made the run; all that it belongs to, for it is not made again for another.
        seconds: spent on what led to the result; without what was lost to interruptions.
        key: stands for the config; earlier_keys for the configs that it was run under before it was continued.
        resumed: steps from which it went on after an interruption.
        owner: host and process that runs it.
        behind: MLflow lacks something of it, or does not know that it ended.
        trial: it was made to choose a learning rate, and is no result.
        trials: the sweeps whose tuning it belongs to.
    """

    status: Literal["RUNNING", "FINISHED", "FAILED", "DIVERGED", "KILLED"]
    started: str
    command: str
    sweep: str | None = None
    sweeps: list[str] = field(default_factory=list)
    reason: str | None = None
    ended: str | None = None
    seconds: float | None = None
    mlflow_run_id: str | None = None
    mlflow_uri: str | None = None
    key: str | None = None
    earlier_keys: list[str] = field(default_factory=list)
    resumed: list[int] = field(default_factory=list)
    owner: str | None = None
    behind: bool = False
    trial: bool = False
    trials: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Description:
    """What a run is, known before it starts.

    Args:
        sweep: that it is a result of; of a trial, that it is a trial of.
        tuning: how its learning rate was chosen, as `experiments.tuning.Tuned.record`.
    """

    label: str
    params: Mapping[str, Any]
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    command: str
    sweep: str | None = None
    key: str | None = None
    trial: bool = False
    tuning: Mapping[str, Any] | None = None

    @property
    def name(self) -> str:
        trial = f"lr {self.params.get('lr'):g}, trial" if self.trial else None
        told = [self.label, self.params.get("task"), "seed", self.params.get("seed"), trial]
        return " ".join(str(part) for part in told if part is not None)


@dataclass(frozen=True)
class Position:
    """How far a record was when a checkpoint was taken: its step, bytes of metrics.jsonl, seconds spent."""

    step: int
    bytes: int
    seconds: float


class Record:
    """Writes one run's folder."""

    def __init__(self, folder: Path, about: Description, resume: Position | None = None) -> None:
        """The record is RUNNING from now on. Without `resume`, what an earlier try left in the folder is removed.

        Raises:
            OSError: the folder cannot be written.
        """
        self.folder = folder
        self.began, self.before = time.time(), resume.seconds if resume else 0.0
        now = _iso(self.began)
        previous = read_status(folder) if resume else None
        old = previous or Status("RUNNING", now, about.command, trial=about.trial)
        self.status = replace(
            joined(old, about.sweep, about.trial), status="RUNNING", command=about.command, key=about.key,
            owner=owner(), reason=None, ended=None, seconds=None,
            resumed=[*old.resumed, *([resume.step] if resume else [])])
        if not resume:
            discard(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_status(folder, self.status)
        self.checkpoints.mkdir(exist_ok=True)
        if resume:
            os.truncate(self.metrics, resume.bytes)
        write(folder / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(dict(about.config))))
        for name in ("params", "environment", *(["tuning"] if about.tuning else [])):
            write(folder / f"{name}.json", json.dumps(getattr(about, name), indent=1))

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    @property
    def seconds(self) -> float:
        """Spent so far, by earlier processes too."""
        return self.before + time.time() - self.began

    def log(self, step: int, tokens: int, metrics: Mapping[str, float]) -> dict[str, Any] | None:
        """Append one event and return it, without numbers that are not finite; None where nothing is left."""
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        if not finite:
            return None
        event = {"step": step, "tokens": tokens, "time": round(time.time(), 3), "metrics": finite}
        with self.metrics.open("a") as file:
            file.write(json.dumps(event) + "\n")
        return event

    def position(self, step: int) -> Position:
        """Where the record is, for a checkpoint; what is written so far is on disk when this returns."""
        with self.metrics.open("a") as file:
            os.fsync(file.fileno())
            return Position(step, file.tell(), self.seconds)

    def finish(self, outcome: Outcome, reason: str | None = None, traceback: str | None = None,
               mlflow_run_id: str | None = None, behind: bool = False) -> Status:
        """Close the record."""
        self.status = replace(
            self.status, status=outcome, reason=reason, ended=_iso(time.time()), seconds=round(self.seconds, 3),
            owner=None, mlflow_run_id=mlflow_run_id, behind=behind)
        if traceback:
            write(self.folder / "log.txt", traceback)
        else:
            (self.folder / "log.txt").unlink(missing_ok=True)
        write_status(self.folder, self.status)
        return self.status

    def update(self, **changes: Any) -> None:
        """Replace some fields of the status."""
        self.status = replace(self.status, **changes)
        write_status(self.folder, self.status)


def joined(status: Status, sweep: str | None, trial: bool) -> Status:
    """A status with one more sweep. What is asked for as a result is one, though it was made as a trial."""
    names = [sweep] if sweep else []
    if trial:
        return replace(status, trials=list(dict.fromkeys([*status.trials, *names])))
    sweeps = list(dict.fromkeys([*status.sweeps, *names]))
    return replace(status, trial=False, sweep=status.sweep or sweep, sweeps=sweeps)


def read_status(folder: Path) -> Status | None:
    """The status of the run in a folder; None where there is no record.

    Raises:
        ValueError: there is one that cannot be read.
    """
    try:
        return Status(**json.loads((folder / "status.json").read_text()))
    except FileNotFoundError:
        # A process may die while it writes the first file, under a hidden name.
        if folder.is_dir() and any(not path.name.startswith(".") for path in folder.iterdir()):
            raise ValueError(f"{folder} holds files but no status.json: it is no record; move it away") from None
        return None
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{folder}/status.json cannot be read ({error}); repair it, or move the folder away") from None


def read_description(folder: Path) -> Description:
    """What the record in a folder is about.

    Raises:
        ValueError: a file of it cannot be read.
    """
    status = read_status(folder)
    try:
        params, environment = (json.loads((folder / f"{name}.json").read_text()) for name in ("params", "environment"))
        config = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
        tuning = json.loads((folder / "tuning.json").read_text()) if (folder / "tuning.json").exists() else None
    except Exception as error:
        raise ValueError(f"{folder} is no whole record: {error}") from None
    if status is None:
        raise ValueError(f"{folder} is no record: it has no status.json")
    return Description(str(params.get("stack")), params, config, environment, status.command, status.sweep, status.key,
                       status.trial, tuning)


def read_events(folder: Path) -> Iterator[dict[str, Any]]:
    """The events of metrics.jsonl in order; a line cut short by the end of a process is left out."""
    file = folder / "metrics.jsonl"
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            yield json.loads(line)
        except ValueError:
            continue


def write_status(folder: Path, status: Status) -> None:
    """Replace status.json."""
    write(folder / "status.json", json.dumps(asdict(status), indent=1))


def write(path: Path, text: str) -> None:
    """Replace a file in one step: a reader, or the next process, never sees half of it."""
    new = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        with new.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def discard(folder: Path) -> None:
    """Remove a record in one step: none is ever half there."""
    if folder.exists():
        bin_ = folder.parent / ".removed" / f"{folder.name}-{os.getpid()}-{time.time_ns()}"
        bin_.parent.mkdir(exist_ok=True)
        folder.rename(bin_)
        shutil.rmtree(bin_, ignore_errors=True)


@contextmanager
def lock(folder: Path) -> Iterator[bool]:
    """The right to work on the record in a folder; False where another process has it. It ends with its process."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    file = FileLock(folder.parent / f".{folder.name}.lock", timeout=0)
    try:
        file.acquire()
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        file.release()


def owner() -> str:
    """This process, as a status names it."""
    return f"process {os.getpid()} on {platform.node()}"


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).astimezone().isoformat(timespec="seconds")
