"""A few chunks without a decay, or with one that can be taken apart: exp(c_i - c_j) = exp(c_i - m) exp(m - c_j).

c is the sum of log-decays from the start of a chunk, m half of it at the end. What token i reads is scaled by the one
factor, what token j writes by the other; so the heads of a group have the same scores, and each product is for all of
them at once. A chunk whose decay is too strong for that is cut in pieces, which are chunks from there on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import pad

from kernels.linear.parts import Rows, Seen, load, plus, scaled, store

# Of c - m: its exponential is 2e17, and the product of two of them is no denormal number of float32.
LIMIT = 40.0
# The gradient of a step is a difference of sums, of which that step leaves little; exp(-2) is one digit of them.
STEEPEST = 2.0
# So steep everywhere, half a chunk of 64 is within the limit.
PIECES = (2, 1)


def pieces(steps: Tensor) -> list[int]:
    """In how many each chunk must be cut; 0 where its decay is too strong for any; steps [n, P, r, C]."""
    found = torch.zeros(len(steps), dtype=torch.long, device=steps.device)
    decays = (steps.amax((1, 2, 3)) <= 0) & (steps.amin((1, 2, 3)) >= -STEEPEST)
    for many in PIECES:
        if steps.shape[-1] % many == 0:
            total = steps.unflatten(-1, (many, -1)).sum(-1)
            found[decays & (total.amin((1, 2, 3)) >= -2 * LIMIT)] = many
    return found.tolist()


@dataclass(frozen=True)
class Scales:
    """Factors, by head; None without a decay.

    Attributes:
        read: [n, P, C, r, 1] exp(c_i - m), of what token i reads.
        write: [n, P, C, r, 1] exp(m - c_j), of what token j writes.
        first: [P, 1, r, 1] exp(m) of the first chunk, of the state before it.
        keep: [n, P, 1, r, 1] exp(c_C - m + m'), of what a chunk leaves, where the next one reads it; m' is its m.
    """

    read: Tensor | None = None
    write: Tensor | None = None
    first: Tensor | None = None
    keep: Tensor | None = None

    @classmethod
    def of(cls, steps: Tensor, kind: torch.dtype) -> Scales:
        """From the log-decays [n, P, r, C] of each token."""
        # In float64, for the differences.
        since = steps.double().cumsum(-1).transpose(2, 3)
        end = since[:, :, -1:]
        middle = end / 2
        # Behind the last, the state is left as it is.
        after = pad(middle[1:], (0, 0, 0, 0, 0, 0, 0, 1))
        logs = since - middle, middle - since, middle[0], end - middle + after
        return cls(*(log.exp().to(kind)[..., None] for log in logs))


@dataclass(frozen=True)
class Part:
    """A few chunks, ready for products: q, k [n, P, C, K]; v [n, P, C, r, V], scaled.

    States of its chunks, [n, P, K, r, V], are exp(m) times what they are at the edges; one is kept for all pieces.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    seen: Seen
    scales: Scales
    pieces: int

    @classmethod
    def of(cls, rows: Rows, seen: Seen, steps: Tensor | None, pieces: int, kind: torch.dtype) -> Part:
        """What tokens write is scaled on the way; steps [n or 1, P, r, C] of whole chunks."""
        scales = Scales()
        if steps is not None:
            steps = steps.expand(len(rows.q) // pieces, -1, -1, -1)
            scales = Scales.of(rearrange(steps, "n p r (m c) -> (n m) p r c", m=pieces), kind)
        q, k, v = load(rows.q, kind), load(rows.k, kind), load(rows.v, kind, scales.write)
        return cls(q, k, v, seen, scales, pieces)

    def forward(self, state: Tensor, y: Tensor, kept: Tensor) -> Tensor:
        """The state after it [P, K, r, V]; fills y, and a state a chunk."""
        states = kept if self.pieces == 1 else kept.new_empty(len(self.q), *kept.shape[1:])
        last = self._scan(scaled(state, self.scales.first), states)
        if self.pieces > 1:
            kept.copy_(states[:: self.pieces])
        read = columns(self._scores(), self.v)
        plus(read.flatten(-2), scaled(self.q, self.seen.starts), states.flatten(-2))
        store(read, y, self.scales.read)
        return last

    def backward(self, kept: Tensor, y: Tensor | None, dy: Tensor, dstate: Tensor, grads: Rows) -> Tensor:
        """The gradient of the state before it; fills the others."""
        q, k, v, scales, seen = self.q, self.k, self.v, self.scales, self.seen
        states = kept
        if self.pieces > 1:
            states = kept.new_empty(len(q), *kept.shape[1:])
            self._scan(kept[0], states)
        late = load(dy, v.dtype, scales.read)
        dstates, after = self._scan_back(columns(scaled(q, seen.starts).mT, late), dstate)
        dv = columns(self._scores().mT, late)
        plus(dv.flatten(-2), scaled(k, seen.ends), after.flatten(-2))
        store(dv, grads.v, scales.write)
        if grads.steps is not None and y is not None:
            # By how much a token's reads, and its writes, are scaled.
            reads, writes = load((dy * y).sum(-1), v.dtype), dv.mul_(v).sum(-1)
            store(_step_gradient(reads, writes, (dstates * states).sum((2, 4))), grads.steps)
        v, late = v.flatten(-2), late.flatten(-2)
        dscores = seen.hide_(late @ v.mT)
        store(plus(scaled(late @ states.flatten(-2).mT, seen.starts), dscores, k), grads.q)
        store(plus(scaled(v @ after.flatten(-2).mT, seen.ends), dscores.mT, q), grads.k)
        return scaled(dstates[0], scales.first)

    def _scores(self) -> Tensor:
        return self.seen.hide_(self.q @ self.k.mT)

    def _scan(self, state: Tensor, states: Tensor) -> Tensor:
        """The state after all chunks; fills those before each."""
        kept, keep = self.seen.kept, self.scales.keep
        for i, more in enumerate(columns(scaled(self.k, self.seen.ends).mT, self.v).unbind()):
            states[i] = state
            state = more.add_(state if kept is None else state * kept[i, ..., None])
            if keep is not None:
                state.mul_(keep[i])
        return state

    def _scan_back(self, added: Tensor, dstate: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the state before each chunk, in place of what its tokens add to them, and of what it writes."""
        kept, keep = self.seen.kept, self.scales.keep
        after = torch.empty_like(added)
        for i in reversed(range(len(added))):
            if keep is None:
                after[i] = dstate
            else:
                torch.mul(dstate, keep[i], out=after[i])
            dstate = added[i].add_(after[i] if kept is None else after[i] * kept[i, ..., None])
        return added, after


def columns(a: Tensor, b: Tensor) -> Tensor:
    """a [n, P, i, j] @ b [n, P, j, r, V], of all heads at once."""
    return (a @ b.flatten(-2)).unflatten(-1, b.shape[-2:])


def _step_gradient(reads: Tensor, writes: Tensor, states: Tensor) -> Tensor:
    """Gradient [n, P, C, r] of each log-decay t: of all that stands before t and is read at t or later.

    That is all that the state before the chunk is read for, and what is written but not read before t.

    Args:
        reads, writes: [n, P, C, r] gradients of what a token's reads, and writes, are scaled by.
        states: [n, P, r] that of the state before the chunk.
    """
    since = reads.double() - writes.double()
    return (states[:, :, None] - (since.cumsum(2) - since)).to(reads.dtype)
