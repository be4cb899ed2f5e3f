"""Causal linear attention over chunks, forward and backward: dense products inside of a chunk, a state between them.

Shapes here: n chunks of C tokens, P = batch x groups, r heads a group. A few chunks are worked on at a time, so that
what is between the products stays in the processor's cache; backward computes it again. The decay is masked before it
is exponentiated, so that nothing overflows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# Matrices [C, C] of decays worked on at a time.
AT_ONCE = 64


@dataclass(frozen=True)
class Chunks:
    """The inputs: q, k [n, P, C, K]; v [n, P, C, r, V]; the rest None where there is none.

    Attributes:
        steps: [n, P, r, C] log-decay of each token; n is 1 where all chunks are alike.
        ids: [n, P, C] documents.
        before: [n, P] the document before each chunk.
        strict: a token does not see itself.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    steps: Tensor | None
    ids: Tensor | None
    before: Tensor | None
    strict: bool

    def parts(self, reverse: bool = False) -> Iterator[tuple[slice, Chunks, Factors]]:
        """A few chunks at a time, where they stand, and what their tokens are to each other."""
        size = max(1, AT_ONCE // (self.v.shape[1] * self.v.shape[3]))
        alike = self.ids is None and (self.steps is None or self.steps.shape[0] == 1)
        shared = Factors.of(self) if alike else None
        starts = range(0, self.q.shape[0], size)
        for start in reversed(starts) if reverse else starts:
            at = slice(start, start + size)
            steps, ids, before = (t if t is None or alike else t[at] for t in (self.steps, self.ids, self.before))
            part = Chunks(self.q[at], self.k[at], self.v[at], steps, ids, before, self.strict)
            yield at, part, shared or Factors.of(part)


@dataclass(frozen=True)
class Factors:
    """What is left of one token at another, None where it is everything.

    Attributes:
        inside: [n, P, r, C (i), C (j)] of token j at token i, 0 where i does not see j.
        query: [n, P, C, r, 1] of the state before the chunk at token i.
        key: [n, P, C, r, 1] of token j at the end of the chunk.
        keep: [n, P, 1, r, 1] of the state before the chunk at its end.
    """

    inside: Tensor
    query: Tensor | None = None
    key: Tensor | None = None
    keep: Tensor | None = None

    @classmethod
    def of(cls, part: Chunks) -> Factors:
        """From log-decays and documents."""
        size, kind = part.q.shape[2], part.q.dtype
        seen = torch.ones(1, 1, 1, size, size, dtype=kind, device=part.q.device).tril(-1 if part.strict else 0)
        if part.ids is not None:
            seen = seen * (part.ids[..., :, None] == part.ids[..., None, :])[:, :, None]
        if part.steps is None:
            factors = cls(seen)
        else:
            # In float64, so that a difference of sums keeps its digits behind a strong decay.
            since = part.steps.double().cumsum(-1)
            # log 0 is -inf: hidden before the exponential, not after it.
            between = (since[..., :, None] - since[..., None, :]).to(kind).add_(seen.log())
            factors = cls(
                between.exp_(),
                since.to(kind).exp().transpose(2, 3)[..., None],
                (since[..., -1:] - since).to(kind).exp().transpose(2, 3)[..., None],
                since[..., -1].to(kind).exp()[:, :, None, :, None],
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
    """y as v, the states before each chunk [n, P, K, r, V] and the state after the last [P, K, r, V]."""
    y = torch.empty_like(chunks.v, memory_format=torch.contiguous_format)
    states = state.new_empty(*chunks.q.shape[:2], *state.shape[1:])
    for at, part, factors in chunks.parts():
        y[at] = mixed(weights(part, factors), part.v)
        state = scan(_outer(part.k, scaled(part.v, factors.key)), factors.keep, state, states[at])
        behind = _read(part.q, states[at])
        y[at] += behind if factors.query is None else behind.mul_(factors.query)
    return y, states, state


def weights(part: Chunks, factors: Factors) -> Tensor:
    """Of token j at token i of the same chunk, [n, P, r or 1, C, C]."""
    return (part.q @ part.k.mT)[:, :, None] * factors.inside


def mixed(weights: Tensor, v: Tensor) -> Tensor:
    """Sums [n, P, C, r, V] of v with weights [n, P, r or 1, C, C]."""
    if weights.shape[2] == 1:
        return _read(weights[:, :, 0], v)
    return (weights @ v.transpose(2, 3)).transpose(2, 3)


def scan(added: Tensor, keep: Tensor | None, state: Tensor, states: Tensor, reverse: bool = False) -> Tensor:
    """The state after all chunks; fills `states` with those before each, from what each adds and keeps."""
    order = range(added.shape[0])
    for i in reversed(order) if reverse else order:
        states[i] = state
        state = added[i] + scaled(state, None if keep is None else keep[i if keep.shape[0] > 1 else 0])
    return state


def backward(
    chunks: Chunks, states: Tensor, dy: Tensor, dstate: Tensor, decay: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """Gradients of q, k, v, steps (None without `decay`) and the state; `states` from `forward`."""
    dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (chunks.q, chunks.k, chunks.v))
    dsteps = dy.new_empty(*dq.shape[:2], dv.shape[3], dv.shape[2]) if decay else None
    for at, part, factors in chunks.parts(reverse=True):
        dpart = dy[at]
        before, after = states[at], torch.empty_like(states[at])
        late = scaled(dpart, factors.query)
        dstate = scan(_outer(part.q, late), factors.keep, dstate, after, reverse=True)
        paired, part_weights = _paired(dpart, part.v, factors.inside.shape[2]), weights(part, factors)
        dweights = paired * factors.inside
        dweights = dweights[:, :, 0] if dweights.shape[2] == 1 else dweights.sum(2)
        early = scaled(part.v, factors.key)
        dq[at] = dweights @ part.k + late.flatten(3) @ before.flatten(3).mT
        dk[at] = dweights.mT @ part.q + early.flatten(3) @ after.flatten(3).mT
        dv[at] = mixed(part_weights.mT, dpart) + scaled(_read(part.k, after), factors.key)
        if dsteps is not None:
            carried = (
                (late * _read(part.q, before)).sum(-1),
                (early * _read(part.k, after)).sum(-1),
                (scaled(before, factors.keep) * after).sum((2, 4)),
            )
            dsteps[at] = _step_gradient(paired * part_weights, *carried)
    return dq, dk, dv, dsteps, dstate


def _step_gradient(pairs: Tensor, queries: Tensor, keys: Tensor, states: Tensor) -> Tensor:
    """Gradient [n, P, r, C] of each log-decay t: the sum over all pairs that it stands between.

    Args:
        pairs: [n, P, r, C (i), C (j)], j < t <= i.
        queries: [n, P, C (i), r] with the state before, t <= i.
        keys: [n, P, C (j), r] with the state after, j < t.
        states: [n, P, r], all t.
    """
    # Over i first, from t on, then over j; a difference of whole sums would lose what little a strong decay leaves.
    size = pairs.shape[-1]
    later = torch.ones(size, size, dtype=pairs.dtype, device=pairs.device).triu()
    across = (later @ pairs).tril_(-1).sum(-1)
    keys = keys.transpose(2, 3)
    return across + _from(queries.transpose(2, 3)) + (keys.cumsum(-1) - keys) + states[..., None]


def _from(x: Tensor) -> Tensor:
    """Sums from each place on."""
    return x.flip(-1).cumsum(-1).flip(-1)


def _outer(a: Tensor, b: Tensor) -> Tensor:
    """Sum over tokens: [n, P, C, K], [n, P, C, r, V] -> [n, P, K, r, V]."""
    return _read(a.mT, b)


def _read(a: Tensor, b: Tensor) -> Tensor:
    """A matrix product over all heads of a group: [n, P, I, J], [n, P, J, r, V] -> [n, P, I, r, V]."""
    return (a @ b.flatten(3)).unflatten(-1, b.shape[3:])


def _paired(a: Tensor, b: Tensor, heads: int) -> Tensor:
    """Products of tokens over their values [n, P, r, C, C]; summed over the heads where `heads` is 1."""
    if heads == 1:
        return (a.flatten(3) @ b.flatten(3).mT)[:, :, None]
    return a.transpose(2, 3) @ b.transpose(2, 3).mT
