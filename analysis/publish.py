"""The report of a sweep in MLflow: the page and its pictures, in one run, where the next report replaces them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import plotly.graph_objects as go

from analysis.pictures import figures
from analysis.runs import Records
from experiments.record import read_status
from experiments.tracking import address, exists, publish

# Pixels of a picture's width, each drawn twice as fine: sharp on paper.
WIDTH, SCALE = 900, 2


def report(records: Records, runs: Path, sweep: str, page: Path) -> list[str]:
    """Put the page of a sweep's records into MLflow, where its runs are there too.

    Returns:
        What to tell: where it is, and what went wrong. A report that MLflow does not get is no failure.
    """
    uri = place(records, runs)
    if uri is None:
        return []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copyfile(page, folder / "report.html")
        trouble = draw(figures(records), folder / "pictures")
        try:
            return [*trouble, f"report in MLflow: {publish(uri, sweep, folder)}"]
        # Whatever a database or a server can raise: the page is there.
        except Exception as error:
            return [*trouble, f"warning: the report is not in MLflow: {_brief(error)}"]


def place(records: Records, runs: Path) -> str | None:
    """The database or server that has the newest of these runs; None where it is gone or there never was one."""
    uris = []
    for folder in records.runs.sort_values("started")["folder"]:
        try:
            status = read_status(Path(folder))
        except ValueError:
            continue
        if status and status.mlflow_run_id and status.mlflow_uri:
            uris.append(status.mlflow_uri)
    # The folder may have been moved, its database with it.
    known = [*uris[-1:], *([address(str(runs), True)] if uris else [])]
    return next((uri for uri in known if exists(uri)), None)


def draw(pictures: Mapping[str, go.Figure], folder: Path) -> list[str]:
    """Write NAME.png of every picture, where a Chrome or Chromium is installed; else a line that says why not."""
    folder.mkdir()
    if not pictures:
        return []
    try:
        import kaleido

        options = {"format": "png", "width": WIDTH, "scale": SCALE}
        # One browser for all of them: starting it takes most of the time.
        kaleido.write_fig_from_object_sync([
            {"fig": go.Figure(figure).update_layout(paper_bgcolor="white"), "path": folder / f"{name}.png",
             "opts": options | {"height": figure.layout.height}}
            for name, figure in pictures.items()
        ])  # fmt: skip
    # Kaleido not installed, no browser, a browser that does not start.
    except Exception as error:
        return [f"no PNGs beside the report, which need Chrome or Chromium: {_brief(error)}"]
    return []


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
