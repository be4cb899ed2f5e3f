"""Linear attention in chunks, in plain PyTorch: from the op's tensors to those of `chunks` and back."""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange, repeat
from torch import Tensor
from torch.nn.functional import pad

from kernels.linear import operators, reference, weak
from kernels.linear.chunks import Chunks
from kernels.linear.frame import Ids, attend
from kernels.linear.parts import Rows

CHUNK = 64


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, gain: Tensor | None = None, alone: bool = False, **options: Any
) -> tuple:
    """As `reference.linear_attention`, of v times gain [B, T, H]; for one token, or none, the recurrence itself."""
    if causal and (q.shape[1] <= 1 or not q.numel() or not v.numel()):
        v = v if gain is None else gain[..., None] * v
        return reference.linear_attention(q, k, v, causal=True, **options)
    return attend(_causal_sum, q, k, v, gain=gain, **options)


def _chunk(time: int) -> int:
    return max(1, min(CHUNK, time))


def _forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, gain: Tensor | None, state: Tensor,
    ids: Ids | None, strict: bool, slopes: bool,
) -> tuple[Tensor, operators.Kept]:  # fmt: skip
    """See `operators.Forward`."""
    kind = state.dtype
    rows = _chunks(q, k, v, log_decay, gain, ids, strict, kind)
    pieces = q.new_empty(0, dtype=torch.long) if rows.steps is None else weak.pieces(rows.steps)
    y = _whole(v, rows.size, kind)
    share = v.shape[2] // q.shape[2]
    others = y.new_empty(*_grid(q), rows.size, share * v.shape[3]) if slopes else None
    states = state.new_empty(*_grid(q), q.shape[3], share, v.shape[3])
    state = _by_heads(rows.forward(pieces, _grouped(state, q), y, others, states), q)
    return _like(y, v), operators.Kept(state, states, pieces, y.new_empty(0) if others is None else others)


def _backward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, gain: Tensor | None, kept: operators.Kept,
    ids: Ids | None, strict: bool, dy: Tensor, dstate: Tensor, slopes: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor]:  # fmt: skip
    """See `operators.Backward`."""
    kind = kept.states.dtype
    rows = _chunks(q, k, v, log_decay, gain, ids, strict, kind)
    size, found = rows.size, None
    steps, dgain = (_whole(v[..., 0], size, kind) if wanted else None for wanted in (slopes, gain is not None))
    grads = Rows(_whole(q, size, q.dtype), _whole(k, size, k.dtype), _whole(v, size, v.dtype), dgain, steps)
    others = kept.others if slopes else None
    ends = _grouped(kept.state, q), _grouped(dstate, q)
    dstate = rows.backward(kept.pieces, kept.states, others, _filled(dy, size), *ends, grads)
    if steps is not None and log_decay is not None:
        found = steps[:, : q.shape[1]].sum_to_size(log_decay.shape).to(log_decay.dtype).contiguous()
    if dgain is not None and gain is not None:
        dgain = _like(dgain.to(gain.dtype), q)
    return _like(grads.q, q), _like(grads.k, k), _like(grads.v, v), found, dgain, _by_heads(dstate, q)


_causal_sum = operators.causal_sum("linear_attention_portable", _forward, _backward, _chunk, keeps_more=True)


def _chunks(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, gain: Tensor | None, ids: Ids | None, strict: bool,
    kind: torch.dtype,
) -> Chunks:  # fmt: skip
    """Zeros at the end of rows that are not whole chunks add nothing to the state."""
    (batch, time, groups, _), size = q.shape, _chunk(q.shape[1])
    rows = Rows(_filled(q, size), _filled(k, size), _filled(v, size), None if gain is None else _filled(gain, size))
    steps = None if log_decay is None else _steps(log_decay.to(kind), batch, time, size, groups)
    if ids is not None:
        ids = Ids(torch.cat([ids.row, ids.row[:, -1:].expand(-1, -time % size)], 1), ids.before)
    return Chunks(rows, size, steps, ids, strict, kind)


def _grid(q: Tensor) -> tuple[int, int]:
    """Chunks of a row, groups of the batch."""
    return -(-q.shape[1] // _chunk(q.shape[1])), q.shape[0] * q.shape[2]


def _filled(x: Tensor, size: int) -> Tensor:
    """[B, T, ...] with zeros, up to whole chunks."""
    return pad(x, (0, 0) * (x.dim() - 2) + (0, -x.shape[1] % size)) if x.shape[1] % size else x


def _whole(like: Tensor, size: int, kind: torch.dtype) -> Tensor:
    """As `like`, with T of whole chunks, to be filled."""
    batch, time, *rest = like.shape
    return like.new_empty(batch, time + -time % size, *rest, dtype=kind)


def _grouped(state: Tensor, q: Tensor) -> Tensor:
    """[B, H, K, V] -> [B G, K, r, V]."""
    return rearrange(state, "b (g r) k v -> (b g) k r v", g=q.shape[2])


def _by_heads(state: Tensor, q: Tensor) -> Tensor:
    """The way back, in memory of its own."""
    state = rearrange(state, "(b g) k r v -> b (g r) k v", g=q.shape[2])
    return state.clone(memory_format=torch.contiguous_format)


def _like(x: Tensor, like: Tensor) -> Tensor:
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
