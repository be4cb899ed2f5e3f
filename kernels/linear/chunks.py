"""Causal linear attention over chunks, forward and backward: dense products inside of a chunk, a state between them.

A few chunks are worked on at a time, so that what is between the products stays in the processor's cache; backward
computes it again. How depends on their decay: see `weak` and `strong`. Dimensions as in `parts`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

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

    def forward(self, pieces: Tensor, state: Tensor, y: Tensor, others: Tensor | None, states: Tensor) -> Tensor:
        """The state after the last chunk [P, K, r, V]; fills y, and for `backward` what is kept of each chunk.

        Args:
            pieces: what `weak.pieces` says of the steps.
            state: [P, K, r, V] before the first.
            others: [n, P, C, r V] for `weak.Part.forward`; None where it is not wanted.
            states: [n, P, K, r, V], to be filled.
        """
        for at, place, part in self._parts(pieces):
            state = part.forward(state, place.values(y), _own(others, at, place), states[at])
        return state

    def backward(
        self, pieces: Tensor, states: Tensor, others: Tensor | None, dy: Tensor, state: Tensor, dstate: Tensor,
        grads: Rows,
    ) -> Tensor:  # fmt: skip
        """The gradient of the state before the first chunk; fills `grads`, whose steps want `others`.

        Args:
            state, dstate: [P, K, r, V] after the last chunk.
        """
        held = (dstate * state).sum((1, 3))
        for at, place, part in self._parts(pieces, reverse=True):
            more = _own(others, at, place)
            dstate, held = part.backward(states[at], more, place.values(dy), dstate, held, grads.of(place))
        return dstate

    def _parts(
        self, pieces: Tensor, reverse: bool = False
    ) -> Iterator[tuple[slice, Place, weak.Part | strong.Part]]:
        """A few chunks at a time, and where they, or pieces of them, stand."""
        batch, time, heads, _ = self.rows.v.shape
        several, count = max(1, AT_ONCE // (batch * heads)), time // self.size
        needed, maker = pieces.tolist() or [1], _Maker(self, several)
        starts = range(0, count, several)
        for start in reversed(starts) if reverse else starts:
            at = slice(start, min(start + several, count))
            own = needed[at] if len(needed) > 1 else needed
            many = max(own) if min(own) else 0
            cuts = max(many, 1)
            place = Place(self.size // cuts, slice(at.start * cuts, at.stop * cuts), self.rows.q.shape[2])
            yield at, place, maker.part(place, many, at)


def _own(others: Tensor | None, at: slice, place: Place) -> Tensor | None:
    """[N, C, r V] of some chunks, or pieces of them: in memory that is theirs."""
    return None if others is None else others[at].view(-1, place.size, others.shape[-1])


@dataclass(frozen=True)
class _Maker:
    """Makes parts of `several` chunks, and once what they share."""

    chunks: Chunks
    several: int
    scales: dict[int, weak.Scales] = field(default_factory=dict)

    def part(self, place: Place, many: int, at: slice) -> weak.Part | strong.Part:
        """Of the chunks `at`, each cut in so many pieces; 0: of strong ones."""
        chunks, kind = self.chunks, self.chunks.kind
        rows, seen = chunks.rows.of(place), Seen.of(chunks.strict, chunks.ids, place, kind)
        if chunks.steps is None:
            return weak.Part.of(rows, seen, weak.Scales(), many, kind)
        if many:
            return weak.Part.of(rows, seen, self._scales(chunks.steps, many).at(place.at), many, kind)
        if len(chunks.steps) > 1 or chunks.ids is not None:
            own = chunks.steps[at] if len(chunks.steps) > 1 else chunks.steps
            return strong.Part.of(rows, strong.Factors.of(own, seen, kind), kind)
        return strong.Part.of(rows, self._factors, kind)

    def _scales(self, steps: Tensor, many: int) -> weak.Scales:
        if many not in self.scales:
            count = self.chunks.rows.q.shape[1] // self.chunks.size
            steps = steps.expand(count, -1, -1, -1).unflatten(-1, (many, -1)).movedim(3, 1).flatten(0, 1)
            self.scales[many] = weak.Scales.of(steps, self.several * many, self.chunks.kind)
        return self.scales[many]

    @cached_property
    def _factors(self) -> strong.Factors:
        """Of every chunk alike."""
        assert self.chunks.steps is not None
        return strong.Factors.of(self.chunks.steps, Seen(self.chunks.strict), self.chunks.kind)
