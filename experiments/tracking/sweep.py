"""What a sweep has in MLflow besides its runs: comparison views, their links, and one run that holds its report.

A run has the tag `sweep.NAME` of each sweep that it belongs to: MLflow's search knows no "or" and no lists.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from experiments import views
from experiments.tracking.server import connect, safe, warn_once

# An experiment's description, or a run's, in Markdown.
NOTE = "mlflow.note.content"
# The report, among the artifacts of its run.
PAGE = "report.html"
# How our lines in the description of the experiment start; the rest is people's. The menu of views has every view.
_LINE = "- Comparison "
MOST_LISTED = 20
_LOCAL = "http://127.0.0.1:5000"
# Of each (tracking URI, sweep), when this process wrote its views last and the CPU seconds that took.
_last: dict[tuple[str, str], tuple[float, float]] = {}
# Views that took fewer CPU seconds are written whenever a run ends.
_CHEAP = 0.3


def member(sweep: str) -> str:
    """The tag of the runs of a sweep."""
    return safe(f"sweep.{sweep}")


def search(sweep: str, task: str | None = None) -> str:
    """Finds what is compared of a sweep: a run that failed or was killed has no result to be averaged with others."""
    words = [f"tags.`{member(sweep)}` = 'yes'", "attributes.status != 'FAILED'", "attributes.status != 'KILLED'"]
    return " AND ".join([*words, *([f"params.task = '{task}'"] if task else [])])


def refresh(uri: str, sweeps: Iterable[str]) -> None:
    """Bring the views of sweeps up to what their runs have; trouble is said once and harms no run.

    Of a sweep of hundreds of runs this takes a second. A grid of short runs spends 5% on it at most: then a run that
    ends leaves it to a later one, and to the grid's end.
    """
    try:
        for sweep in sweeps:
            ended, cost = _last.get((uri, sweep), (0.0, 0.0))
            if cost < _CHEAP or time.monotonic() - ended > 20 * cost:
                begun = time.process_time()
                show(*connect(uri), sweep)
                _last[uri, sweep] = time.monotonic(), time.process_time() - begun
    except Exception as error:
        warn_once(error)


def show(client: Any, experiment: str, sweep: str) -> list[str]:
    """Write the views of a sweep, one a task, and their links to the top of the experiment's description.

    Returns:
        The ids of the views.
    Raises:
        Exception: whatever MLflow raises.
    """
    runs = _all(client, experiment, f"tags.`{member(sweep)}` = 'yes'")
    tasks = views.tasks(_seen(runs)) or [None]
    lines = {}
    for task in tasks:
        own = [run for run in runs if task is None or run.data.params.get("task") == task]
        good = [run for run in own if run.info.status not in ("FAILED", "KILLED")]
        state = views.state(_seen(good), search(sweep, task if len(tasks) > 1 else None))
        if state:
            view, name = views.identity(sweep, task), sweep if len(tasks) == 1 else f"{sweep}: {task}"
            _write(client, experiment, view, name, state)
            lines[view] = f"{_LINE}[{_plain(name)}]({views.link('', experiment, view)[1:]}): {_counts(own, good)}"
    if lines:
        report = _report(client, experiment, sweep)
        more = f"; [report]({views.artifact('', experiment, report, PAGE)[1:]})" if report else ""
        _list(client, experiment, {view: line + more for view, line in lines.items()})
    return list(lines)


def links(uri: str, sweep: str | None = None) -> list[str]:
    """The links to the comparisons of a sweep, one a task; without views, or a sweep, to the charts of all its runs.

    There are none where MLflow does not answer: that is said once.
    """
    try:
        client, experiment = connect(uri)
        found = show(client, experiment, sweep) if sweep else []
    except Exception as error:
        warn_once(error)
        return []
    if found:
        return [views.link(base(uri), experiment, view) for view in found]
    return [views.link(base(uri), experiment, search=search(sweep) if sweep else None)]


def newest(uri: str) -> list[tuple[str, str]]:
    """(name, link) of every ready view, the one that changed last first; at least the charts of all runs.

    Raises:
        Exception: whatever MLflow raises.
    """
    client, experiment = connect(uri)
    tags = client.get_experiment(experiment).tags
    found = [(_entry(text), name.removeprefix(views.TAG)) for name, text in tags.items() if name.startswith(views.TAG)]
    found.sort(key=lambda item: item[0].get("updatedAt", 0), reverse=True)
    # A view that somebody shared from the interface may have no name.
    listed = [(view["name"], views.link(base(uri), experiment, key)) for view, key in found if "name" in view]
    return [*listed, ("all runs", views.link(base(uri), experiment))]


def base(uri: str) -> str:
    """The address of the interface, without a password: of a tracking server, or of what `make ui` starts."""
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https"):
        return _LOCAL
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/")


def publish(uri: str, sweep: str, folder: Path) -> str:
    """Make what is in a folder (PAGE and pictures) the artifacts of the sweep's one run for its report.

    Returns:
        The link to the report.
    Raises:
        Exception: whatever MLflow raises.
    """
    client, experiment = connect(uri)
    run_id = _report(client, experiment, sweep) or _new_report(client, experiment, sweep)
    _clear(client.get_run(run_id).info.artifact_uri, uri)
    client.log_artifacts(run_id, str(folder))
    client.set_terminated(run_id)
    refresh(uri, [sweep])
    return views.artifact(base(uri), experiment, run_id, PAGE)


def _new_report(client: Any, experiment: str, sweep: str) -> str:
    tags = {"mixerlab.kind": "report", safe(f"report.{sweep}"): "yes",
            NOTE: f"The report of the sweep {sweep}, under Artifacts: `{PAGE}` and its pictures."}
    return client.create_run(experiment, run_name=f"report of {sweep}", tags=tags).info.run_id


def _report(client: Any, experiment: str, sweep: str) -> str | None:
    """The run that holds the report of a sweep."""
    found = client.search_runs([experiment], f"tags.`{safe(f'report.{sweep}')}` = 'yes'", max_results=1)
    return found[0].info.run_id if found else None


def _clear(artifacts: str, uri: str) -> None:
    """Remove an older report: pictures of another one beside it would mislead."""
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    store = get_artifact_repository(artifacts, tracking_uri=uri)
    for file in store.list_artifacts():
        store.delete_artifacts(file.path)


def _all(client: Any, experiment: str, search: str) -> list[Any]:
    runs, token = [], None
    while token is None or token:
        page = client.search_runs([experiment], search, page_token=token)
        runs, token = [*runs, *page], page.token or ""
    return runs


def _seen(runs: Sequence[Any]) -> list[views.Run]:
    return [views.Run(run.data.params, run.data.metrics) for run in runs]


def _write(client: Any, experiment: str, view: str, name: str, state: dict[str, Any]) -> None:
    now = int(1000 * time.time())
    created = _entry(client.get_experiment(experiment).tags.get(views.TAG + view, "")).get("createdAt", now)
    client.set_experiment_tag(experiment, views.TAG + view, views.entry(name, state, created, now))


def _entry(text: str) -> dict[str, Any]:
    """What a view's tag says about it; nothing where the interface wrote another format."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _list(client: Any, experiment: str, lines: dict[str, str]) -> None:
    """Put lines first in the experiment's description, in place of what it said of the same views.

    Folded, MLflow shows the first line alone.
    """
    note = client.get_experiment(experiment).tags.get(NOTE, "").splitlines()
    older = [line for line in note if line.startswith(_LINE) and not any(view in line for view in lines)]
    people = "\n".join(line for line in note if not line.startswith(_LINE)).strip("\n")
    ours = "\n".join([*lines.values(), *older][:MOST_LISTED])
    client.set_experiment_tag(experiment, NOTE, f"{ours}\n\n{people}".strip())


def _counts(runs: Sequence[Any], good: Sequence[Any]) -> str:
    """ "18 runs of 6 stacks, 1 failed or killed" """
    stacks = len({run.data.params.get("stack") for run in runs})
    lost = f", {len(runs) - len(good)} failed or killed" if len(good) < len(runs) else ""
    return f"{len(runs)} run{'s' * (len(runs) > 1)} of {stacks} stack{'s' * (stacks > 1)}{lost}"


def _plain(text: str) -> str:
    """A text that Markdown takes as it is within a link."""
    return "".join(f"\\{letter}" if letter in r"\`*_[]<>" else letter for letter in text)
