"""Linear attention in chunks, in plain PyTorch: from the op's tensors to those of `chunks` and back."""

from __future__ import annotations

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
    parts, (batch, time, groups, _) = _chunks(q, k, v, log_decay, ids, strict, state.dtype), q.shape
    y, states, state = chunks.forward(parts, rearrange(state, "b (g r) k v -> (b g) k r v", g=groups))
    state = rearrange(state, "(b g) k r v -> b (g r) k v", b=batch).contiguous()
    return _row(y, batch, time), state, states


def _backward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, states: Tensor, ids: Ids | None, strict: bool,
    dy: Tensor, dstate: Tensor, decay: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:  # fmt: skip
    """See `operators.Backward`."""
    parts, (batch, time, groups, _) = _chunks(q, k, v, log_decay, ids, strict, states.dtype), q.shape
    dy = _values(dy, parts.q.shape[2], groups)
    dstate = rearrange(dstate, "b (g r) k v -> (b g) k r v", g=groups)
    dq, dk, dv, dsteps, dstate = chunks.backward(parts, states, dy, dstate, decay)
    dq, dk = (rearrange(t, "n (b g) c k -> b (n c) g k", b=batch)[:, :time] for t in (dq, dk))
    found = None
    if dsteps is not None and log_decay is not None:
        steps = rearrange(dsteps, "n (b g) r c -> b (n c) (g r)", b=batch)[:, :time]
        found = steps.sum_to_size(log_decay.shape).to(log_decay.dtype).contiguous()
    dq, dk, dv = (
        t.to(like.dtype).contiguous() for t, like in zip((dq, dk, _row(dv, batch, time)), (q, k, v), strict=True)
    )
    return dq, dk, dv, found, rearrange(dstate, "(b g) k r v -> b (g r) k v", b=batch).contiguous()


_causal_sum = operators.causal_sum("linear_attention_portable", _forward, _backward, _chunk)


def _chunks(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, ids: Ids | None, strict: bool, wide: torch.dtype
) -> chunks.Chunks:
    """The row in chunks."""
    batch, time, groups, _ = q.shape
    size = _chunk(time)
    q, k = (rearrange(_fill(x.to(wide), size), "b (n c) g k -> n (b g) c k", c=size).contiguous() for x in (q, k))
    steps = None if log_decay is None else _steps(log_decay.to(wide), batch, time, size, groups)
    row = before = None
    if ids is not None:
        row = torch.cat([ids.row, ids.row[:, -1:].expand(-1, -time % size)], 1)
        row = repeat(row, "b (n c) -> n (b g) c", c=size, g=groups)
        before = torch.cat([ids.before.repeat_interleave(groups)[None], row[:-1, :, -1]])
    return chunks.Chunks(q, k, _values(v.to(wide), size, groups), steps, row, before, strict)


def _fill(x: Tensor, size: int) -> Tensor:
    """Zeros at the end of the time axis, up to whole chunks: they add nothing to the state."""
    return pad(x, (0, 0, 0, 0, 0, -x.shape[1] % size))


def _values(x: Tensor, size: int, groups: int) -> Tensor:
    return rearrange(_fill(x, size), "b (n c) (g r) v -> n (b g) c r v", c=size, g=groups).contiguous()


def _row(x: Tensor, batch: int, time: int) -> Tensor:
    row = rearrange(x, "n (b g) c r v -> b (n c) (g r) v", b=batch)
    # A clone, because a slice would hold on to the filling.
    return row.contiguous() if row.shape[1] == time else row[:, :time].clone(memory_format=torch.contiguous_format)


def _steps(log_decay: Tensor, batch: int, time: int, size: int, groups: int) -> Tensor:
    """Log-decay of each token [n, P, r, C]; n is 1 where all chunks are alike.

    Bounded, because inf - inf is no number; exp is 0 from -104 on in float32 and from -746 on in float64.
    """
    log_decay = log_decay.clamp(min=-800)
    if log_decay.dim() == 1 and time % size == 0:
        return repeat(log_decay, "(g r) -> 1 (b g) r c", b=batch, c=size, g=groups)
    full = pad(log_decay.expand(batch, time, -1), (0, 0, 0, -time % size))
    return rearrange(full, "b (n c) (g r) -> n (b g) r c", c=size, g=groups)
