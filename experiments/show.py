"""`python -m experiments.show stack=gemma3 model.d_model=512`: what a model is made of and costs, before any training.

Prints every kind of layer with its parameters, FLOPs a token and state bytes, then the figures of the whole model.
explain=true adds where the FLOPs come from: every formula with its values, and the convention of counting. Nothing is
trained, no weight is made: a model of any size takes seconds. Options are those of `python -m experiments.train`, see
its --help.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser

from arch import cost, layout
from arch.parts import ENDS, Part
from experiments import cli, config
from experiments.metrics import format_value

# State and decoding are shown after so many tokens.
LENGTHS = (1024, 32_768, 1_048_576)
_FIGURES = ("parameters", "flops_per_token_forward", *(f"state_bytes_at_{length}" for length in LENGTHS))
_TITLES = ("parameters", "FLOPs a token", "state at 1k", "at 32k", "at 1M tokens")
_NOTES = """\
FLOPs: forward, of a token in a row of {length} (task.length); 2 a multiply-add, no masked pairs. Training: 3 times it.
State: bytes that generation carries along for one sequence after so many tokens, in float32."""
_AFTER = {
    "FLOPs of the prompt": "prefill_flops",
    "FLOPs of the next token": "decode_flops_per_token",
    "state in float32": "state_bytes",
    "state in bfloat16": "bf16_state_bytes",
}
_OPERATIONS = {"aten.mm": "matrix product", "aten.addmm": "matrix product", "aten.bmm": "batch of matrix products",
               "aten.baddbmm": "batch of matrix products"}


def table(plan: config.Plan) -> dict[str, Any]:
    """The figures of a planned run, under the names that runs log behind "complexity/".

    Returns:
        stack, layout (as short as it can be said), d_model, vocabulary, length; `parts`: name and figures of the
        embedding, every layer in order and the head, with the `terms` of their FLOPs in a row; `total`: their sums, and
        what is no sum; `notes`: what a figure does not mean; `convention`.
        What needs a state is None for a bidirectional model.
    """
    length = plan.task.length
    trained = cost.measure(plan.skeleton, length)
    later = {after: cost.measure(plan.skeleton, after) for after in LENGTHS}
    parts = [
        _part(part, kept, {after: same.parts[place] for after, same in later.items()})
        for place, (part, kept) in enumerate(zip(trained.parts, trained.activations, strict=True))
    ]
    sums = {name: _sum([part[name] for part in parts]) for name in parts[0] if name not in ("name", "terms")}
    return {
        "stack": plan.label,
        "layout": layout.describe(plan.layers),
        "d_model": plan.config["model"]["d_model"],
        "vocabulary": plan.task.vocabulary,
        "length": length,
        "parts": parts,
        "total": sums | _whole(trained, later),
        "match": plan.matched and plan.matched.params,
        "notes": _notes(plan, trained.dense_counted),
        "convention": cost.CONVENTION,
    }


def _part(part: Part, kept: int | None, later: dict[int, Part]) -> dict[str, Any]:
    """One part, in training and decoding later.

    Args:
        kept: its activations.
        later: the same part at other lengths.
    """
    length = part.length
    found: dict[str, Any] = {
        "name": part.name,
        "parameters": part.parameters,
        "flops_per_token_forward": part.flops_per_token_forward,
        "flops_per_token_train": part.flops_per_token_train,
        f"activation_bytes_at_{length}": kept,
        f"attention_bytes_at_{length}": part.attention_bytes,
        f"score_bytes_at_{length}": part.score_bytes,
    }
    for after, same in later.items():
        found[f"state_bytes_at_{after}"] = same.state_bytes
        found[f"bf16_state_bytes_at_{after}"] = same.bf16_state_bytes
        found[f"decode_flops_per_token_at_{after}"] = same.decode_flops_per_token
        found[f"decode_attention_bytes_at_{after}"] = same.decode_attention_bytes
        found[f"prefill_flops_at_{after}"] = same.prefill_flops
    found["terms"] = [
        {"operation": _OPERATIONS.get(op, op), "times": times, "formula": str(formula), "flops": times * formula.value}
        for (op, formula), times in part.calls.items()
    ]
    return found


def _whole(whole: cost.Cost, later: dict[int, cost.Cost]) -> dict[str, Any]:
    """What is no sum over the parts."""
    return {
        "parameters_active": whole.parameters_active,
        "parameters_without_embeddings": whole.parameters_without_embeddings,
        "decode": whole.decode,
    } | {f"bookkeeping_bytes_at_{after}": same.bookkeeping_bytes for after, same in later.items()}


def _sum(values: Sequence[float | None]) -> float | None:
    return None if None in values else sum(value for value in values if value is not None)


def _notes(plan: config.Plan, dense: bool) -> list[str]:
    notes = [f"Matched: {plan.matched}."] if plan.matched else []
    if not plan.skeleton.causal:
        notes.append("No state: a mixer sees later tokens, so this model does not generate.")
    if plan.skeleton.stack.decode == "recompute":
        notes.append("A mixer extends by running everything again: its state is all of its inputs.")
    if dense:
        notes.append("Some attention outside of our operations is counted with its masked pairs.")
    return notes


def text(found: dict[str, Any], explain: bool = False) -> str:
    """The tables for people: equal layers in one row, whose figures are those of each of them."""
    kinds = _fold(found["parts"])
    rows = [("layers", "", *_TITLES), *((_count(places), part["name"], *_spell(part)) for part, places in kinds)]
    rows.append(("total", "", *_spell(found["total"])))
    layers = sum(part["name"] not in ENDS for part in found["parts"])
    head = (
        f"{found['stack']}: {layers} layers, d_model {found['d_model']}, "
        f"vocabulary {found['vocabulary']:,}; {found['total']['parameters']:,} parameters"
    )
    lines = [head, f"layout: {found['layout']}", "", *_aligned(rows), "", *_model(found), ""]
    if explain:
        lines += [*_terms(kinds, found["length"]), "How it is counted", found["convention"], *found["notes"]]
    else:
        lines += [_NOTES.format(length=found["length"]), *found["notes"]]
    return "\n".join(lines)


def _model(found: dict[str, Any]) -> list[str]:
    """The whole model: in training, then after a prompt of every length."""
    total, length = found["total"], found["length"]
    read, inner = (_value(name, total) for name in ("parameters_active", "parameters_without_embeddings"))
    kept, moved, scores = (_value(f"{name}_bytes_at_{length}", total) for name in ("activation", "attention", "score"))
    rows = [("", "", "after 1k", "32k", "1M tokens")]
    for title, name in _AFTER.items():
        rows.append(("", title, *(_value(f"{name}_at_{after}", total) for after in LENGTHS)))
    return [
        f"parameters: {_value('parameters', total)}, of which a token reads {read}; {inner} without embeddings",
        f"a training row of {length}: {_value('flops_per_token_train', total)} FLOPs a token; activations {kept}; "
        f"attention moves at least {moved} forward, and its score matrices, never written, are {scores}",
        "",
        *_aligned(rows),
    ]


def _terms(kinds: Sequence[tuple[dict[str, Any], list[int]]], length: int) -> list[str]:
    """The formulas behind the FLOPs of every kind of part."""
    lines = [f"FLOPs of a row of {length}, forward"]
    for part, places in kinds:
        if part["terms"]:
            total = sum(term["flops"] for term in part["terms"])
            lines += ["", f"{_count(places)} {part['name']}: {total:,}".lstrip()]
            lines += [f"  {term['times']} x {term['operation']}: {term['formula']}" for term in part["terms"]]
    return [*lines, ""]


def _fold(parts: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], list[int]]]:
    """Each part once, by its first place, and the layers that it stands for; none for embedding and head."""
    folded: dict[str, tuple[dict[str, Any], list[int]]] = {}
    for place, part in enumerate(parts):
        inside = part["name"] not in ENDS
        # A layer that shares its weights with an earlier one has no parameters: it is another row.
        entry = folded.setdefault(json.dumps([inside, part]), (part, []))
        if inside:
            entry[1].append(place - 1)
    return list(folded.values())


def _count(places: list[int]) -> str:
    return f"{len(places)} x" if places else ""


def _spell(figures: dict[str, Any]) -> list[str]:
    return [_value(name, figures) for name in _FIGURES]


def _value(name: str, figures: dict[str, Any]) -> str:
    return "-" if figures[name] is None else format_value(f"complexity/{name}", figures[name])


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines: names, in the second column, to the left, counts and numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = (str.rjust, str.ljust, *[str.rjust] * (len(widths) - 2))
    return ["  ".join(side(*cell) for side, *cell in zip(sides, row, widths, strict=True)).rstrip() for row in rows]


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
        overrides, explain = _explained(sys.argv[1:])
        found = table(_plan(overrides))
        print(json.dumps(found, indent=1) if chosen.json else text(found, explain))

    return cli.run(show, "show")


def _explained(options: Sequence[str]) -> tuple[list[str], bool]:
    """The options of the run, and whether explain=true is among the others."""
    own = [option for option in options if option.startswith("explain=")]
    if wrong := [option for option in own if option not in ("explain=true", "explain=false")]:
        raise cli.UsageError(f"{wrong[0]!r}: allowed are explain=true and explain=false")
    return [option for option in options if option not in own], "explain=true" in own[-1:]


def _plan(overrides: Sequence[str]) -> config.Plan:
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        if override.is_sweep_override():
            raise cli.UsageError(f"{override.input_line!r} has several values; show prints one model at a time")
    tree = cli.composed("show", overrides)
    if tree["resume"] is not None:
        raise cli.UsageError(f"resume={tree['resume']!r}: show looks at options, not at runs; leave it out")
    return config.plan(tree)


if __name__ == "__main__":
    sys.exit(main())
