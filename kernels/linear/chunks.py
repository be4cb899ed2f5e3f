"""Causal linear attention over chunks, forward and backward: dense products inside of a chunk, a state between them.

A few chunks are worked on at a time, so that what is between the products stays in the processor's cache; backward
computes it again. How depends on their decay: see `weak` and `strong`. Dimensions as in `parts`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.linear import strong, weak
from kernels.linear.frame import Ids
from kernels.linear.parts import Place, Rows, Seen

# Chunks of heads worked on at a time.
AT_ONCE = 32


@dataclass(frozen=True)
class Chunks:
    """Rows of whole chunks.

    Attributes:
        rows: q, k, v.
        size: C.
        steps: [n, P, r, C] log-decay of each token, None: none; n is 1 where all chunks have the same.
        ids: documents of the rows; None: each is one.
        strict: a token does not see itself.
        kind: dtype to compute in.
    """

    rows: Rows
    size: int
    steps: Tensor | None
    ids: Ids | None
    strict: bool
    kind: torch.dtype

    def forward(self, state: Tensor, y: Tensor, states: Tensor) -> Tensor:
        """The state after the last chunk [P, K, r, V]; fills y, and for `backward` what is kept of each chunk.

        Args:
            state: [P, K, r, V] before the first.
            states: [n, P, K, r, V], to be filled.
        """
        for at, place, part in self._parts():
            state = part.forward(state, place.values(y), states[at])
        return state

    def backward(
        self, states: Tensor, state: Tensor, y: Tensor | None, dy: Tensor, dstate: Tensor, grads: Rows
    ) -> Tensor:
        """The gradient of the state before the first chunk; fills `grads`, whose steps want y; `state` is the last."""
        held = (dstate * state).sum((1, 3))
        for at, place, part in self._parts(reverse=True):
            own = None if y is None else place.values(y)
            dstate, held = part.backward(states[at], own, place.values(dy), dstate, held, grads.of(place))
        return dstate

    def _parts(self, reverse: bool = False) -> Iterator[tuple[slice, Place, weak.Part | strong.Part]]:
        """A few chunks at a time, and where they, or pieces of them, stand."""
        batch, time, heads, _ = self.rows.v.shape
        several, count = max(1, AT_ONCE // (batch * heads)), time // self.size
        pieces = [1] if self.steps is None else weak.pieces(self.steps)
        scales: dict[int, weak.Scales] = {}
        starts = range(0, count, several)
        for start in reversed(starts) if reverse else starts:
            at = slice(start, min(start + several, count))
            own = at if len(pieces) == count else slice(1)
            is_weak, many = min(pieces[own]) > 0, max(1, *pieces[own])
            place = Place(self.size // many, slice(at.start * many, at.stop * many), self.rows.q.shape[2])
            rows, seen = self.rows.of(place), Seen.of(self.strict, self.ids, place, self.kind)
            if self.steps is not None and not is_weak:
                yield at, place, strong.Part.of(rows, seen, self.steps[own], self.kind)
                continue
            if self.steps is not None and many not in scales:
                steps = self.steps.expand(count, -1, -1, -1).unflatten(-1, (many, -1))
                scales[many] = weak.Scales.of(steps.movedim(3, 1).flatten(0, 1), several * many, self.kind)
            found = scales[many].at(place.at) if many in scales else weak.Scales()
            yield at, place, weak.Part.of(rows, seen, found, many, self.kind)
