"""A few chunks of any decay: matrices of what it leaves between tokens, for each head.

n chunks, batch x groups = P, r heads a group; all products are of whole heads. Backward computes these matrices again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.linear.parts import Rows, Seen, gain, load, scaled, store


@dataclass(frozen=True)
class Factors:
    """What is left of one token at another.

    Attributes:
        inside: [n, P, r, C (i), C (j)] of token j at token i, 0 where i does not see j.
        query: [n, P, r, C, 1] of the state before the chunk at token i.
        key: [n, P, r, C, 1] of token j at the end of the chunk.
        keep: [n, P, r, 1, 1] of the state before the chunk at its end.
    """

    inside: Tensor
    query: Tensor
    key: Tensor
    keep: Tensor

    @classmethod
    def of(cls, steps: Tensor, seen: Seen, kind: torch.dtype) -> Factors:
        """From the log-decays [n or 1, P, r, C] of each token."""
        # In float64 and kept in two numbers, so that a difference of sums keeps its digits behind a strong decay.
        since = steps.double().cumsum(-1)
        coarse = since.to(kind)
        fine = (since - coarse).to(kind)
        between = (coarse[..., :, None] - coarse[..., None, :]).add_(fine[..., :, None] - fine[..., None, :]).tril_()
        # Hidden before the exponential, which would overflow there, and after it.
        if seen.same is not None:
            between = between.expand(len(seen.same), *between.shape[1:]).clone()
        inside = seen.hide_(between.exp_())
        query, key = coarse.exp()[..., None], (since[..., -1:] - since).to(kind).exp()[..., None]
        starts, ends, kept = (t if t is None else t[:, :, None] for t in (seen.starts, seen.ends, seen.kept))
        return cls(inside, scaled(query, starts), scaled(key, ends), scaled(query[..., -1:, :], kept))


@dataclass(frozen=True)
class Part:
    """A few chunks, ready for products: q, k [n, P, 1, C, K]; v [n, P, r, C, V]."""

    q: Tensor
    k: Tensor
    v: Tensor
    values: Tensor
    gain: Tensor | None
    factors: Factors

    @classmethod
    def of(cls, rows: Rows, factors: Factors, kind: torch.dtype) -> Part:
        """From views of the rows."""
        q, k = (load(x, kind).flatten(1, 2)[:, :, None] for x in (rows.q, rows.k))
        v, own = headed(rows.v, kind), gain(rows, kind)
        v = v if own is None else v * own.transpose(2, 3)
        return cls(q, k, v, rows.v, own, factors)

    def forward(self, state: Tensor, y: Tensor, others: Tensor | None, kept: Tensor) -> Tensor:
        """As `weak.Part.forward`; of `others`, which its backward does not want, nothing is filled."""
        factors = self.factors
        before, state = scan((self.k * factors.key).mT @ self.v, factors.keep, state.transpose(1, 2))
        kept.copy_(before.transpose(2, 3))
        inside = (self.q @ self.k.mT * factors.inside) @ self.v
        store(plus(inside, self.q * factors.query, before).transpose(2, 3), y)
        return state.transpose(1, 2)

    def backward(
        self, kept: Tensor, others: Tensor | None, dy: Tensor, dstate: Tensor, held: Tensor, grads: Rows
    ) -> tuple[Tensor, Tensor]:
        """As `weak.Part.backward`."""
        q, k, v, factors = self.q, self.k, self.v, self.factors
        dy, before = headed(dy, v.dtype), kept.transpose(2, 3).contiguous()
        late, early = q * factors.query, k * factors.key
        after, dstate = scan(late.mT @ dy, factors.keep, dstate.transpose(1, 2), reverse=True)
        weights = q @ k.mT * factors.inside
        dv = plus(weights.mT @ dy, early, after).transpose(2, 3)
        store(dv, grads.v, self.gain)
        if grads.gain is not None:
            store((dv.unflatten(1, self.values.shape[1:3]) * self.values).sum(-1), grads.gain)
        dweights, dlate, dearly = dy @ v.mT, dy @ before.mT, v @ after.mT
        if grads.steps is not None:
            # In place of what is not needed again.
            queries, keys, pairs = late.mul_(dlate).sum(-1), early.mul_(dearly).sum(-1), weights.mul_(dweights)
            states = (before * after).sum((-2, -1)) * factors.keep[..., 0, 0]
            store(_step_gradient(pairs, queries, keys, states).transpose(2, 3), grads.steps)
        dscores = dweights.mul_(factors.inside).sum(2)
        store(plus(dlate.mul_(factors.query).sum(2), dscores, k[:, :, 0]), grads.q)
        store(plus(dearly.mul_(factors.key).sum(2), dscores.mT, q[:, :, 0]), grads.k)
        return dstate.transpose(1, 2), (dstate * before[0]).sum((-2, -1))


def plus(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """x + a @ b, in place; equal leading dimensions."""
    x.flatten(0, -3).baddbmm_(a.flatten(0, -3), b.flatten(0, -3))
    return x


def scan(added: Tensor, keep: Tensor, state: Tensor, reverse: bool = False) -> tuple[Tensor, Tensor]:
    """The states before each chunk and after all, from what each adds, which is overwritten, and keeps."""
    first, keeps = state[None], keep.expand(added.shape[0], *keep.shape[1:]).unbind()
    order = list(zip(added.unbind(), keeps, strict=True))
    for more, kept in reversed(order) if reverse else order:
        state = more.addcmul_(kept, state)
    return torch.cat([added[1:], first] if reverse else [first, added[:-1]]), state


def headed(x: Tensor, kind: torch.dtype) -> Tensor:
    """[n, B, G, C, r, V] -> [n, P, r, C, V], contiguous, of the dtype to compute in."""
    return x.transpose(3, 4).to(kind).contiguous().flatten(1, 2)


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
