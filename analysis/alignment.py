"""`python -m analysis.alignment run=KEY`: what an encoder-decoder attends to, as one page of heat maps.

    python -m analysis.alignment run=KEY                        the first row of the longest trained suite
    python -m analysis.alignment run=KEY suite=size6 row=3      another one
    python -m analysis.alignment run=KEY out=alignment.html     where to write it

A map a cross-attending layer and head: rows are what is to be said, columns what the source holds, a cell is the weight
of that source token, from 0 to 1. The weights are computed again for the one row (`EncoderDecoder.alignments`), behind
the right answer so far. Options: run (a folder, or a KEY in the folder `runs`), suite, row=0, out=alignment.html,
runs=runs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import plotly.graph_objects as go
from plotly.subplots import make_subplots
from torch import Tensor

from analysis import rows
from arch.encoder_decoder import EncoderDecoder
from experiments import cli, resume
from experiments.record import read_description
from experiments.tasks.base import Item
from experiments.tasks.transduction import WORDS

_OPTIONS = ("run", "suite", "row", "out", "runs")


def figure(run: str, suite: str | None = None, row: int = 0, runs: str = "runs") -> go.Figure:
    """The heat maps of one row of a test suite; `suite` None: the hardest that was trained for, or the last.

    Raises:
        ValueError: no such run, suite or row, or a run without an encoder.
    """
    model = resume.load(run, runs)
    if not isinstance(model, EncoderDecoder):
        raise ValueError(f"run={run} has no encoder: there is nothing to align")
    options = read_description(resume.find(run, runs)).config["task"]
    name, item = rows.of_suite(options, suite, row)
    weights = model.alignments(item["source"][None], item["tokens"][None])
    digits = options.get("rule") == "digits"
    return heat_maps({layer: w[0] for layer, w in weights.items()}, item, digits, f"{name}, row {row} of run {run}")


def heat_maps(weights: dict[str, Tensor], item: Item, digits: bool, title: str) -> go.Figure:
    """A map for each layer (down) and head (across).

    Args:
        weights: [T, H, S] by layer.
        digits: the ids are those of rule=digits, and are shown as digits and words.
    """
    most = max(w.shape[1] for w in weights.values())
    said = [f"{place}: {_shown(int(i), digits)}" for place, i in enumerate(item["labels"])]
    read = [f"{place}: {_shown(int(i), digits)}" for place, i in enumerate(item["source"])]
    titles = [f"{layer}, head {i}" if i < w.shape[1] else "" for layer, w in weights.items() for i in range(most)]
    page = make_subplots(len(weights), most, subplot_titles=titles, shared_yaxes=True)
    for down, w in enumerate(weights.values(), 1):
        for across in range(w.shape[1]):
            cells = go.Heatmap(z=w[:, across].tolist(), x=read, y=said, coloraxis="coloraxis")
            page.add_trace(cells, down, across + 1)
    page.update_yaxes(autorange="reversed")
    colours = {"colorscale": "Viridis", "cmin": 0, "cmax": 1, "colorbar": {"title": "weight"}}
    page.update_layout(title=title, coloraxis=colours, width=140 + 300 * most, height=140 + 320 * len(weights))
    return page


def _shown(token: int, digits: bool) -> str:
    return WORDS[token - 10] if digits and 10 <= token < 10 + len(WORDS) else str(token)


def main() -> int:
    """The exit code: 0; 2 after a mistake."""
    cli.help_or_options("analysis.alignment", __doc__)

    def draw() -> None:
        options = dict(cli.pairs(sys.argv[1:], _OPTIONS))
        out = Path(options.pop("out", "alignment.html"))
        row = options.pop("row", "0")
        if not row.isdecimal():
            raise cli.UsageError(f"row={row} must be a whole number of at least 0")
        figure(row=int(row), **options).write_html(out, include_plotlyjs=True)
        print(out)

    return cli.run(draw, "train")


if __name__ == "__main__":
    sys.exit(main())
