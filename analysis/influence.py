"""`python -m analysis.influence run=KEY`: which tokens a trained model depends on, layer by layer, as one page.

    python -m analysis.influence run=KEY text='To be, or not to be'   a run of task=text: any text
    python -m analysis.influence run=KEY                              any run: row 0 of the hardest trained suite
    python -m analysis.influence run=KEY suite=kv8 row=3 window=16    another row; the share 16 tokens away and more

The influence of a token on an output is the norm of the gradient of the one by the other, so it is defined alike for
attention, recurrences and their hybrids; `analysis.influence_map` has the formulas. Shown are the whole model, from
embeddings to logits, and each mixer alone, with its attention weights beside it where it has such weights.

Options: run (a folder, or a KEY in the folder `runs`), text, or suite and row=0; queries=16 (positions to look from:
the scored ones; of more, so many from their second half); directions=16 (of the output, drawn with seed=0: more are
more exact and take longer, as many as outputs are exact); window (a distance; else each window layer's own);
out=influence.html, runs=runs. Mistakes end with exit code 2.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from analysis import influence_page, influence_plots, rows
from analysis.canvas import Style
from analysis.influence_map import Effort, Map, Row, mixer_maps, model_map, profile
from analysis.pictures import Picture
from analysis.runs import Records
from arch.language_model import LanguageModel
from experiments import cli, resume
from experiments.record import read_description
from experiments.tasks.base import NOT_SCORED

# Option -> its least value.
_NUMBERS = {"row": 0, "queries": 1, "directions": 1, "seed": 0, "window": 1}
_TEXTS = ("run", "text", "suite", "out", "runs")
# The work grows with the square of the length.
MOST_TOKENS = 1024
# In a report, which has many runs: of a row's beginning.
REPORT_TOKENS, REPORT_QUERIES, REPORT_DIRECTIONS = 256, 12, 8


@dataclass(frozen=True)
class Asked:
    """A row to look at.

    Attributes:
        where: which one, in words.
        shown: [T] its tokens as text.
        scored: the positions at which the task asks for something.
    """

    row: Row
    where: str
    shown: Sequence[str]
    scored: Sequence[int]

    def effort(self, queries: int, directions: int, seed: int = 0) -> Effort:
        """The scored positions; where they are more than `queries`, so many evenly spread over their second half."""
        late = self.scored if len(self.scored) <= queries else self.scored[len(self.scored) // 2 :]
        count = min(queries, len(late))
        chosen = {late[-1 - (len(late) - 1) * i // max(count - 1, 1)] for i in range(count)}
        return Effort(sorted(chosen), directions, seed)


def of_text(run: str, runs: str, text: str) -> Asked:
    """Any text, of a run of task=text.

    Raises:
        ValueError: no such run, one of another task, or a text without a token.
    """
    tokens = resume.tokeniser(run, runs)
    ids = tokens.encode(text)
    if not ids:
        raise ValueError("text= is empty: there is no token to look at")
    return Asked(Row(torch.tensor(ids)), "the given text", [tokens.decode([i]) for i in ids], range(len(ids)))


def of_suite(run: str, runs: str, suite: str | None = None, row: int = 0, most: int | None = None) -> Asked:
    """A row of the run's test suite (see `analysis.rows`) without its pads; of it, the first `most` tokens.

    Raises:
        ValueError: no such run, suite or row.
    """
    options = read_description(resume.find(run, runs)).config["task"]
    name, item = rows.of_suite(options, suite, row)
    documents = item.get("documents", torch.ones(len(item["tokens"]), dtype=torch.int32))
    real = (documents > 0).nonzero()[:most, 0]
    tokens, documents = item["tokens"][real], documents[real]
    scored = (item["labels"][real].reshape(len(real), -1) != NOT_SCORED).any(1).nonzero()[:, 0].tolist()
    several = documents if len(documents.unique()) > 1 else None
    shown = _shown(tokens.tolist(), run, runs, options["name"])
    cut = f", its first {most} tokens" if len(real) == most else ""
    where = f"row {row} of the test suite {name}{cut}"
    return Asked(Row(tokens, several, item.get("source")), where, shown, scored or range(len(real)))


def _shown(ids: Sequence[int], run: str, runs: str, task: str) -> list[str]:
    if task != "text":
        return list(map(str, ids))
    tokens = resume.tokeniser(run, runs)
    return [tokens.decode([i]) if i < tokens.vocabulary else "[mask]" for i in ids]


def maps(model: LanguageModel, asked: Asked, effort: Effort) -> list[Map]:
    """The whole model's map, then each mixer's.

    Raises:
        ValueError: a row that is too long.
    """
    _check_length(model, asked)
    return [model_map(model, asked.row, effort), *mixer_maps(model, asked.row, effort)]


def _check_length(model: LanguageModel, asked: Asked) -> None:
    place = model.stack.position
    allowed = min(MOST_TOKENS, place.max_length) if place.kind == "learned" else MOST_TOKENS
    if len(asked.shown) > allowed:
        raise ValueError(f"{asked.where} has {len(asked.shown)} tokens; at most {allowed} are looked at")


def section(records: Records, styles: Mapping[str, Style]) -> tuple[list[Picture], list[str]]:
    """For a report on the runs of one task: how far back the whole models look, and a map of each.

    Args:
        records: finished runs; of each cell the one of the lowest seed is looked at.
        styles: how each cell looks.
    Returns:
        The pictures; "<cell>: <why it is not among them>".
    """
    by_seed = records.runs.sort_values("seed", key=lambda seeds: seeds.map(str).str.rjust(20))
    runs = by_seed.drop_duplicates("cell").sort_values("cell")
    found: dict[str, tuple[Asked, Map]] = {}
    missing = []
    for run in runs.itertuples():
        try:
            found[run.cell] = _looked_at(run.folder)
        except (ValueError, OSError) as error:
            missing.append(f"{run.cell}: {error}")
    if not found:
        return [], missing
    profiles = {cell: profile(about.values, about.queries) for cell, (_, about) in found.items()}
    caption = "Of the whole model, by gradients: how much of what moves a prediction lies in the nearest tokens."
    pictures = [Picture("influence", "How far back the models look", caption, influence_plots.held(profiles, styles))]
    for number, (cell, (asked, about)) in enumerate(found.items()):
        caption = f"Whole model, first seed, {asked.where}. Grey: exactly no influence."
        figure = influence_plots.heat_map(about.values, about.queries, asked.shown)
        pictures.append(Picture(f"influence-{number}", f"What {cell} depends on", caption, figure))
    return pictures, missing


def _looked_at(folder: str) -> tuple[Asked, Map]:
    model, asked = resume.load(folder), of_suite(folder, "", most=REPORT_TOKENS)
    _check_length(model, asked)
    return asked, model_map(model, asked.row, asked.effort(REPORT_QUERIES, REPORT_DIRECTIONS))


def main() -> int:
    """The exit code: 0; 2 after a mistake."""
    cli.help_or_options("analysis.influence", __doc__)

    def draw() -> None:
        options = _options(sys.argv[1:])
        out = Path(options.pop("out", "influence.html"))
        command = shlex.join(["python", "-m", "analysis.influence", *sys.argv[1:]])
        text, page = _look(command, **options)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page, encoding="utf-8")
        print(f"{text}\n\npicture: {out}")

    return cli.run(draw, "train")


def _look(
    command: str,
    run: str,
    runs: str = "runs",
    text: str | None = None,
    suite: str | None = None,
    row: int = 0,
    queries: int = 16,
    directions: int = 16,
    seed: int = 0,
    window: int | None = None,
) -> tuple[str, str]:
    """What to print, and the page."""
    recorded = read_description(resume.find(run, runs))
    asked = of_suite(run, runs, suite, row) if text is None else of_text(run, runs, text)
    found = maps(resume.load(run, runs), asked, asked.effort(queries, directions, seed))
    prose = recorded.config["task"]["name"] == "text"
    about = influence_page.About(recorded.label, run, asked.where, asked.shown, prose, directions, window, command)
    return influence_page.text(found, about), influence_page.build(found, about)


def _options(words: Sequence[str]) -> dict[str, Any]:
    """The keyword arguments of `_look`, and out."""
    given = cli.pairs(words, (*_TEXTS, *_NUMBERS))
    found = {name: _number(name, value) if name in _NUMBERS else value for name, value in given}
    if "text" in found and found.keys() & {"suite", "row"}:
        raise cli.UsageError("text= and suite= or row= name two things to look at: give one of them")
    return found


def _number(name: str, value: str) -> int:
    if not value.isdecimal() or int(value) < _NUMBERS[name]:
        raise cli.UsageError(f"{name}={value} must be a whole number of at least {_NUMBERS[name]}")
    # On the CPU, torch looks at the low 32 bits of a seed alone.
    if name == "seed" and int(value) >= 2**32:
        raise cli.UsageError(f"seed={value} must be at most {2**32 - 1}")
    return int(value)


if __name__ == "__main__":
    sys.exit(main())
