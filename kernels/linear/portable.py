"""Linear attention in chunks, in plain PyTorch: from the op's tensors to those of `chunks` and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange, repeat
from torch import Tensor
from torch.nn.functional import pad

from kernels.linear import chunks, operators, reference
from kernels.linear.frame import Ids, attend

CHUNK = 64


def linear_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, alone: bool = False, **options: Any) -> tuple:
    """As `reference.linear_attention`; for a single token, or nothing at all, the recurrence itself."""
    if causal and (q.shape[1] <= 1 or not q.numel() or not v.numel()):
        return reference.linear_attention(q, k, v, causal=True, **options)
    return attend(_causal_sum, q, k, v, **options)


def _chunk(time: int) -> int:
    return max(1, min(CHUNK, time))


def _forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, state: Tensor, ids: Ids | None, strict: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """See `operators.Forward`."""
    layout = _Layout.of(q, v, log_decay)
    parts = layout.chunks(q, k, v, log_decay, ids, strict, state.dtype)
    y = layout.empty(v, state.dtype)
    states = state.new_empty(*layout.grid(q), q.shape[3], v.shape[2] // q.shape[2], v.shape[3])
    state = chunks.forward(parts, layout.state(state), layout.split(y), layout.states(states))
    return _cut(y, v), layout.whole_state(state), states


def _backward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, states: Tensor, ids: Ids | None, strict: bool,
    dy: Tensor, dstate: Tensor, decay: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:  # fmt: skip
    """See `operators.Backward`."""
    layout = _Layout.of(q, v, log_decay)
    parts = layout.chunks(q, k, v, log_decay, ids, strict, states.dtype)
    dq, dk, dv = (layout.empty(t, t.dtype) for t in (q, k, v))
    dsteps = states.new_empty(*layout.grid(q), layout.share, layout.size) if decay and log_decay is not None else None
    grads = chunks.Gradients(layout.split(dq), layout.split(dk), layout.split(dv), dsteps)
    dstate = chunks.backward(parts, layout.states(states), layout.split(dy), layout.state(dstate), grads)
    found = None
    if dsteps is not None and log_decay is not None:
        steps = rearrange(dsteps, "n (b g) r c -> b (n c) (g r)", g=layout.groups)[:, : q.shape[1]]
        found = steps.sum_to_size(log_decay.shape).to(log_decay.dtype).contiguous()
    return _cut(dq, q), _cut(dk, k), _cut(dv, v), found, layout.whole_state(dstate)


_causal_sum = operators.causal_sum("linear_attention_portable", _forward, _backward, _chunk)


@dataclass(frozen=True)
class _Layout:
    """How rows are cut: `size` tokens a chunk, G groups, r heads a group, and s heads that count as one.

    Without a decay the heads of a group are alike, and their values the columns of one head.
    """

    size: int
    groups: int
    share: int
    alike: int

    @classmethod
    def of(cls, q: Tensor, v: Tensor, log_decay: Tensor | None) -> _Layout:
        """From the inputs of the operator."""
        groups, share = q.shape[2], v.shape[2] // q.shape[2]
        return cls(_chunk(q.shape[1]), groups, *((1, share) if log_decay is None else (share, 1)))

    def grid(self, q: Tensor) -> tuple[int, int]:
        """Chunks of a row, groups of the batch."""
        return -(-q.shape[1] // self.size), q.shape[0] * self.groups

    def split(self, x: Tensor) -> Tensor:
        """[B, T, G or H, V] -> [n, B, G, 1 or r, C, V or s V]; a view where T is whole chunks and heads lie together.

        Zeros at the end of other rows add nothing to the state.
        """
        x = pad(x, (0, 0, 0, 0, 0, -x.shape[1] % self.size)) if x.shape[1] % self.size else x
        share = 1 if x.shape[2] == self.groups else self.share
        return rearrange(x, "b (n c) (g r s) v -> n b g r c (s v)", c=self.size, g=self.groups, r=share)

    def empty(self, like: Tensor, kind: torch.dtype) -> Tensor:
        """As `like`, in whole chunks: to be filled through `split`, then `_cut`."""
        batch, time, heads, width = like.shape
        return like.new_empty(batch, time + -time % self.size, heads, width, dtype=kind)

    def states(self, x: Tensor) -> Tensor:
        """[n, B G, K, H / G, V] -> [n, B G, r, K, s V], a view."""
        return rearrange(x, "n p k (r s) v -> n p r k (s v)", s=self.alike)

    def state(self, x: Tensor) -> Tensor:
        """[B, H, K, V] -> [B G, r, K, s V]."""
        return rearrange(x, "b (g r s) k v -> (b g) r k (s v)", g=self.groups, s=self.alike)

    def whole_state(self, x: Tensor) -> Tensor:
        """The way back, in memory of its own."""
        x = rearrange(x, "(b g) r k (s v) -> b (g r s) k v", g=self.groups, s=self.alike)
        return x.clone(memory_format=torch.contiguous_format)

    def chunks(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, ids: Ids | None, strict: bool,
        kind: torch.dtype,
    ) -> chunks.Chunks:  # fmt: skip
        """The rows in chunks."""
        batch, time, groups, _ = q.shape
        steps = None if log_decay is None else _steps(log_decay.to(kind), batch, time, self.size, groups)
        row = before = None
        if ids is not None:
            row = torch.cat([ids.row, ids.row[:, -1:].expand(-1, -time % self.size)], 1)
            row = repeat(row, "b (n c) -> n (b g) c", c=self.size, g=groups)
            before = torch.cat([ids.before.repeat_interleave(groups)[None], row[:-1, :, -1]])
        return chunks.Chunks(self.split(q), self.split(k), self.split(v), steps, row, before, strict, kind)


def _cut(x: Tensor, like: Tensor) -> Tensor:
    """Without the filling of the last chunk; a clone, because a slice would hold on to it."""
    time = like.shape[1]
    return x if x.shape[1] == time else x[:, :time].clone(memory_format=torch.contiguous_format)


def _steps(log_decay: Tensor, batch: int, time: int, size: int, groups: int) -> Tensor:
    """Log-decay of each token [n, P, r, C]; n is 1 where all chunks are alike.

    Bounded, because inf - inf is no number; exp is 0 from -104 on in float32 and from -746 on in float64.
    """
    log_decay = log_decay.clamp(min=-800)
    if log_decay.dim() == 1 and time % size == 0:
        return repeat(log_decay, "(g r) -> 1 (b g) r c", b=batch, c=size, g=groups)
    full = pad(log_decay.expand(batch, time, -1), (0, 0, 0, -time % size))
    return rearrange(full, "b (n c) (g r) -> n (b g) r c", c=size, g=groups)
