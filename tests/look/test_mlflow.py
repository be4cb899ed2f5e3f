"""The comparison view in MLflow's own interface: what a researcher sees behind the link."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from analysis import publish, report
from analysis.runs import load
from experiments import ui, views
from experiments.tracking import links, upload
from tests.look.made import STACKS

# MLflow asks for its user where it has no users, and its own page is resized while it is drawn.
THEIRS = ("mlflow/users/current", "ResizeObserver loop")


@pytest.fixture(scope="module")
def uri(runs) -> str:
    """A fresh database that has the runs and the report."""
    uri = f"sqlite:///{runs}/mlflow.db"
    for status in sorted(runs.glob("*/status.json")):
        upload(status.parent, uri)
    page = runs / "report.html"
    assert report.main(["--runs", str(runs), "--sweep", "look", "--html", str(page), "--no-mlflow"]) == 0
    lines = publish.report(load(runs), runs, "look", page)
    # The browser is there, so the pictures are too.
    assert [line.partition(":")[0] for line in lines] == ["report in MLflow"]
    return uri


@pytest.fixture(scope="module")
def server(uri):
    """The address of MLflow's server over it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
               "--backend-store-uri", uri]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=os.environ | ui.QUIET, **silent) as one:
        try:
            _wait(f"http://127.0.0.1:{port}/health", one)
            yield f"http://127.0.0.1:{port}"
        finally:
            one.terminate()


def _wait(url, process):
    # Starting takes ten seconds of CPU, which on a busy machine may be minutes.
    end = time.monotonic() + 600
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"MLflow's server does not answer at {url}")


def ours(errors):
    return [error for error in errors if not any(part in error for part in THEIRS)]


def test_the_comparison_is_ready(look, server, uri, shots):
    link, = links(uri, "look")
    with look(link.replace("http://127.0.0.1:5000", server), 1700, 1500) as seen:
        page = seen.page
        # The last of the first row; the others are drawn when they are scrolled to.
        page.wait_for_function("document.querySelectorAll('.js-plotly-plot').length >= 2")
        page.wait_for_function("[...document.querySelectorAll('.js-plotly-plot')].every(plot => plot.data?.length)")
        page.wait_for_timeout(1000)
        page.screenshot(path=shots / "mlflow-charts.png")
        text = page.inner_text("body")
        for wanted in ("Comparison look", "Group: mha", "Validation accuracy against cost", "14 matching runs"):
            assert wanted in text
        scatter = [plot for plot in seen.plots() if plot["x"] == "complexity/flops_per_token_train"]
        assert len(scatter) == 1 and scatter[0]["y"] == "val/accuracy"
        points = [(x, y) for trace in scatter[0]["traces"] for x, y in zip(trace["x"], trace["y"], strict=True)]
        assert len(points) == len(STACKS)
        # The mean over the seeds of mha: 0.98, 0.97, 0.96, times what is learned at the end of a curve.
        assert max(y for _, y in points) == pytest.approx(0.97 * 0.98168, abs=1e-4)
    assert (ours(seen.errors), seen.outside) == ([], [])


def test_the_table_has_the_columns_that_matter(look, server, uri, shots):
    link, = links(uri, "look")
    with look(link.replace("http://127.0.0.1:5000", server).replace("=CHART", "=TABLE"), 1700, 900) as seen:
        seen.page.wait_for_selector("text=Group: mha")
        seen.page.screenshot(path=shots / "mlflow-table.png")
        text = seen.page.inner_text("body")
        for column in ("val/accuracy", "eval/kv16/accuracy", "complexity/flops_per_token_train"):
            assert column in text
        # The run of the report has nothing to compare.
        assert "report of look" not in text
    assert (ours(seen.errors), seen.outside) == ([], [])


def test_the_report_opens_from_its_run(look, server, uri, runs, shots):
    from mlflow.tracking import MlflowClient

    run, = MlflowClient(uri).search_runs(["1"], "tags.`mixerlab.kind` = 'report'")
    with look(views.artifact(server, "1", run.info.run_id, "report.html"), 1700, 1200) as seen:
        seen.page.wait_for_selector("iframe")
        frame = seen.page.frame_locator("iframe").first
        frame.locator(".js-plotly-plot").first.wait_for()
        seen.page.screenshot(path=shots / "mlflow-report.png")
        assert "mha + linear" in frame.locator("body").inner_text()
        assert "pictures" in seen.page.inner_text("body")
    assert (ours(seen.errors), seen.outside) == ([], [])
