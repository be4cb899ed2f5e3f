"""Causal linear attention over chunks, forward and backward: dense products inside of a chunk, a state between them.

Shapes here: n chunks of C tokens, batch x groups = P, r heads a group; views of whole rows have batch and groups apart.
A few chunks are worked on at a time, so that what is between the products stays in the processor's cache; backward
computes it again. What a head's decay leaves of queries and keys scales these, so that all products are of whole heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

# Matrices [C, C] of decays worked on at a time.
AT_ONCE = 32


@dataclass(frozen=True)
class Part:
    """A few chunks: q, k [n, P, 1, C, K]; v [n, P, r, C, V]; contiguous, of the dtype to compute in."""

    q: Tensor
    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class Chunks:
    """Whole rows: q, k [n, B, G, 1, C, K]; v [n, B, G, r, C, V]; the rest None where there is none.

    Attributes:
        steps: [n, P, r, C] log-decay of each token; n is 1 where all chunks are alike.
        ids: [n, P, C] documents.
        before: [n, P] the document before each chunk.
        strict: a token does not see itself.
        kind: dtype to compute in.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    steps: Tensor | None
    ids: Tensor | None
    before: Tensor | None
    strict: bool
    kind: torch.dtype

    def parts(self, reverse: bool = False) -> Iterator[tuple[slice, Part, Factors]]:
        """A few chunks at a time, where they stand, and what their tokens are to each other."""
        size = max(1, AT_ONCE // self.v.shape[1:4].numel())
        alike = self.ids is None and (self.steps is None or self.steps.shape[0] == 1)
        sums = None if self.steps is None else summed(self.steps)
        shared = self._factors(sums, slice(1)) if alike else None
        starts = range(0, self.q.shape[0], size)
        for start in reversed(starts) if reverse else starts:
            at = slice(start, start + size)
            part = Part(*(load(x[at], self.kind) for x in (self.q, self.k, self.v)))
            yield at, part, shared or self._factors(sums, at)

    def _factors(self, sums: tuple[Tensor, Tensor, Tensor, Tensor] | None, at: slice) -> Factors:
        if sums is None:
            size = self.q.shape[-2]
            seen = torch.ones(1, 1, 1, size, size, dtype=self.kind, device=self.q.device)
            factors = Factors(seen.tril_(-1 if self.strict else 0))
        else:
            factors = Factors.of(self.strict, *(t if t.shape[0] == 1 else t[at] for t in sums))
        if self.ids is None or self.before is None:
            return factors
        return factors.within(self.ids[at], self.before[at])


@dataclass(frozen=True)
class Factors:
    """What is left of one token at another, None where it is everything.

    Attributes:
        inside: [n, P, r, C (i), C (j)] of token j at token i, 0 where i does not see j.
        query: [n, P, r, C, 1] of the state before the chunk at token i.
        key: [n, P, r, C, 1] of token j at the end of the chunk.
        keep: [n, P, r, 1, 1] of the state before the chunk at its end.
    """

    inside: Tensor
    query: Tensor | None = None
    key: Tensor | None = None
    keep: Tensor | None = None

    @classmethod
    def of(cls, strict: bool, coarse: Tensor, fine: Tensor, query: Tensor, key: Tensor) -> Factors:
        """From what `summed` gives."""
        between = (coarse[..., :, None] - coarse[..., None, :]).add_(fine[..., :, None] - fine[..., None, :])
        # Hidden before the exponential, which would overflow there, and after it.
        inside = between.tril_().exp_().tril_(-1 if strict else 0)
        return cls(inside, query, key, query[..., -1:, :])

    def within(self, ids: Tensor, before: Tensor) -> Factors:
        """The state belongs to one document; ids [n, P, C], before [n, P]."""
        last = ids[..., -1]
        inside = self.inside * (ids[..., :, None] == ids[..., None, :])[:, :, None]
        query, key = ((ids == id[..., None])[:, :, None, :, None].to(inside.dtype) for id in (before, last))
        keep = (before == last)[:, :, None, None, None].to(inside.dtype)
        return Factors(inside, *map(scaled, (query, key, keep), (self.query, self.key, self.keep)))


def summed(steps: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of log-decays [n, P, r, C]: their sums up to each token, and a rest of these; `Factors.query`, `Factors.key`."""
    # In float64 and kept in two numbers, so that a difference of sums keeps its digits behind a strong decay.
    since, kind = steps.double().cumsum(-1), steps.dtype
    coarse = since.to(kind)
    key = (since[..., -1:] - since).to(kind).exp()
    return coarse, (since - coarse).to(kind), coarse.exp()[..., None], key[..., None]


def scaled(x: Tensor, factor: Tensor | None) -> Tensor:
    """x times the factor, where there is one."""
    return x if factor is None else x * factor


def load(x: Tensor, kind: torch.dtype) -> Tensor:
    """A part of a view of whole rows, [n, B, G, ...] -> [n, P, ...]."""
    return x.flatten(1, 2).to(kind).contiguous()


def store(x: Tensor, view: Tensor) -> None:
    """The way back."""
    view.copy_(x.unflatten(1, view.shape[1:3]))


def forward(chunks: Chunks, state: Tensor, y: Tensor, states: Tensor) -> Tensor:
    """The state after the last chunk [P, r, K, V]; fills y, as v, and the states before each chunk [n, P, r, K, V]."""
    for at, part, factors in chunks.parts():
        before, state = scan(scaled(part.k, factors.key).mT @ part.v, factors.keep, state)
        states[at] = before
        inside = (part.q @ part.k.mT * factors.inside) @ part.v
        store(plus(inside, scaled(part.q, factors.query), before), y[at])
    return state


def plus(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """x + a @ b, in place; [n, P, r, ...], all with as many heads."""
    x.flatten(0, 2).baddbmm_(a.flatten(0, 2), b.flatten(0, 2))
    return x


def scan(added: Tensor, keep: Tensor | None, state: Tensor, reverse: bool = False) -> tuple[Tensor, Tensor]:
    """The states before each chunk and after all, from what each adds, which is overwritten, and keeps."""
    first, count = state[None], added.shape[0]
    keeps = [None] * count if keep is None else keep.expand(count, *keep.shape[1:]).unbind()
    order = list(zip(added.unbind(), keeps, strict=True))
    for more, kept in reversed(order) if reverse else order:
        state = more.add_(state) if kept is None else more.addcmul_(kept, state)
    return torch.cat([added[1:], first] if reverse else [first, added[:-1]]), state


@dataclass(frozen=True)
class Gradients:
    """To be filled: views of whole rows as those of `Chunks`; steps [n, P, r, C], None where not wanted."""

    q: Tensor
    k: Tensor
    v: Tensor
    steps: Tensor | None


def backward(chunks: Chunks, states: Tensor, dy: Tensor, dstate: Tensor, grads: Gradients) -> Tensor:
    """The gradient of the state in front; fills `grads`. Arguments as `forward` left them."""
    for at, part, factors in chunks.parts(reverse=True):
        q, k, v, dpart, before = part.q, part.k, part.v, load(dy[at], chunks.kind), states[at].contiguous()
        late, early = scaled(q, factors.query), scaled(k, factors.key)
        after, dstate = scan(late.mT @ dpart, factors.keep, dstate, reverse=True)
        weights = q @ k.mT * factors.inside
        store(plus(weights.mT @ dpart, early, after), grads.v[at])
        dweights, dlate, dearly = dpart @ v.mT, dpart @ before.mT, v @ after.mT
        if grads.steps is not None and factors.keep is not None:
            # In place of what is not needed again.
            queries, keys, pairs = late.mul_(dlate).sum(-1), early.mul_(dearly).sum(-1), weights.mul_(dweights)
            kept = (before * after).sum((-2, -1)) * factors.keep[..., 0, 0]
            grads.steps[at] = _step_gradient(pairs, queries, keys, kept)
        dscores = _over_heads(dweights.mul_(factors.inside))
        store(plus(_over_heads(scaled(dlate, factors.query)), dscores, k), grads.q[at])
        store(plus(_over_heads(scaled(dearly, factors.key)), dscores.mT, q), grads.k[at])
    return dstate


def _over_heads(x: Tensor) -> Tensor:
    """The sum over the heads of a group [n, P, r, ...]."""
    return x if x.shape[2] == 1 else x.sum(2, keepdim=True)


def _step_gradient(pairs: Tensor, queries: Tensor, keys: Tensor, states: Tensor) -> Tensor:
    """Gradient [n, P, r, C] of each log-decay t: the sum over all pairs that it stands between.

    Args:
        pairs: [n, P, r, C (i), C (j)], j < t <= i; overwritten.
        queries: [n, P, r, C (i)] with the state before, t <= i.
        keys: [n, P, r, C (j)] with the state after, j < t.
        states: [n, P, r], all t.
    """
    # Sums of what a strong decay leaves, over j up to t, then over i; their differences would lose it.
    upto = pairs.cumsum_(-1).tril_(-1).sum(-2) + keys.cumsum(-1)
    return pad(upto[..., :-1], (1, 0)) + queries.flip(-1).cumsum(-1).flip(-1) + states[..., None]
