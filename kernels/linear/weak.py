"""A few chunks without a decay, or with one that can be taken apart: exp(c_i - c_j) = exp(c_i - m) exp(m - c_j).

c is the sum of log-decays from the start of a chunk, m half of it at the end. What token i reads is scaled by the one
factor, what token j writes by the other; so the heads of a group have the same scores, and each product is for all of
them at once. A chunk whose decay is too strong for that is cut in pieces, which are chunks from there on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.linear.parts import Rows, Seen, gain, load, product, scaled, store

# Of c - m: exp(30) is 1e13, by which what is in between comes closer to the ends of float32.
LIMIT = 30.0
# The gradient of a step is a difference of sums, of which that step leaves little; exp(-2) is one digit of them.
STEEPEST = 2.0
PIECES = (2, 1)


def pieces(steps: Tensor) -> Tensor:
    """In how many each chunk must be cut; 0 where its decay is too strong for any; steps [n, P, r, C]."""
    found = torch.zeros(len(steps), dtype=torch.long, device=steps.device)
    decays = (steps.amax((1, 2, 3)) <= 0) & (steps.amin((1, 2, 3)) >= -STEEPEST)
    for many in PIECES:
        if steps.shape[-1] % many == 0:
            total = steps.unflatten(-1, (many, -1)).sum(-1)
            found[decays & (total.amin((1, 2, 3)) >= -2 * LIMIT)] = many
    return found


@dataclass(frozen=True)
class Scales:
    """Factors, by head; None without a decay.

    Attributes:
        read: [n, P, C, r, 1] exp(c_i - m), of what token i reads.
        write: [n, P, C, r, 1] exp(m - c_j), of what token j writes.
        first: [n, P, 1, r, 1] exp(m), of the state before a chunk.
        keep: [n, P, 1, r, 1] exp(c_C - m + m'), of what a chunk leaves, where the next one reads it; m' is its m.
    """

    read: Tensor | None = None
    write: Tensor | None = None
    first: Tensor | None = None
    keep: Tensor | None = None

    @classmethod
    def of(cls, steps: Tensor, every: int, kind: torch.dtype) -> Scales:
        """From the log-decays [n, P, r, C] of each token; m' is 0 after `every` chunks, where the state is as it is."""
        # In float64, for the differences.
        since = steps.double().cumsum(-1).transpose(2, 3)
        end = since[:, :, -1:]
        middle = end / 2
        after = torch.cat([middle[1:], torch.zeros_like(middle[:1])])
        after[every - 1 :: every] = 0
        logs = since - middle, middle - since, middle, end - middle + after
        return cls(*(log.exp().to(kind)[..., None] for log in logs))

    def at(self, at: slice) -> Scales:
        """Of some chunks."""
        return Scales(*(x if x is None else x[at] for x in (self.read, self.write, self.first, self.keep)))


@dataclass(frozen=True)
class Part:
    """A few chunks, ready for products.

    Between its chunks a state, [n, P, K, r, V], is exp(m) times what it is at the edges. Of pieces that were a chunk
    only the first one's is kept.

    Attributes:
        q, k: [N, C, K], N = n P.
        v: [N, C, r V] what tokens write: values times `write`.
        values: [n, B, G, C, r, V] a view of the rows.
        write: [n, P, C, r, 1] gain times `scales.write`; None: 1.
        shape: n, P, C, r, V.
        pieces: how many of the n were a chunk.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    values: Tensor
    write: Tensor | None
    seen: Seen
    scales: Scales
    shape: tuple[int, ...]
    pieces: int

    @classmethod
    def of(cls, rows: Rows, seen: Seen, scales: Scales, pieces: int, kind: torch.dtype) -> Part:
        """From views of the rows."""
        write = product(scales.write, gain(rows, kind))
        q, k, v = load(rows.q, kind), load(rows.k, kind), load(rows.v, kind, write)
        q, k, shape = q.flatten(0, 2), k.flatten(0, 2), tuple(v.flatten(1, 2).shape)
        return cls(q, k, v.view(*q.shape[:2], -1), rows.v, write, seen, scales, shape, pieces)

    def forward(self, state: Tensor, y: Tensor, others: Tensor | None, kept: Tensor) -> Tensor:
        """The state after it [P, K, r, V]; fills y, a state a chunk, and if asked what is read of others [N, C, r V].

        That is read of other tokens and the state before, not yet scaled; without a decay, it is not asked for.
        """
        scales = self.scales
        states = kept if self.pieces == 1 else kept.new_empty(self.shape[0], *kept.shape[1:])
        last = self._scan(scaled(state, self._first()), states)
        if self.pieces > 1:
            kept.copy_(states[:: self.pieces])
        read = torch.bmm(self._scores(strict=scales.read is not None), self.v, out=others)
        read.baddbmm_(self._asking(), _wide(states))
        if scales.read is not None:
            # And of itself.
            read = torch.addcmul(read.view(self.shape), self._own(), self.v.view(self.shape))
        store(read, y, scales.read)
        return last

    def backward(
        self, kept: Tensor, others: Tensor | None, dy: Tensor, dstate: Tensor, held: Tensor, grads: Rows
    ) -> tuple[Tensor, Tensor]:
        """The gradient of the state before it, and of its scale; fills the others. Arguments as `forward` left them.

        Args:
            dstate, held: [P, K, r, V], [P, r] the same of the state after it.
        """
        q, k, v, scales, seen = self.q, self.k, self.v, self.scales, self.seen
        states = kept
        if self.pieces > 1:
            states = kept.new_empty(self.shape[0], *kept.shape[1:])
            self._scan(kept[0], states)
        late = load(dy, v.dtype, scales.read).view(v.shape)
        dstates, after = self._scan_back((self._asking().mT @ late).view(states.shape), dstate)
        scale = (dstates * states).sum((2, 4))
        dv = (self._scores(strict=others is not None).mT @ late).baddbmm_(self._offering(), _wide(after))
        self._finish(dv, late, others, dy, torch.cat([scale[1:], held[None]]), grads)
        dscores = seen.hide_(late @ v.mT)
        dq = scaled(late @ _wide(states).mT, _flat(seen.starts)).baddbmm_(dscores, k)
        dk = scaled(v @ _wide(after).mT, _flat(seen.ends)).baddbmm_(dscores.mT, q)
        store(dq, grads.q)
        store(dk, grads.k)
        return scaled(dstates[0], self._first()), scale[0]

    def _finish(self, dv: Tensor, late: Tensor, others: Tensor | None, dy: Tensor, held: Tensor, grads: Rows) -> None:
        """Gradients of values, gains and log-decays, from dv; with `others`, without what a token reads of itself.

        That has no part in the gradient of log-decays, and would only be lost again in a difference.
        """
        if others is not None and grads.steps is not None:
            # By how much a token's reads are scaled, but its writes.
            since = (late * others).addcmul_(self.v, dv, value=-1).view(self.shape).sum(-1)
            store(_step_gradient(since, held, self.seen), grads.steps)
            dv.view(self.shape).addcmul_(self._own(), late.view(self.shape))
        store(dv, grads.v, self.write)
        if grads.gain is not None:
            written = dv.view(dy.shape).mul_(self.values).sum(-1, keepdim=True)
            store(scaled(written.flatten(1, 2), self.scales.write), grads.gain)

    def _own(self) -> Tensor:
        """Each token's score for itself [n, P, C, 1, 1]."""
        own = (self.q * self.k).sum(-1) if not self.seen.strict else torch.zeros_like(self.q[..., 0])
        return own.view(*self.shape[:3], 1, 1)

    def _scores(self, strict: bool = False) -> Tensor:
        """[N, C, C]; strict: but those."""
        return self.seen.hide_(self.q @ self.k.mT, strict)

    def _asking(self) -> Tensor:
        """Queries of the state before."""
        return scaled(self.q, _flat(self.seen.starts))

    def _offering(self) -> Tensor:
        """Keys in the state after."""
        return scaled(self.k, _flat(self.seen.ends))

    def _first(self) -> Tensor | None:
        return None if self.scales.first is None else self.scales.first[0]

    def _scan(self, state: Tensor, states: Tensor) -> Tensor:
        """The state after all chunks; fills those before each."""
        added = (self._offering().mT @ self.v).view(states.shape).unbind()
        states[0] = state
        afters = *states[1:].unbind(), torch.empty_like(state)
        for before, more, after, kept, keep in zip(states.unbind(), added, afters, *self._kept(), strict=True):
            torch.add(more, scaled(before, kept), out=after)
            if keep is not None:
                after.mul_(keep)
        return afters[-1]

    def _scan_back(self, added: Tensor, dstate: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the state before each chunk, in place of what its tokens add to them, and of what it writes."""
        after = torch.empty_like(added)
        chunks = list(zip(after.unbind(), added.unbind(), *self._kept(), strict=True))
        for later, more, kept, keep in reversed(chunks):
            if keep is None:
                later.copy_(dstate)
            else:
                torch.mul(dstate, keep, out=later)
            dstate = more.add_(scaled(later, kept))
        return added, after

    def _kept(self) -> tuple[Sequence[Tensor | None], Sequence[Tensor | None]]:
        """Is the state before a chunk of the document of the one after; what is kept of both at its end."""
        kept, keep = self.seen.kept, self.scales.keep
        nothing = [None] * self.shape[0]
        return nothing if kept is None else kept[..., None].unbind(), nothing if keep is None else keep.unbind()


def _flat(x: Tensor | None) -> Tensor | None:
    """[n, P, ...] -> [N, ...]."""
    return None if x is None else x.flatten(0, 1)


def _wide(states: Tensor) -> Tensor:
    """[n, P, K, r, V] -> [N, K, r V]."""
    return states.flatten(0, 1).flatten(2)


def _step_gradient(since: Tensor, held: Tensor, seen: Seen) -> Tensor:
    """Gradient [n, P, C, r] of each log-decay t: of all that stands before t and is read at t or later.

    That is all that is read from t on, in its document or through the state after it, but what is written from t on.
    So it is 0, and not nearly, where nothing is read from t on.

    Args:
        since: [n, P, C, r] gradient of what a token's reads are scaled by, less that of its writes.
        held: [n, P, r] that of the state after the chunk.
    """
    wide = since.double()
    if seen.same is None or seen.ends is None:
        return (wide.flip(2).cumsum(2).flip(2) + held[:, :, None]).to(since.dtype)
    return (seen.same.double().triu() @ wide + seen.ends * held[:, :, None]).to(since.dtype)
