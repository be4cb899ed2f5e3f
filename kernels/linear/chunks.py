"""Causal linear attention over chunks, forward and backward: dense products inside of a chunk, a state between them.

Shapes here: P = batch x groups, n chunks of C tokens, r heads a group. A few chunks are worked on at a time, so that
what is between the products stays in the processor's cache; backward computes it again. The decay is masked before it
is exponentiated, so that nothing overflows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# Matrices [C, C] of decays worked on at a time.
AT_ONCE = 8


@dataclass(frozen=True)
class Chunks:
    """The inputs: q, k [P, n, C, K]; v [P, n, C, r, V]; the rest None where there is none.

    Attributes:
        steps: [P, n, r, C] log-decay of each token; n is 1 where all chunks are alike.
        ids: [P, n, C] documents.
        before: [P, n] the document before each chunk.
        strict: a token does not see itself.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    steps: Tensor | None
    ids: Tensor | None
    before: Tensor | None
    strict: bool

    def parts(self) -> Iterator[tuple[slice, Chunks]]:
        """A few chunks at a time, and where they stand."""
        size = max(1, AT_ONCE // (self.v.shape[0] * self.v.shape[3]))
        for start in range(0, self.q.shape[1], size):
            at = slice(start, start + size)
            steps = self.steps if self.steps is None or self.steps.shape[1] == 1 else self.steps[:, at]
            ids, before = (t if t is None else t[:, at] for t in (self.ids, self.before))
            yield at, Chunks(self.q[:, at], self.k[:, at], self.v[:, at], steps, ids, before, self.strict)


@dataclass(frozen=True)
class Factors:
    """What is left of one token at another, None where it is everything.

    Attributes:
        inside: [P, n, r, C (i), C (j)] of token j at token i, 0 where i does not see j.
        query: [P, n, C, r, 1] of the state before the chunk at token i.
        key: [P, n, C, r, 1] of token j at the end of the chunk.
        keep: [P, n, 1, r, 1] of the state before the chunk at its end.
    """

    inside: Tensor
    query: Tensor | None = None
    key: Tensor | None = None
    keep: Tensor | None = None

    @classmethod
    def of(cls, part: Chunks) -> Factors:
        """From log-decays and documents."""
        size, kind = part.q.shape[2], part.q.dtype
        seen = torch.ones(size, size, dtype=torch.bool, device=part.q.device).tril(-1 if part.strict else 0)
        if part.ids is not None:
            seen = seen & (part.ids[..., :, None] == part.ids[..., None, :])
        seen = seen.expand(*part.q.shape[:2], size, size)[:, :, None]
        if part.steps is None:
            factors = cls(seen.to(kind))
        else:
            factors = cls(
                _between(part.steps).masked_fill_(~seen, float("-inf")).exp_(),
                part.steps.cumsum(-1).exp().transpose(2, 3)[..., None],
                _after(part.steps).exp().transpose(2, 3)[..., None],
                part.steps.sum(-1).exp()[:, :, None, :, None],
            )
        return factors if part.ids is None or part.before is None else factors.within(part.ids, part.before)

    def within(self, ids: Tensor, before: Tensor) -> Factors:
        """The state belongs to one document."""
        last = ids[..., -1]
        query, key = ((ids == id[..., None])[..., None, None].to(self.inside.dtype) for id in (before, last))
        keep = (before == last)[:, :, None, None, None].to(self.inside.dtype)
        return Factors(self.inside, *map(scaled, (query, key, keep), (self.query, self.key, self.keep)))


def scaled(x: Tensor, factor: Tensor | None) -> Tensor:
    """x times the factor, where there is one."""
    return x if factor is None else x * factor


def forward(chunks: Chunks, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """y as v, the states before each chunk [P, n, K, r, V] and the state after the last [P, K, r, V]."""
    y = torch.empty_like(chunks.v, memory_format=torch.contiguous_format)
    states = state.new_empty(*chunks.q.shape[:2], *state.shape[1:])
    for at, part in chunks.parts():
        factors = Factors.of(part)
        y[:, at] = mixed(weights(part, factors), part.v)
        state = scan(_outer(part.k, scaled(part.v, factors.key)), factors.keep, state, states[:, at])
        y[:, at] += scaled(_read(part.q, states[:, at]), factors.query)
    return y, states, state


def weights(part: Chunks, factors: Factors) -> Tensor:
    """Of token j at token i of the same chunk, [P, n, r or 1, C, C]."""
    return (part.q @ part.k.mT)[:, :, None] * factors.inside


def mixed(weights: Tensor, v: Tensor) -> Tensor:
    """Sums [P, n, C, r, V] of v with weights [P, n, r or 1, C, C]."""
    if weights.shape[2] == 1:
        return _read(weights[:, :, 0], v)
    return (weights @ v.transpose(2, 3)).transpose(2, 3)


def scan(added: Tensor, keep: Tensor | None, state: Tensor, states: Tensor, reverse: bool = False) -> Tensor:
    """The state after all chunks; fills `states` with those before each, from what each adds and keeps."""
    order = range(added.shape[1])
    for i in reversed(order) if reverse else order:
        states[:, i] = state
        state = added[:, i] + scaled(state, None if keep is None else keep[:, i if keep.shape[1] > 1 else 0])
    return state


def backward(
    chunks: Chunks, states: Tensor, dy: Tensor, dstate: Tensor, decay: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """Gradients of q, k, v, steps (None without `decay`) and the state; `states` from `forward`."""
    dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (chunks.q, chunks.k, chunks.v))
    dsteps = dy.new_empty(*dq.shape[:2], dv.shape[3], dv.shape[2]) if decay else None
    for at, part in reversed(list(chunks.parts())):
        factors, dpart = Factors.of(part), dy[:, at]
        before, after = states[:, at], torch.empty_like(states[:, at])
        late = scaled(dpart, factors.query)
        dstate = scan(_outer(part.q, late), factors.keep, dstate, after, reverse=True)
        paired, part_weights = _paired(dpart, part.v, factors.inside.shape[2]), weights(part, factors)
        dweights = (paired * factors.inside).sum(2)
        early = scaled(part.v, factors.key)
        dq[:, at] = dweights @ part.k + late.flatten(3) @ before.flatten(3).mT
        dk[:, at] = dweights.mT @ part.q + early.flatten(3) @ after.flatten(3).mT
        dv[:, at] = mixed(part_weights.mT, dpart) + scaled(_read(part.k, after), factors.key)
        if dsteps is not None:
            carried = (
                (late * _read(part.q, before)).sum(-1),
                (early * _read(part.k, after)).sum(-1),
                (scaled(before, factors.keep) * after).sum((2, 4)),
            )
            dsteps[:, at] = _step_gradient(paired * part_weights, *carried)
    return dq, dk, dv, dsteps, dstate


def _step_gradient(pairs: Tensor, queries: Tensor, keys: Tensor, states: Tensor) -> Tensor:
    """Gradient [P, n, r, C] of each log-decay t: the sum over all pairs that it stands between.

    Args:
        pairs: [P, n, r, C (i), C (j)], j < t <= i.
        queries: [P, n, C (i), r] with the state before, t <= i.
        keys: [P, n, C (j), r] with the state after, j < t.
        states: [P, n, r], all t.
    """
    ones = torch.ones(pairs.shape[-1], pairs.shape[-1], dtype=pairs.dtype, device=pairs.device)
    inside = ((ones.triu() @ pairs) * ones.tril(-1)).sum(-1)
    outside = ones.triu() @ queries + ones.tril(-1) @ keys
    return inside + outside.transpose(2, 3) + states[..., None]


def _outer(a: Tensor, b: Tensor) -> Tensor:
    """Sum over tokens: [P, n, C, K], [P, n, C, r, V] -> [P, n, K, r, V]."""
    return _read(a.mT, b)


def _read(a: Tensor, b: Tensor) -> Tensor:
    """A matrix product over all heads of a group: [P, n, I, J], [P, n, J, r, V] -> [P, n, I, r, V]."""
    return (a @ b.flatten(3)).unflatten(-1, b.shape[3:])


def _paired(a: Tensor, b: Tensor, heads: int) -> Tensor:
    """Products of tokens over their values [P, n, r, C, C]; summed over the heads where `heads` is 1."""
    if heads == 1:
        return (a.flatten(3) @ b.flatten(3).mT)[:, :, None]
    return a.transpose(2, 3) @ b.transpose(2, 3).mT


def _between(steps: Tensor) -> Tensor:
    """Log-decay from token j to token i >= j of a chunk, [.., C] -> [.., C (i), C (j)].

    Summed for each j alone: a difference of two sums from the chunk's start loses all digits behind a strong decay.
    """
    ones = torch.ones(steps.shape[-1], steps.shape[-1], dtype=steps.dtype, device=steps.device)
    return (steps[..., None, :] * ones.tril()) @ ones.tril(-1)


def _after(steps: Tensor) -> Tensor:
    """Log-decay from each token to the end of its chunk, its own left out."""
    ones = torch.ones(steps.shape[-1], steps.shape[-1], dtype=steps.dtype, device=steps.device)
    return steps @ ones.tril(-1)
