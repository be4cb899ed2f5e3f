"""`python -m experiments.show stack=gemma3 model.d_model=512`: what a model is made of and costs, before any training.

Prints every kind of layer with its parameters, FLOPs a token and state bytes. Nothing is trained, no weight is made: a
model of any size takes seconds. Options are those of `python -m experiments.train`, see its --help.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser

from arch import cost, layout
from experiments import cli, config
from experiments.metrics import format_value

# State is shown after so many tokens.
LENGTHS = (1024, 32_768, 1_048_576)
_FIGURES = ("parameters", "flops_per_token_forward", *(f"state_bytes_at_{length}" for length in LENGTHS))
_TITLES = ("parameters", "FLOPs a token", "state at 1k", "at 32k", "at 1M tokens")
_NOTES = """\
FLOPs: forward, of a token in a row of {length} (task.length); 2 a multiply-add, no masked pairs. Training: 3 times it.
State: bytes that generation carries along for one sequence after so many tokens, in float32."""


def table(plan: config.Plan) -> dict[str, Any]:
    """The figures of a planned run.

    Returns:
        stack, layout (as short as it can be said), d_model, vocabulary, length; `parts`: name and figures of the
        embedding, every layer in order and the head; `total`: their sums; `notes`: what a figure does not mean.
        State bytes are None for a bidirectional model.
    """
    length = plan.task.length
    trained = cost.parts(plan.skeleton, length)
    later = {after: cost.parts(plan.skeleton, after) for after in LENGTHS}
    parts = [
        {"name": part.name, "parameters": part.parameters, "flops_per_token_forward": part.flops_per_token_forward}
        | {f"state_bytes_at_{after}": same[i].state_bytes for after, same in later.items()}
        for i, part in enumerate(trained)
    ]
    return {
        "stack": plan.label,
        "layout": layout.describe(plan.layers),
        "d_model": plan.config["model"]["d_model"],
        "vocabulary": plan.task.vocabulary,
        "length": length,
        "parts": parts,
        "total": {name: _sum([part[name] for part in parts]) for name in _FIGURES},
        "notes": _notes(plan, any(part.dense_counted for part in trained)),
    }


def _sum(values: Sequence[float | None]) -> float | None:
    return None if None in values else sum(value for value in values if value is not None)


def _notes(plan: config.Plan, dense: bool) -> list[str]:
    notes = []
    if not plan.skeleton.causal:
        notes.append("No state: a mixer sees later tokens, so this model does not generate.")
    if plan.skeleton.stack.decode == "recompute":
        notes.append("A mixer extends by running everything again: its state is all of its inputs.")
    if dense:
        notes.append("Some attention outside of our operations is counted with its masked pairs.")
    return notes


def text(found: dict[str, Any]) -> str:
    """The table for people: equal layers in one row, whose figures are those of each of them."""
    rows = [("layers", "", *_TITLES)]
    for part, places in _fold(found["parts"]):
        rows.append((_count(places), part["name"], *_spell(part)))
    rows.append(("total", "", *_spell(found["total"])))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(_aligned(row, widths)).rstrip() for row in rows]
    head = (
        f"{found['stack']}: {len(found['parts']) - 2} layers, d_model {found['d_model']}, "
        f"vocabulary {found['vocabulary']:,}; {found['total']['parameters']:,} parameters"
    )
    notes = [_NOTES.format(length=found["length"]), *found["notes"]]
    return "\n".join([head, f"layout: {found['layout']}", "", *lines, "", *notes])


def _fold(parts: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], list[int]]]:
    """Each part once, by its first place, and the layers that it stands for; none for embedding and head."""
    folded: dict[str, tuple[dict[str, Any], list[int]]] = {}
    for place, part in enumerate(parts):
        inside = 0 < place < len(parts) - 1
        # A layer that shares its weights with an earlier one has no parameters: it is another row.
        entry = folded.setdefault(json.dumps([inside, part]), (part, []))
        if inside:
            entry[1].append(place - 1)
    return list(folded.values())


def _count(places: list[int]) -> str:
    return f"{len(places)} x" if places else ""


def _spell(figures: dict[str, Any]) -> list[str]:
    return ["-" if figures[name] is None else format_value(f"complexity/{name}", figures[name]) for name in _FIGURES]


def _aligned(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    """Counts and numbers to the right, names to the left."""
    sides = (str.rjust, str.ljust, *[str.rjust] * len(_FIGURES))
    return [side(cell, width) for side, cell, width in zip(sides, row, widths, strict=True)]


def main() -> int:
    """The exit code: 0; 2 after a mistake in the options."""
    parser = argparse.ArgumentParser(
        "python -m experiments.show", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("options", nargs="*", metavar="NAME=VALUE", help="as for experiments.train")
    parser.add_argument("--json", action="store_true", help="print all layers and figures as JSON")
    chosen = parser.parse_intermixed_args()
    # What `cli.run` reads, as for a Hydra program.
    sys.argv[1:] = chosen.options

    def show() -> None:
        found = table(_plan(sys.argv[1:]))
        print(json.dumps(found, indent=1) if chosen.json else text(found))

    return cli.run(show, "show")


def _plan(overrides: Sequence[str]) -> config.Plan:
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        if override.is_sweep_override():
            raise cli.UsageError(f"{override.input_line!r} has several values; show prints one model at a time")
    return config.plan(cli.composed("show", overrides))


if __name__ == "__main__":
    sys.exit(main())
