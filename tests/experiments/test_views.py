"""The comparison view as data: what is grouped, drawn, hidden, and that it fits where it is kept."""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from urllib.parse import parse_qs, urlsplit

import pytest

from experiments import views
from experiments.metrics import legal
from experiments.views import Run

METRICS = (
    "train/loss", "val/loss", "val/accuracy", "eval/kv4/accuracy", "eval/kv16/accuracy", "eval/kv4/loss",
    "complexity/parameters", "complexity/flops_per_token_train", "complexity/flops_per_token_forward",
    "complexity/state_bytes_at_64", "complexity/state_bytes_at_1024", "measured/train_tokens_per_second",
)  # fmt: skip


def run(stack, seed=0, metrics=METRICS, **params):
    return Run({"stack": stack, "seed": str(seed), "task": "mqar", "task.length": "64"} | params, metrics)


def grid(**params):
    return [run(stack, seed, **params) for stack in ("mha", "linear") for seed in (0, 1)]


def drawn(state):
    return [chart for chart in state["compareRunCharts"] if not chart.get("deleted")]


def grouped(state):
    return [key["groupByData"] for key in state["groupBy"]["groupByKeys"]]


def test_stacks_are_compared_and_seeds_averaged():
    state = views.state(grid(), "the search")
    assert state["searchFilter"] == "the search"
    assert (state["groupBy"]["aggregateFunction"], grouped(state)) == ("average", ["stack"])
    assert state["groupsExpanded"] == {"param.stack.mha": False, "param.stack.linear": False}
    scatter = [(c["xaxis"]["key"], c["yaxis"]["key"]) for c in drawn(state) if c["type"] == "SCATTER"]
    # The state behind a row of the task, not the one that happens to be longest.
    costs = ["complexity/flops_per_token_train", "complexity/state_bytes_at_64"]
    assert scatter == [(cost, "val/accuracy") for cost in costs]
    lines = [c["metricKey"] for c in drawn(state) if c["type"] == "LINE"]
    assert lines == ["val/accuracy", "val/loss", "train/loss"]
    bars = [c["metricKey"] for c in drawn(state) if c["type"] == "BAR"]
    assert bars == ["eval/kv4/accuracy", "eval/kv16/accuracy", "measured/train_tokens_per_second"]
    assert {c["metricSectionId"] for c in drawn(state)} == {s["uuid"] for s in state["compareRunSections"]}


def test_what_varies_within_a_stack_is_never_averaged():
    runs = [run(stack, seed, lr=lr, **{"optimizer.lr": lr, "model.layout": stack})
            for stack in ("mha", "linear") for seed in (0, 1) for lr in ("0.1", "0.01")]
    state = views.state(runs, "")
    # Once, though it has two names; the layout goes with the stack.
    assert grouped(state) == ["stack", "lr"]
    assert "param.stack.mha,param.lr.0.01" in state["groupsExpanded"]


def test_every_metric_has_its_own_chart_or_a_deleted_one():
    # MLflow draws the others by itself.
    charts = views.state(grid(), "")["compareRunCharts"]
    assert sorted(c["metricKey"] for c in charts if "metricKey" in c) == sorted(METRICS)
    assert len({c["uuid"] for c in charts}) == len(charts)


@pytest.mark.parametrize(("metrics", "quality", "ascending"), [
    (METRICS, "val/accuracy", False), ([m for m in METRICS if "accuracy" not in m], "val/loss", True)])
def test_the_best_stack_comes_first(metrics, quality, ascending):
    state = views.state(grid(metrics=metrics), "")
    assert (state["orderByKey"], state["orderByAsc"]) == (f"metrics.`{quality}`", ascending)
    assert state["selectedColumns"][0] == f"metrics.`{quality}`"


def test_without_a_quality_there_is_no_view():
    assert views.state(grid(metrics=["train/loss", "complexity/parameters"]), "") is None
    assert views.state([], "") is None


def test_runs_of_older_versions_lack_some_metric_and_param():
    old = Run({"stack": "mha"}, ["val/loss"])
    state = views.state([old], "")
    assert [chart["type"] for chart in drawn(state)] == ["LINE"]
    assert len(state["compareRunSections"]) == 1
    assert views.tasks([old]) == [] and views.tasks([*grid(), run("mha", task="text")]) == ["mqar", "text"]


def unpacked(text):
    kept = json.loads(text)
    return kept | {"state": json.loads(zlib.decompress(base64.b64decode(kept["state"].removeprefix("deflate;"))))}


def test_the_entry_of_a_view_is_read_back():
    state = views.state(grid(), "s")
    assert unpacked(views.entry("mine", state, 1, 2)) == {"name": "mine", "createdAt": 1, "updatedAt": 2,
                                                        "state": state}


@pytest.mark.parametrize("stacks", [60, 600])
def test_a_view_of_any_sweep_fits(stacks):
    noise = [hashlib.sha256(str(i).encode()).hexdigest() for i in range(stacks)]
    metrics = [*METRICS, *(f"eval/{name}/accuracy" for name in noise)]
    state = views.state([run(name, metrics=metrics) for name in noise], "s")
    text = views.entry("mine", state, 1, 2)
    assert len(text) <= views.MAX_STATE
    assert unpacked(text)["state"]["compareRunCharts"][0] == state["compareRunCharts"][0]


def test_sweeps_and_tasks_have_views_of_their_own():
    pairs = [("a b", None), ("a-b", None), ("a", "b"), ("a", "b/c"), ("é", None), ("x" * 300, None), ("x" * 301, None)]
    found = {views.identity(*pair) for pair in pairs}
    assert len(found) == len(pairs)
    assert all(legal(views.TAG + view) and "/" not in view for view in found)


def test_a_link_leads_to_the_charts_of_its_view():
    link = urlsplit(views.link("http://host:5", "7", "mine-1"))
    path, _, query = link.fragment.partition("?")
    assert (link.netloc, path) == ("host:5", "/experiments/7/runs")
    # A search of its own would make MLflow pass over the view.
    assert parse_qs(query) == {"viewStateShareKey": ["mine-1"], "compareRunsMode": ["CHART"],
                               "workflowType": ["machine_learning"]}
