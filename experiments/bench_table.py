"""What a benchmark says in a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from experiments.bench_cell import TRAIN
from experiments.metrics import format_value
from experiments.timing import SHARED_CORES

_TITLES = ("stack", "length", "train ms", "spread", "CPU ms", "tokens/s", "prefill ms", "decode ms", "peak memory",
           "FLOPs", "FLOP/s", "of peak")
_NOTES = """\
Times are medians over the rounds; the spread is that of a training step, (highest - lowest) / median. A training step
is forward, loss and backward, without the optimiser. FLOPs are counted, of one training step; FLOP/s are those a second
(on a CPU: a second of one core), "of peak" against the fastest matrix product here. "-": the model cannot do it, or
only by running everything again."""


@dataclass(frozen=True)
class Result:
    """How a cell ended: its metrics by the names of runs, or why there are none.

    Args:
        flops: counted, of one call of each thing that was timed.
    """

    label: str
    length: Any
    flops: Mapping[str, float] = field(default_factory=dict)
    values: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""

    @property
    def shared(self) -> bool:
        """Did others use the machine so much that it can be seen in the times?"""
        return self.values.get("measured/shared_cores", 0.0) >= SHARED_CORES

    def line(self) -> str:
        """For the time until the table."""
        if self.reason:
            return f"{self.label} at {self.length}: FAILED: {self.reason}"
        return f"{self.label} at {self.length}: {self.values['measured/train_step_ms']:.3g} ms a training step"


def table(results: Sequence[Result]) -> str:
    """A line a cell, in the given order; then how to read it and what to distrust."""
    rows = [_TITLES, *(_row(result) for result in results)]
    widths = [max(len(row[i]) for row in rows if len(row) == len(_TITLES)) for i in range(len(_TITLES))]
    lines = []
    for row in rows:
        # A failed row ends with its reason, as long as that is.
        sides = (str.ljust, *[str.rjust] * (len(row) - 1))
        lines.append("  ".join(side(cell, width) for side, cell, width in zip(sides, row, widths, strict=False)))
    failed = sum(not result.values for result in results)
    counts = f"{len(results) - failed} measured, {failed} failed"
    return "\n".join([*lines, "", _NOTES, *_shared(results), *_faster(results), counts])


def _row(result: Result) -> tuple[str, ...]:
    if result.reason:
        return result.label, str(result.length), f"FAILED: {result.reason.splitlines()[0]}"

    def value(name: str) -> str:
        found = result.values.get(f"measured/{name}")
        return "-" if found is None else format_value(f"measured/{name}", found).removesuffix(" ms")

    peak = result.values["measured/train_flops_per_second"] / result.values["measured/peak_flops_per_second"]
    return (
        result.label, str(result.length), value("train_step_ms"),
        f"{result.values['measured/train_step_spread']:.0%}", value("train_step_cpu_ms"),
        value("train_tokens_per_second") + (" *" if result.shared else ""),
        value(f"prefill_ms_at_{result.length}"), value(f"decode_ms_at_{result.length}"),
        value("peak_memory_bytes"), format_value("complexity/flops_per_token_train", result.flops[TRAIN]),
        value("train_flops_per_second"), f"{peak:.0%}",
    )


def _shared(results: Sequence[Result]) -> list[str]:
    most = max((result.values["measured/shared_cores"] for result in results if result.shared), default=0.0)
    note = f"* shared machine: others kept up to {most:.1f} cores busy meanwhile; left alone it is faster"
    return [note] if most else []


def _faster(results: Sequence[Result]) -> list[str]:
    """Twice the tokens are never less work."""
    notes = []
    for label in dict.fromkeys(result.label for result in results):
        own = sorted((r for r in results if r.label == label and r.values), key=lambda result: result.length)
        for short, long in pairwise(own):
            before, after = (r.flops[TRAIN] / r.values["measured/train_flops_per_second"] for r in (short, long))
            if after < before:
                took = f"{label}: {long.length} tokens took less time than {short.length}"
                notes.append(f"distrust {took}: so short, launching takes longer than the work, or the machine changed")
    return notes
