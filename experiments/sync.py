"""`python -m experiments.sync`: send to MLflow what it lacks of the local records.

    python -m experiments.sync                                  every record in runs/, to where it was logged
    python -m experiments.sync runs=FOLDER mlflow=URI           another folder, another database or server

For runs that were made while the database or server of MLflow was away, or on a machine without one. What MLflow has is
not sent again. A run whose process died without a word is closed as KILLED, here and there; one that is being run is
left alone.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from experiments import cli
from experiments.record import lock, read_status, write_status
from experiments.tracking import address, exists, refresh, upload

_DEAD = "its process ended without a word; the command that made it goes on from its newest checkpoint"


def sync(folder: Path, wanted: str | None, default: str) -> str:
    """Bring one record up to date in MLflow; returns what was done.

    Args:
        wanted: the database or server; None: the one that the run was logged to, or `default` where that is gone.
    Raises:
        ValueError: no whole record.
        Exception: whatever MLflow raises.
    """
    with lock(folder) as free:
        if not free:
            return "is being run: left alone"
        status = read_status(folder)
        known = status.mlflow_uri if status.mlflow_uri and exists(status.mlflow_uri) else default
        uri = wanted or known
        if status.status == "RUNNING":
            write_status(folder, replace(status, status="KILLED", reason=_DEAD, owner=None))
        points = upload(folder, uri)
        return f"{points:,} points sent to {uri}" if points else f"nothing was missing in {uri}"


def main() -> int:
    """The exit code: 0; 1 where a record could not be sent; 2 after a mistake in the options."""
    parser = argparse.ArgumentParser(
        "python -m experiments.sync", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("options", nargs="*", metavar="NAME=VALUE", help="runs and mlflow, as for experiments.train")
    sys.argv[1:] = parser.parse_args().options
    failed: list[Path] = []

    def work() -> None:
        for word in sys.argv[1:]:
            if word.partition("=")[0] not in ("runs", "mlflow"):
                raise cli.UsageError(f"{word!r} is no option here; allowed: runs=FOLDER, mlflow=URI")
        chosen = cli.composed("train", sys.argv[1:])
        wanted, default = address(chosen["runs"], chosen["mlflow"]), address(chosen["runs"], True)
        if wanted is None:
            raise cli.UsageError("mlflow=false names nothing to send to")
        wanted = None if chosen["mlflow"] is True else wanted
        # Those of experiments.bench lie deeper.
        found = (Path(chosen["runs"]).glob(f"{place}/status.json") for place in ("*", "bench/*/*"))
        folders = sorted(path.parent for paths in found for path in paths)
        if not folders:
            raise cli.UsageError(f"runs={chosen['runs']!r} has no records")
        sent: dict[str, set[str]] = defaultdict(set)
        for folder in folders:
            try:
                print(f"{folder}: {sync(folder, wanted, default)}", flush=True)
                status = read_status(folder)
                sent[status.mlflow_uri or default].update(status.sweeps)
            # One broken record, or one answer that a server does not give, leaves the others alone.
            except Exception as error:
                failed.append(folder)
                print(f"{folder}: FAILED: {type(error).__name__}: {error}", flush=True)
        for uri, sweeps in sent.items():
            refresh(uri, sorted(sweeps))

    return cli.run(work, "train") or int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
