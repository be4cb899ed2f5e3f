"""Where MLflow is: the option that says it, a connection, names and texts as MLflow takes them, trouble said once."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from filelock import FileLock

from experiments.metrics import legal

EXPERIMENT = "mixerlab"
# MLflow's limit (mlflow.utils.validation).
MAX_KEY = 250
_SQLITE = "sqlite:///"
# A server that is away answers no sooner for being asked seven times, as is MLflow's habit.
_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
             "MLFLOW_HTTP_REQUEST_TIMEOUT": "30"}


def address(runs: str, wanted: bool | str) -> str | None:
    """The URI that the option `mlflow` stands for: true is a database in the runs folder, false is none.

    Raises:
        ValueError: a text that is no URI.
    """
    if isinstance(wanted, str):
        if "://" not in wanted:
            raise ValueError(f"mlflow={wanted!r} must be true, false or a URI such as http://127.0.0.1:5000")
        return wanted
    return f"sqlite:///{(Path(runs) / 'mlflow.db').absolute()}" if wanted else None


def exists(uri: str) -> bool:
    """May there be something at a URI? Of a sqlite file that is known."""
    return not uri.startswith(_SQLITE) or Path(uri.removeprefix(_SQLITE)).exists()


def connect(uri: str) -> tuple[Any, str]:
    """A client of a database or server, and the id of our experiment in it; a sqlite file is made where missing.

    Safe to call from many processes at once on an empty folder.
    """
    # MLflow's own usage statistics; it reads these when it is imported.
    for name, value in ({"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"} | _PATIENCE).items():
        os.environ.setdefault(name, value)
    from mlflow.tracking import MlflowClient

    # Importing MLflow sets the levels of its loggers. What they say of a failure is in its exception too.
    for chatty in ("mlflow", "alembic", "sqlalchemy.pool"):
        logging.getLogger(chatty).setLevel(logging.CRITICAL)
    if not uri.startswith(_SQLITE):
        client = MlflowClient(uri)
        return client, _experiment(client, None)
    database = Path(uri.removeprefix(_SQLITE)).absolute()
    database.parent.mkdir(parents=True, exist_ok=True)
    # MLflow creates its tables and looks for its experiment without a lock, and of several processes some crash.
    with FileLock(database.with_suffix(".lock")):
        if not database.exists():
            _create(database)
        # First: a file that cannot be opened fails here at once, in MLflow after minutes.
        _write_ahead(database)
        client = MlflowClient(f"sqlite:///{database}")
        # The default location is relative to the folder in which the process happens to run.
        return client, _experiment(client, (database.parent / "artifacts").as_uri())


def _create(database: Path) -> None:
    """A new database, in one step: MLflow cannot go on with one whose making was interrupted."""
    from mlflow.tracking import MlflowClient

    new = database.with_name(f".{database.name}-new")
    for part in ("", "-journal"):
        Path(f"{new}{part}").unlink(missing_ok=True)
    MlflowClient(f"sqlite:///{new}").get_experiment_by_name(EXPERIMENT)
    new.rename(database)


def _experiment(client: Any, artifacts: str | None) -> str:
    """The id of our experiment, made where missing; several processes may ask for it at once.

    Raises:
        ValueError: it is among those that were deleted.
    """
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(EXPERIMENT)
    if found is None:
        try:
            return client.create_experiment(EXPERIMENT, artifacts)
        except MlflowException:
            found = client.get_experiment_by_name(EXPERIMENT)
            if found is None:
                raise
    if found.lifecycle_stage == "deleted":
        raise ValueError(
            f"the experiment {EXPERIMENT} was deleted there, and takes no runs before it is restored: "
            f"mlflow experiments restore --experiment-id {found.experiment_id}"
        )
    return found.experiment_id


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


def warn_once(error: Exception) -> None:
    """One line a process: in a grid, all runs have the same trouble."""
    global _warned
    if not _warned:
        first = (str(error).strip().splitlines() or [""])[0]
        reason = f"{type(error).__name__}: {first}"
        print(f"warning: MLflow fails, the local records go on without it: {reason}; python -m "
              "experiments.sync sends what is missing later", file=sys.stderr, flush=True)
    _warned = True
