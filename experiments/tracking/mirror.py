"""The MLflow run of a record.

MLflow gets what the record has: a run's params, its metrics over training tokens, its config and environment as
artifacts, its status. A problem with it is said once and never stops the training; at the end, and whenever `python -m
experiments.sync` is called, what is missing is sent. What is there already is not sent again, so that no step is in a
curve twice. A number that is not finite reaches neither of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.record import (
    Description,
    Outcome,
    Position,
    Record,
    Status,
    joined,
    read_description,
    read_events,
    read_status,
    write_status,
)
from experiments.tracking import sweep
from experiments.tracking.server import MAX_KEY, connect, cut, safe, warn_once

# MLflow's limits (mlflow.utils.validation); the params and tags of one request, and the metrics.
MAX_PARAM, MAX_TAG, MAX_PARAMS, MAX_METRICS = 6000, 8000, 100, 1000


class Tracker:
    """Writes one run to its record and, where `uri` is given, to MLflow.

    Args:
        uri: of MLflow's database or server.
        resume: where the record goes on; None starts a new one.
    Raises:
        OSError: the folder cannot be written.
    """

    def __init__(
        self, folder: Path, description: Description, uri: str | None = None, resume: Position | None = None
    ) -> None:
        previous = read_status(folder)
        self.record = Record(folder, description, resume)
        self.mlflow = Mirror(uri, folder, description) if uri else None
        if self.mlflow:
            self.mlflow.start(previous and previous.mlflow_run_id, go_on=resume is not None)
            self.record.update(mlflow_run_id=self.mlflow.run_id, mlflow_uri=uri)

    @property
    def folder(self) -> Path:
        return self.record.folder

    def log(self, step: int, tokens: int, metrics: Mapping[str, float]) -> None:
        """One event, at `tokens` training tokens seen. Numbers that are not finite are left out."""
        event = self.record.log(step, tokens, metrics)
        if event and self.mlflow:
            self.mlflow.log(event)

    def finish(self, outcome: Outcome, reason: str | None = None, traceback: str | None = None) -> Status:
        """Close the record and the MLflow run.

        Raises:
            OSError: the record cannot be written; it then says that the run is interrupted.
        """
        if self.mlflow:
            self.mlflow.finish(outcome, reason)
        run_id = self.mlflow.run_id if self.mlflow else self.record.status.mlflow_run_id
        behind = self.mlflow.broken if self.mlflow else run_id is not None
        return self.record.finish(outcome, reason, traceback, run_id, behind)


class Mirror:
    """The MLflow run of one record, best effort: after a failure it is left alone until `finish`, which tries again.

    Attributes:
        run_id: of the MLflow run, once there is one.
    """

    def __init__(self, uri: str, folder: Path, about: Description, run_id: str | None = None) -> None:
        self.uri, self.folder, self.about, self.run_id = uri, folder, about, run_id
        status = read_status(folder)
        self.continued = bool(status and status.earlier_keys)
        self.broken = False
        # Values of each (metric, tokens).
        self.sent: dict[tuple[str, int], set[float]] = defaultdict(set)

    def start(self, known: str | None, go_on: bool) -> None:
        """Open the run: the one that the record had so far where it goes on; else a new one in place of that."""
        try:
            self._connect()
            earlier = self._earlier(known)
            if go_on and earlier:
                self.run_id = earlier[0]
            for stale in earlier[1:] if go_on else earlier:
                self.client.delete_run(stale)
            self._describe()
            self._remember()
            self._reopen()
            if go_on:
                # Earlier processes may have had another server, or none.
                self._send(read_events(self.folder))
        # Whatever a database, a server or a full disk can raise: the local record goes on without it.
        except Exception as error:
            self._give_up(error)

    def log(self, event: Mapping[str, Any]) -> None:
        """Send one event of the record."""
        if not self.broken:
            try:
                self._send([event])
            except Exception as error:
                self._give_up(error)

    def finish(self, outcome: Outcome, reason: str | None) -> None:
        """The run's end, after all that MLflow missed."""
        try:
            if self.broken:
                self.upload()
                self.broken = False
            self.close(outcome, reason)
        except Exception as error:
            self._give_up(error)
        else:
            sweep.refresh(self.uri, read_status(self.folder).sweeps)

    def upload(self) -> int:
        """Send all that MLflow lacks of the record, and return how many points that were.

        Raises:
            Exception: whatever MLflow raises.
        """
        self._connect()
        self.run_id = next(iter(self._earlier(self.run_id)), None)
        self._describe()
        self._remember()
        return self._send(read_events(self.folder))

    def _give_up(self, error: Exception) -> None:
        self.broken = True
        warn_once(error)

    def _connect(self) -> None:
        self.client, self.experiment = connect(self.uri)

    def _earlier(self, known: str | None) -> list[str]:
        """The runs of this record, `known` first. A process may die before it could write down which one it made."""
        key = self.about.key or self.folder.name
        found = self.client.search_runs([self.experiment], f"tags.run_key = '{key}'")
        ids = [run.info.run_id for run in found]
        return [known, *(i for i in ids if i != known)] if known and self._exists(known) else ids

    def _exists(self, run_id: str) -> bool:
        from mlflow.exceptions import MlflowException

        try:
            return self.client.get_run(run_id).info.lifecycle_stage == "active"
        except MlflowException:
            return False

    def _describe(self) -> None:
        """Make the run where there is none; params, tags and artifacts."""
        about, status = self.about, read_status(self.folder)
        tags = {"run_key": about.key or self.folder.name, "command": about.command,
                "sweep": status.sweep, "sweeps": ", ".join(status.sweeps),
                # A trial of tuning is in no sweep's comparison.
                "trial_of": (", ".join(status.trials) or "no sweep") if status.trial else None,
                "tuning": about.tuning and about.tuning["text"]}
        tags = {name: cut(value, MAX_TAG) for name, value in tags.items() if value}
        tags |= {sweep.member(name): "yes" for name in status.sweeps}
        if self.run_id is None:
            self.run_id = self.client.create_run(self.experiment, run_name=about.name, tags=tags).info.run_id
        self._send_params(self.client.get_run(self.run_id).data.params, tags)
        for file in ("config.yaml", "environment.json", *(["tuning.json"] if about.tuning else [])):
            self.client.log_artifact(self.run_id, str(self.folder / file))

    def _send_params(self, there: Mapping[str, str], tags: Mapping[str, str]) -> None:
        """What is not there yet. MLflow lets no param change, so of a changed one a tag `changed.NAME` tells."""
        from mlflow.entities import Param, RunTag

        wanted = {safe(name): cut(str(value), MAX_PARAM) for name, value in self.about.params.items()}
        changed = {f"changed.{name}"[:MAX_KEY]: cut(value, MAX_TAG) for name, value in wanted.items()
                   if there.get(name, value) != value}
        params = [Param(name, value) for name, value in wanted.items() if name not in there]
        entries = [RunTag(name, value) for name, value in (tags | changed).items()]
        for start in range(0, max(len(params), len(entries)), MAX_PARAMS):
            part = slice(start, start + MAX_PARAMS)
            self.client.log_batch(self.run_id, params=params[part], tags=entries[part])

    def _remember(self) -> None:
        """The points that are in MLflow already."""
        for name in self.client.get_run(self.run_id).data.metrics:
            for point in self.client.get_metric_history(self.run_id, name):
                self.sent[name, point.step].add(point.value)

    def _send(self, events: Iterable[Mapping[str, Any]]) -> int:
        """Metrics at their tokens, the step of MLflow's curves."""
        from mlflow.entities import Metric

        points = {(safe(name), event["tokens"], value): int(1000 * event["time"])
                  for event in events for name, value in event["metrics"].items()}
        new = [(point, milliseconds) for point, milliseconds in points.items() if self._is_new(*point)]
        entities = [Metric(name, value, milliseconds, tokens) for (name, tokens, value), milliseconds in new]
        for start in range(0, len(entities), MAX_METRICS):
            self.client.log_batch(self.run_id, metrics=entities[start:start + MAX_METRICS])
        for (name, tokens, value), _ in new:
            self.sent[name, tokens].add(value)
        return len(new)

    def _is_new(self, name: str, tokens: int, value: float) -> bool:
        """No step is in a curve twice, though a clock read again says another time; only other options say it anew."""
        known = self.sent.get((name, tokens))
        return not known or (self.continued and value not in known)

    def _reopen(self) -> None:
        """The run is on, whatever became of it before."""
        self.client.update_run(self.run_id, status="RUNNING")
        self.client.set_tag(self.run_id, "outcome", "RUNNING")
        if "reason" in self.client.get_run(self.run_id).data.tags:
            self.client.delete_tag(self.run_id, "reason")

    def close(self, outcome: Outcome, reason: str | None) -> None:
        """Say how the run ended. MLflow knows no DIVERGED: that is FAILED, with a tag."""
        self.client.set_tag(self.run_id, "outcome", outcome)
        if reason:
            self.client.set_tag(self.run_id, "reason", cut(reason, MAX_TAG))
        self.client.set_terminated(self.run_id, "FAILED" if outcome == "DIVERGED" else outcome)

def upload(folder: Path, uri: str) -> int:
    """Bring the MLflow run of a record that nobody works on up to date; returns how many points it lacked.

    Raises:
        ValueError: no whole record.
        Exception: whatever MLflow raises.
    """
    status, about = read_status(folder), read_description(folder)
    mirror = Mirror(uri, folder, about, status.mlflow_run_id)
    points = mirror.upload()
    mirror.close(status.status, status.reason)
    write_status(folder, replace(status, mlflow_run_id=mirror.run_id, mlflow_uri=uri, behind=False))
    return points


def catch_up(folder: Path, uri: str) -> None:
    """Send what MLflow lacks of a run that ended while it was away; trouble is said once."""
    try:
        upload(folder, uri)
    except Exception as error:
        warn_once(error)


def join_sweep(folder: Path, name: str | None, uri: str | None, trial: bool = False) -> None:
    """Say that a finished run belongs to one more sweep, as a result or a trial, in its record and its MLflow run."""
    before = read_status(folder)
    status = before and joined(before, name, trial)
    if status == before:
        return
    write_status(folder, status)
    if uri and status.mlflow_run_id:
        try:
            _retag(connect(uri)[0], before, status)
        except Exception as error:
            warn_once(error)


def _retag(client: Any, before: Status, now: Status) -> None:
    """The tags of a run that has joined a sweep."""
    trial_of = ", ".join(now.trials) if now.trial else None
    tags = {"sweep": now.sweep, "sweeps": ", ".join(now.sweeps), "trial_of": trial_of}
    for name, value in tags.items():
        if value:
            client.set_tag(now.mlflow_run_id, name, cut(value, MAX_TAG))
    for name in now.sweeps:
        client.set_tag(now.mlflow_run_id, sweep.member(name), "yes")
    if before.trial and not now.trial:
        client.delete_tag(now.mlflow_run_id, "trial_of")
