"""What is kept of a run: the local record, and MLflow beside it. No other file touches MLflow.

The local record is the truth: a folder of plain files, always written.

    config.yaml       the semantic config
    environment.json  versions, commit, device, threads, precision
    params.json       what runs are told apart and grouped by
    metrics.jsonl     {"step", "tokens", "metrics"}, one line an event
    status.json       RUNNING, FINISHED, FAILED or DIVERGED, with reason and times
    log.txt           the traceback of a failure
    checkpoints/

MLflow gets the same: a run's params, its metrics over training tokens, its config and environment as artifacts, its
status. A problem with it is said once and never stops the training; what could not be sent is tried again at the end. A
number that is not finite reaches neither of them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import shutil
import sqlite3
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock
from omegaconf import OmegaConf

from experiments.metrics import legal

EXPERIMENT = "mixerlab"
# MLflow's limits (mlflow.utils.validation); the params and tags of one request, and the metrics.
MAX_KEY, MAX_PARAM, MAX_TAG, MAX_PARAMS, MAX_METRICS = 250, 6000, 8000, 100, 1000

Outcome = Literal["FINISHED", "FAILED", "DIVERGED"]


@dataclass(frozen=True)
class Status:
    """status.json. Times are ISO 8601 with their zone; the rest is None while the run is on.

    `sweep` is the one that made the run, `sweeps` all that it belongs to: a finished run is not made again for another.
    """

    status: Literal["RUNNING", "FINISHED", "FAILED", "DIVERGED"]
    started: str
    command: str
    sweep: str | None = None
    sweeps: list[str] = field(default_factory=list)
    reason: str | None = None
    ended: str | None = None
    seconds: float | None = None
    mlflow_run_id: str | None = None


@dataclass(frozen=True)
class Description:
    """What a run is, known before it starts."""

    label: str
    params: Mapping[str, Any]
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    command: str
    sweep: str | None = None


class Tracker:
    """Writes one run to its folder and, where `database` is given, to MLflow."""

    def __init__(self, folder: Path, description: Description, database: Path | None = None) -> None:
        """Starts the record, RUNNING from now on. What an earlier try left in the folder is removed.

        Raises:
            OSError: the folder cannot be written.
        """
        self.folder = folder
        self.started = time.time()
        previous = read_status(folder)
        shutil.rmtree(folder, ignore_errors=True)
        self.checkpoints.mkdir(parents=True)
        self._write(description)
        self.mlflow = Mirror(database, folder, description, previous and previous.mlflow_run_id) if database else None
        sweeps = [description.sweep] if description.sweep else []
        self.status = Status("RUNNING", _iso(self.started), description.command, description.sweep, sweeps,
                             mlflow_run_id=self.mlflow and self.mlflow.run_id)
        write_status(folder, self.status)

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def log(self, step: int, tokens: int, metrics: Mapping[str, float]) -> None:
        """One event, at `tokens` training tokens seen. Numbers that are not finite are left out."""
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        if not finite:
            return
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "tokens": tokens, "metrics": finite}) + "\n")
        if self.mlflow:
            self.mlflow.log(tokens, finite)

    def finish(self, outcome: Outcome, reason: str | None = None, traceback: str | None = None) -> Status:
        """Closes the record and the MLflow run."""
        if traceback:
            (self.folder / "log.txt").write_text(traceback)
        if self.mlflow:
            self.mlflow.finish(outcome, reason)
        ended = time.time()
        self.status = Status(**asdict(self.status) | {
            "status": outcome, "reason": reason, "ended": _iso(ended), "seconds": round(ended - self.started, 3),
            "mlflow_run_id": self.mlflow and self.mlflow.run_id})
        write_status(self.folder, self.status)
        return self.status

    def _write(self, description: Description) -> None:
        (self.folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(dict(description.config))))
        for name in ("params", "environment"):
            (self.folder / f"{name}.json").write_text(json.dumps(getattr(description, name), indent=1))


def join_sweep(folder: Path, sweep: str, database: Path | None) -> None:
    """Say that a finished run belongs to one more sweep, in its record and in the tag `sweeps` of its MLflow run."""
    status = read_status(folder)
    if status is None or sweep in status.sweeps:
        return
    status = replace(status, sweeps=[*status.sweeps, sweep])
    write_status(folder, status)
    if database and status.mlflow_run_id:
        try:
            connect(database)[0].set_tag(status.mlflow_run_id, "sweeps", cut(", ".join(status.sweeps), MAX_TAG))
        except Exception as error:
            _warn_once(error)


def read_status(folder: Path) -> Status | None:
    """The status of the run in a folder; None where there is none that can be read."""
    try:
        return Status(**json.loads((folder / "status.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None


def write_status(folder: Path, status: Status) -> None:
    """Replaces status.json in one step: a reader never sees half of it."""
    new = folder / f".status-{os.getpid()}.json"
    with new.open("w") as file:
        json.dump(asdict(status), file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    new.replace(folder / "status.json")


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).astimezone().isoformat(timespec="seconds")


class Mirror:
    """One MLflow run that is best effort: after the first failure it only collects, and `finish` tries once more."""

    def __init__(self, database: Path, folder: Path, description: Description, replaces: str | None) -> None:
        self.run_id: str | None = None
        self.broken = False
        self.queue: list[Callable[[], None]] = []
        self.database, self.folder, self.description = database, folder, description
        self._do(lambda: self._open(replaces))

    def log(self, tokens: int, metrics: Mapping[str, float]) -> None:
        """Metrics at `tokens`, the step of MLflow's curves."""
        now = int(time.time() * 1000)
        self._do(lambda: self._send_metrics(tokens, metrics, now))

    def finish(self, outcome: Outcome, reason: str | None) -> None:
        """The run's end; MLflow knows no DIVERGED, so that is FAILED with a tag."""
        self._do(lambda: self._close(outcome, reason))
        if self.broken:
            self.broken = False
            self._do(lambda: None)

    def _do(self, task: Callable[[], None]) -> None:
        """Runs what waits and then `task`, in order; on trouble says so once and keeps the rest for the end."""
        self.queue.append(task)
        if self.broken:
            return
        try:
            while self.queue:
                self.queue[0]()
                self.queue.pop(0)
        # Whatever a database, a server or a full disk can raise: the local record goes on without it.
        except Exception as error:
            self.broken = True
            _warn_once(error)

    def _open(self, replaces: str | None) -> None:
        self.client, experiment = connect(self.database)
        # The local record of an earlier try of the same run is gone, so its MLflow run goes to the bin with it.
        if replaces and self._exists(replaces):
            self.client.delete_run(replaces)
        # A second try, after trouble, goes on with the run that the first one made.
        self.run_id = self.run_id or self._create(experiment)
        self._send_params(self.description.params)
        for file in ("config.yaml", "environment.json"):
            self.client.log_artifact(self.run_id, str(self.folder / file))

    def _create(self, experiment: str) -> str:
        about = self.description
        tags = {"outcome": "RUNNING", "run_key": self.folder.name, "command": about.command,
                "sweep": about.sweep, "sweeps": about.sweep}
        tags = {name: cut(value, MAX_TAG) for name, value in tags.items() if value}
        name = f"{about.label} seed {about.params.get('seed')}"
        return self.client.create_run(experiment, run_name=name, tags=tags).info.run_id

    def _exists(self, run_id: str) -> bool:
        from mlflow.exceptions import MlflowException

        try:
            return self.client.get_run(run_id).info.lifecycle_stage == "active"
        except MlflowException:
            return False

    def _send_params(self, params: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        entities = [Param(safe(name), cut(str(value), MAX_PARAM)) for name, value in params.items()]
        for start in range(0, len(entities), MAX_PARAMS):
            self.client.log_batch(self.run_id, params=entities[start:start + MAX_PARAMS])

    def _send_metrics(self, tokens: int, metrics: Mapping[str, float], now: int) -> None:
        from mlflow.entities import Metric

        entities = [Metric(safe(name), value, now, tokens) for name, value in metrics.items()]
        for start in range(0, len(entities), MAX_METRICS):
            self.client.log_batch(self.run_id, metrics=entities[start:start + MAX_METRICS])

    def _close(self, outcome: Outcome, reason: str | None) -> None:
        self.client.set_tag(self.run_id, "outcome", outcome)
        if reason:
            self.client.set_tag(self.run_id, "reason", cut(reason, MAX_TAG))
        self.client.set_terminated(self.run_id, "FINISHED" if outcome == "FINISHED" else "FAILED")


def connect(database: Path) -> tuple[Any, str]:
    """A client of the sqlite file, made where missing, and the id of our experiment in it.

    Safe to call from many processes at once on an empty folder.
    """
    # MLflow's own usage statistics; it reads these when it is imported.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("DO_NOT_TRACK", "true")
    from mlflow.tracking import MlflowClient

    # Importing MLflow sets the levels of its loggers.
    for chatty in ("mlflow", "alembic"):
        logging.getLogger(chatty).setLevel(logging.ERROR)
    database.parent.mkdir(parents=True, exist_ok=True)
    # MLflow creates its tables and looks for its experiment without a lock, and of several processes some crash.
    with FileLock(database.with_suffix(".lock")):
        # First: a file that cannot be opened fails here at once, in MLflow after minutes.
        _write_ahead(database)
        client = MlflowClient(f"sqlite:///{database.absolute()}")
        found = client.get_experiment_by_name(EXPERIMENT)
        # The default location is relative to the folder in which the process happens to run.
        folder = (database.parent / "artifacts").absolute()
        experiment = found.experiment_id if found else client.create_experiment(EXPERIMENT, folder.as_uri())
    return client, experiment


def _write_ahead(database: Path) -> None:
    """Let processes write side by side, four times faster. The mode stays in the file.

    Raises:
        sqlite3.Error: the file cannot be opened, or is no database.
    """
    with closing(sqlite3.connect(database, timeout=60)) as connection:
        mode = connection.execute("PRAGMA journal_mode").fetchone()[0]
        if mode != "wal" and not _on_network(database):
            connection.execute("PRAGMA journal_mode=WAL")


def _on_network(path: Path) -> bool:
    """Is the file on a file system of several machines, where sqlite's shared memory does not work?"""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return False
    inside = [(mount, kind) for mount, kind in mounts if path.absolute().is_relative_to(mount)]
    kind = max(inside, key=lambda item: len(item[0]), default=("", ""))[1]
    return kind.startswith(("nfs", "lustre", "cifs", "smb", "beegfs", "gpfs", "ceph", "afs", "fuse.sshfs"))


def safe(name: str) -> str:
    """A name that MLflow takes. A changed one ends in a hash of the original, so that no two become the same."""
    if legal(name):
        return name
    clean = re.sub(r"[^A-Za-z0-9_\-. :]+", "_", name).lstrip(". ")
    return f"{clean[:MAX_KEY - 9]}-{_hash(name)}"


def cut(text: str, limit: int) -> str:
    """At most `limit` characters. A cut text ends in a hash of the whole, so that different ones stay different."""
    return text if len(text) <= limit else f"{text[:limit - 12]}... {_hash(text)}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


_warned = False


def _warn_once(error: Exception) -> None:
    """One line a process: in a grid, all runs have the same trouble."""
    global _warned
    if not _warned:
        first = (str(error).strip().splitlines() or [""])[0]
        reason = f"{type(error).__name__}: {first}"
        print(f"warning: MLflow fails, the local records go on without it: {reason}", file=sys.stderr, flush=True)
    _warned = True
