"""Selected attention over short rows: blocks of queries under a mask, on the operator behind SDPA.

Memory is linear in the lengths, time is not. Where rows are so short, that is faster than gathering.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from kernels import backend
from kernels.attention import block as tile
from kernels.sparse import reference

ROWS = 128


@torch.library.custom_op("mixerlab::nsa_masked", mutates_args=())
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    starts: Tensor | None,
    positions: Tensor | None,
    block: int,
    scale: float,
    offset: int,
) -> tuple[Tensor, Tensor]:
    """Output [B, T, H, V] and log-sum-exp [B, T, H] in at least fp32; K = V on a CPU is faster."""
    y = q.new_zeros(*q.shape[:3], v.shape[3])
    lse = q.new_zeros(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    heads_k, heads_v = k.transpose(1, 2), v.transpose(1, 2)
    fuse = tile.can_fuse(q, v, None, None)
    for rows, columns in _blocks(q, k, starts, offset):
        bias = _bias(rows, columns, q if fuse else lse, k, indices, starts, positions, block, offset)
        inputs = _grouped(q[:, rows], k), heads_k[:, :, columns], heads_v[:, :, columns], bias, scale
        part, total = tile.fused(*inputs, True) if fuse else tile.dense(*inputs, None)
        y[:, rows] = _back(part, y[:, rows]).to(y.dtype)
        lse[:, rows] = _back(total[..., None], lse[:, rows, :, None])[..., 0]
    return y, lse


@attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=wide)


@torch.library.custom_op("mixerlab::nsa_masked_backward", mutates_args=())
def backward(
    dy: Tensor,
    y: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    starts: Tensor | None,
    positions: Tensor | None,
    block: int,
    scale: float,
    offset: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    dq = torch.zeros_like(q)
    dk, dv = (torch.zeros_like(t, dtype=lse.dtype) for t in (k, v))
    heads_k, heads_v, heads_dk, heads_dv = (t.transpose(1, 2) for t in (k, v, dk, dv))
    fuse = tile.can_fuse(q, v, None, None)
    # Finite where nothing is visible: the bias alone makes those weights 0.
    lse = lse.masked_fill(lse == float("-inf"), 0)
    for rows, columns in _blocks(q, k, starts, offset):
        bias = _bias(rows, columns, q if fuse else lse, k, indices, starts, positions, block, offset)
        rows_q, rows_y, rows_dy = (_grouped(t[:, rows], k) for t in (q, y, dy))
        inputs = rows_q, heads_k[:, :, columns], heads_v[:, :, columns], bias, scale
        total = _grouped(lse[:, rows, :, None], k)[..., 0]
        if fuse:
            parts = tile.fused_backward(*inputs, rows_y, total, rows_dy)
        else:
            delta = (rows_dy * rows_y).sum(-1, dtype=lse.dtype)
            parts = tile.dense_backward(*inputs, None, total, rows_dy, delta)[:3]
        dq[:, rows] = _back(parts[0], dq[:, rows]).to(dq.dtype)
        heads_dk[:, :, columns].add_(parts[1])
        heads_dv[:, :, columns].add_(parts[2])
    return dq, dk.to(k.dtype), dv.to(v.dtype)


@backward.register_fake
def _(dy: Tensor, y: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[:6])
    ctx.options = inputs[6:]
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, dy: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    return *backward(dy, *ctx.saved_tensors, *ctx.options), *[None] * 6


attend.register_autograd(backend.without_autocast(_differentiate), setup_context=_keep)


def _blocks(q: Tensor, k: Tensor, starts: Tensor | None, offset: int) -> Iterator[tuple[slice, slice]]:
    """Rows, and the columns in their reach."""
    for first in range(0, q.shape[1], ROWS):
        last = min(first + ROWS, q.shape[1])
        yield slice(first, last), slice(k.shape[1] if starts is not None else min(offset + last, k.shape[1]))


def _bias(
    rows: slice,
    columns: slice,
    like: Tensor,
    k: Tensor,
    indices: Tensor,
    starts: Tensor | None,
    positions: Tensor | None,
    block: int,
    offset: int,
) -> Tensor:
    """0 where a key is seen and -inf elsewhere: [B, G, H / G * rows, columns] of like's dtype."""
    starts, positions = (None if t is None else t[:, rows] for t in (starts, positions))
    start, position = reference.places(like[:, rows], starts, positions, offset + rows.start)
    index = torch.arange(columns.stop, device=like.device) - start
    blocks = (columns.stop - 1) // block + 1
    # One place more, for "none"; [B, rows, G, blocks + 1].
    chosen = like.new_full((*indices[:, rows].shape[:3], blocks + 1), float("-inf"))
    picked = indices[:, rows].to(torch.int64)
    chosen.scatter_(3, picked.where(picked >= 0, blocks), 0)
    chosen = chosen[..., :blocks].transpose(1, 2)
    if starts is None:
        bias = chosen.repeat_interleave(block, 3)[..., : columns.stop]
    else:
        bias = chosen.gather(3, (index // block).clamp(min=0)[:, None].expand(-1, chosen.shape[1], -1, -1))
    bias = bias.masked_fill(((index < 0) | (index > position))[:, None], float("-inf"))
    group = like.shape[2] // k.shape[2]
    return bias[:, :, None].expand(-1, -1, group, -1, -1).flatten(2, 3)


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """[B, T, H, K] as [B, G, H / G * T, K], for k [B, S, G, K]."""
    return rearrange(x, "b t (g n) k -> b g (n t) k", g=k.shape[2])


def _back(x: Tensor, like: Tensor) -> Tensor:
    """What `_grouped` did, undone."""
    return rearrange(x, "b g (n t) k -> b t (g n) k", t=like.shape[1])
