"""The report in a browser, as it is read: on a desk, on a phone, in print, by day and by night."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from analysis import report
from analysis.runs import load
from tests.look.made import STACKS, grid


@pytest.fixture(scope="module")
def page(runs: Path, tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("page") / "report.html"
    assert report.main(["--runs", str(runs), "--sweep", "look", "--html", str(file)]) == 0
    return file.as_uri()


@pytest.mark.parametrize(("name", "width", "dark"), [
    ("desk", 1280, False), ("desk-dark", 1280, True), ("phone", 390, False), ("phone-dark", 390, True)])
def test_the_report_is_whole_on_every_screen(look, page, shots, name, width, dark):
    with look(page, width, dark=dark) as seen:
        seen.page.wait_for_selector(".js-plotly-plot")
        seen.page.screenshot(path=shots / f"report-{name}.png", full_page=True)
        text = seen.page.inner_text("body")
        assert not [stack for stack in STACKS if stack not in text]
        assert "DIVERGED" in text and "not finite" in text
        # Nothing sticks out to the side: a phone would have to scroll both ways.
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
        background = seen.page.evaluate("getComputedStyle(document.body).backgroundColor")
        light = sum(int(part) for part in background.removeprefix("rgb(").rstrip(")").split(",")[:3]) / 3
        assert (light < 80) == dark and (light > 200) != dark, background
    assert (seen.errors, seen.outside) == ([], [])


def test_the_trade_off_has_one_point_a_stack(look, page):
    with look(page) as seen:
        seen.page.wait_for_selector(".js-plotly-plot")
        plots = [plot for plot in seen.plots() if plot["x"] == "training FLOPs a token"]
        assert plots
        points = [trace for trace in plots[0]["traces"] if trace["mode"] == "markers"]
        assert sorted(trace["name"] for trace in points) == sorted(STACKS)
        assert all(len(trace["x"]) == 1 for trace in points)


def test_the_report_prints(look, page, shots):
    with look(page) as seen:
        seen.page.wait_for_selector(".js-plotly-plot")
        seen.page.emulate_media(media="print")
        seen.page.screenshot(path=shots / "report-print.png", full_page=True)
        seen.page.pdf(path=shots / "report.pdf", format="A4")
    assert (shots / "report.pdf").read_bytes().startswith(b"%PDF")
    assert (seen.errors, seen.outside) == ([], [])


def test_a_large_grid_is_reported_in_twenty_seconds(tmp_path):
    runs = grid(tmp_path / "runs", [f"stack{i}" for i in range(20)], 10, points=1000)
    begun, clock = time.process_time(), time.perf_counter()
    text = report.build(load(runs))
    spent = time.process_time() - begun
    took = f"{spent:.1f} s of CPU, {time.perf_counter() - clock:.1f} s by the clock"
    print(f"200 runs x 1000 points: {took}, {len(text) / 1e6:.1f} MB")
    assert spent < 20
