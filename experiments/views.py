"""The comparison of a sweep as MLflow's user interface keeps it: which runs, how they are grouped, charts and columns.

The format is internal to MLflow (3.17): this file alone knows it. An interface that does not take it shows charts of
its own under the same link. Its charts have neither titles nor logarithmic axes, so the sections say what is in them.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from experiments.metrics import metric

# A view is a tag of its experiment, and MLflow takes no longer text there (mlflow.utils.validation).
TAG = "mlflow.sharedViewState."
MAX_STATE = 20_000
# More are columns of the table, without a chart each.
MOST_SUITES = 6
# Options that differ within a stack, beyond which the names of groups are not readable.
MOST_GROUPS = 3
# Without it, MLflow opens its pages about language-model applications.
_TRAINING = {"workflowType": "machine_learning"}
_FLOPS = "complexity/flops_per_token_train"
_SPEED = ("measured/train_tokens_per_second", "measured/peak_memory_bytes")


@dataclass(frozen=True)
class Run:
    """What a view is made of: a run's params, and the names of its metrics."""

    params: Mapping[str, str]
    metrics: Collection[str]


@dataclass(frozen=True)
class Section:
    """A titled row of charts."""

    title: str
    charts: list[dict[str, Any]]


def tasks(runs: Iterable[Run]) -> list[str]:
    """The tasks of a sweep: each has a view of its own, for the qualities of two tasks do not compare."""
    return sorted({run.params["task"] for run in runs if "task" in run.params})


def state(runs: Sequence[Run], search: str) -> dict[str, Any] | None:
    """A view of the runs of one task, seeds averaged; None where no run says yet how good it is.

    Args:
        search: MLflow's search that finds these runs.
    """
    metrics = {name for run in runs for name in run.metrics}
    quality = next((name for name in ("val/accuracy", "val/loss") if name in metrics), None)
    if quality is None:
        return None
    sections, groups = _sections(runs, metrics, quality), _groups(runs)
    columns = [f"metrics.`{name}`" for name in _columns(sections, metrics, quality)]
    return {
        "searchFilter": search,
        "orderByKey": f"metrics.`{quality}`",
        "orderByAsc": metric(quality).better == "lower",
        "selectedColumns": columns,
        "columnOrder": columns,
        # Otherwise ten groups alone are drawn.
        "runsHiddenMode": "SHOW_ALL",
        "useGroupedValuesInCharts": True,
        "groupBy": {"aggregateFunction": "average",
                    "groupByKeys": [{"mode": "param", "groupByData": name} for name in groups]},
        "groupsExpanded": dict.fromkeys((_group(run, groups) for run in runs), False),
        "isAccordionReordered": True,
        "globalLineChartConfig": {"xAxisKey": "step", "lineSmoothness": 0, "selectedXAxisMetricKey": ""},
        "compareRunSections": [{"uuid": f"s{i}", "name": section.title, "display": True, "isReordered": True,
                                "columns": 2, "cardHeight": 360} for i, section in enumerate(sections)],
        "compareRunCharts": _charts(sections, metrics),
    }


def entry(name: str, state: Mapping[str, Any], created: int, now: int) -> str:
    """The text of a view's tag; where it would be too long, of a smaller view.

    Args:
        created, now: milliseconds since 1970.
    """
    for smaller in _smaller(state):
        packed = base64.b64encode(zlib.compress(json.dumps(smaller, separators=(",", ":")).encode(), 9)).decode()
        text = json.dumps({"name": name, "createdAt": created, "updatedAt": now, "state": f"deflate;{packed}"})
        if len(text) <= MAX_STATE:
            break
    return text


def identity(sweep: str, task: str | None) -> str:
    """The id of a view, fit for a tag and for a link; different sweeps have different ones."""
    brief = re.sub("[^A-Za-z0-9]+", "-", f"{sweep} {task or ''}").strip("-")[:40]
    return f"{brief}-{hashlib.sha256(json.dumps([sweep, task]).encode()).hexdigest()[:8]}"


def link(base: str, experiment: str, view: str | None = None, search: str | None = None) -> str:
    """The charts of an experiment in the interface at `base`: of a view, or of the runs that a search finds.

    A search in the link makes the interface pass over the view, which has its own.
    """
    given = {"viewStateShareKey": view, "searchFilter": search}
    query = {name: value for name, value in given.items() if value is not None} | {"compareRunsMode": "CHART"}
    return f"{base}/#/experiments/{experiment}/runs?{urlencode(query | _TRAINING)}"


def artifact(base: str, experiment: str, run: str, name: str) -> str:
    """An artifact of a run, shown in the interface at `base`."""
    return f"{base}/#/experiments/{experiment}/runs/{run}/artifacts/{name}?{urlencode(_TRAINING)}"


def _sections(runs: Sequence[Run], metrics: Collection[str], quality: str) -> list[Section]:
    title = metric(quality).title
    costs = [name for name in (_FLOPS, _state_bytes(runs, metrics)) if name in metrics]
    curves = [name for name in dict.fromkeys((quality, "val/loss", "train/loss")) if name in metrics]
    suites = _suites(metrics, quality)[:MOST_SUITES]
    speed = [name for name in _SPEED if name in metrics]
    found = [
        Section(f"{title.capitalize()} against cost", [_scatter(cost, quality) for cost in costs]),
        Section("Learning: a step is a token", [_line(name) for name in curves]),
        Section("Test sets, after training", [_bar(name) for name in suites]),
        Section("Measured while training", [_bar(name) for name in speed]),
    ]
    return [section for section in found if section.charts]


def _columns(sections: Sequence[Section], metrics: Collection[str], quality: str) -> list[str]:
    """What the table shows: quality first, then what is drawn, then size."""
    drawn = [key for section in sections for chart in section.charts for key in _keys(chart)]
    size = ["complexity/parameters"] if "complexity/parameters" in metrics else []
    wanted = dict.fromkeys([quality, *_suites(metrics, quality), *drawn, *size])
    return [name for name in wanted if name != "train/loss"]


def _suites(metrics: Collection[str], quality: str) -> list[str]:
    """The test sets' metric of this quality, kv4 before kv16."""
    kind = quality.partition("/")[2]
    found = [name for name in metrics if re.fullmatch(f"eval/[^/]+/{kind}", name)]
    return sorted(found, key=lambda name: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)])


def _state_bytes(runs: Sequence[Run], metrics: Collection[str]) -> str:
    """State bytes behind a row of the task, as in the report; else behind the longest that was counted."""
    start = "complexity/state_bytes_at_"
    counted = {int(name.removeprefix(start)) for name in metrics if re.fullmatch(rf"{start}\d+", name)}
    lengths = {run.params.get("task.length") for run in runs}
    return f"{start}{max((n for n in counted if str(n) in lengths), default=max(counted, default=0))}"


def _groups(runs: Sequence[Run]) -> list[str]:
    """The params that make a group: the stack, and what else than the seed varies within a stack.

    A param that tells runs apart like another one does is left out: the important ones have two names.
    """
    columns: dict[str, tuple[str | None, ...]] = {}
    names = {name for run in runs for name in run.params} - {"stack", "seed"}
    for name in sorted(names, key=lambda name: (name.count("."), name)):
        values = tuple(run.params.get(name) for run in runs)
        pairs = {(run.params.get("stack"), value) for run, value in zip(runs, values, strict=True)}
        if len(pairs) > len({stack for stack, _ in pairs}) and values not in columns.values():
            columns[name] = values
    return ["stack", *list(columns)[:MOST_GROUPS]]


def _group(run: Run, groups: Sequence[str]) -> str:
    return ",".join(f"param.{name}.{run.params.get(name) or 'null'}" for name in groups)


def _scatter(x: str, y: str) -> dict[str, Any]:
    return {"type": "SCATTER", "xaxis": {"key": x, "type": "METRIC"}, "yaxis": {"key": y, "type": "METRIC"}}


def _line(key: str) -> dict[str, Any]:
    return {"type": "LINE", "metricKey": key, "lineSmoothness": 0, "xAxisKey": "step", "useGlobalXaxisKey": False,
            "xAxisScaleType": "linear", "scaleType": "linear"}


def _bar(key: str) -> dict[str, Any]:
    return {"type": "BAR", "metricKey": key}


def _keys(chart: Mapping[str, Any]) -> list[str]:
    return [chart["metricKey"]] if "metricKey" in chart else [chart["yaxis"]["key"], chart["xaxis"]["key"]]


def _charts(sections: Sequence[Section], metrics: Collection[str]) -> list[dict[str, Any]]:
    """The charts of all sections, and a deleted one for every other metric: else it gets a chart by itself."""
    found = [chart | {"metricSectionId": f"s{i}"} for i, section in enumerate(sections) for chart in section.charts]
    own = {chart["metricKey"] for chart in found if "metricKey" in chart}
    hidden = {"metricSectionId": "s0", "deleted": True, "isGenerated": True}
    found += [_bar(name) | hidden for name in sorted(set(metrics) - own)]
    return [{"uuid": f"c{i}"} | chart for i, chart in enumerate(found)]


def _smaller(state: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The view; without what only tidies it up; with ever fewer charts and columns."""
    yield dict(state)
    charts = [chart for chart in state["compareRunCharts"] if not chart.get("deleted")]
    tidy = {"compareRunCharts": charts, "groupsExpanded": {}}
    yield {**state, **tidy}
    for most in range(len(charts), 0, -1):
        columns = state["selectedColumns"][:most]
        yield {**state, **tidy, "compareRunCharts": charts[:most], "selectedColumns": columns, "columnOrder": columns}
