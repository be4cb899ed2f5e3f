"""A browser as on a reader's desk: a fresh profile, and everything that goes wrong in a page is written down."""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.look.made import grid

ROOT = Path(__file__).resolve().parents[2]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# A page that is its own file, or ours.
NEAR = ("file:", "data:", "blob:", "about:", "http://127.0.0.1:")


@dataclass
class Look:
    """An open page, and what it complained of and asked for."""

    page: Any
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    @property
    def outside(self) -> list[str]:
        return [url for url in self.requests if not url.startswith(NEAR)]

    def plots(self, where: str = "") -> list[dict[str, Any]]:
        """Every Plotly figure inside an element: its axes' titles and its traces."""
        return self.page.evaluate(
            """where => [...document.querySelectorAll(where + ' .js-plotly-plot')].map(plot => ({
                 x: plot.layout.xaxis?.title?.text ?? '', y: plot.layout.yaxis?.title?.text ?? '',
                 traces: plot.data.map(({type, mode, name, x, y}) =>
                   ({type, mode, name, x: [x ?? []].flat(), y: [y ?? []].flat()}))}))""", where)


@pytest.fixture(scope="session")
def shots() -> Path:
    """Where the screenshots are kept."""
    folder = ROOT / "build" / "look"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    path = os.environ.get("BROWSER_PATH") or next(filter(None, map(shutil.which, BROWSERS)), None)
    assert path, f"no browser: none of {', '.join(BROWSERS)} is on the PATH, and BROWSER_PATH names none"
    # By name: what `make look` alone installs is no import of the tests.
    with importlib.import_module("playwright.sync_api").sync_playwright() as playwright:
        # A container's root cannot have Chromium's sandbox; the pages are our own.
        running = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield running
        running.close()


@pytest.fixture
def look(browser: Any) -> Any:
    """Opens an address in a profile that nobody used: look(url, width, height, dark)."""

    @contextmanager
    def opened(url: str, width: int = 1280, height: int = 1000, dark: bool = False) -> Iterator[Look]:
        size = {"width": width, "height": height}
        context = browser.new_context(viewport=size, color_scheme="dark" if dark else "light")
        # Milliseconds; on an idle machine everything is there within ten seconds.
        context.set_default_timeout(300_000)
        seen = Look(context.new_page())
        seen.page.on("console", lambda m: seen.errors.append(f"{m.text} {m.location}") if m.type == "error" else None)
        seen.page.on("pageerror", lambda error: seen.errors.append(str(error)))
        seen.page.on("request", lambda request: seen.requests.append(request.url))
        seen.page.goto(url, wait_until="load")
        yield seen
        context.close()

    return opened


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small grid: five stacks, three seeds, and a run that diverged."""
    return grid(tmp_path_factory.mktemp("look") / "runs", diverged=("mamba2", 2))
