"""Softmax attention a block of queries at a time: memory linear in the lengths, keys out of reach never read.

A PyTorch operator, so that torch.compile keeps it as one node instead of a loop over blocks (which took it minutes).
Source: Rabe and Staats 2021, arXiv:2112.05682 (blocks of queries); Dao et al. 2022, arXiv:2205.14135, appendix B.4
(backward).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from kernels import backend
from kernels.attention import block
from kernels.attention.pairs import Pairs


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    window: int | None,
    scale: float,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    q_positions: Tensor | None,
    k_positions: Tensor | None,
    q_documents: Tensor | None,
    k_documents: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """[B, T, H, V] and the log-sum-exp [B, T, H] in at least fp32, both with gradients.

    No length may be 0. On a CPU the last dimension of q, k and v is contiguous: the fused operator ignores its stride.
    """
    places = (q_positions, k_positions, q_documents, k_documents)
    y, lse = _forward(q, k, v, alibi_slopes, sinks, *places, causal, window, scale, softcap)
    return y, lse


@torch.library.custom_op("mixerlab::attention_blocked", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None,
    sinks: Tensor | None,
    q_positions: Tensor | None,
    k_positions: Tensor | None,
    q_documents: Tensor | None,
    k_documents: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    places = ((q_positions, k_positions), (q_documents, k_documents))
    pairs = Pairs(q, k, causal, window, slopes, *places)
    fused = block.can_fuse(q, v, slopes, softcap)
    y = q.new_zeros(*q.shape[:3], v.shape[3])
    lse = q.new_full(q.shape[:3], float("-inf"), dtype=_wide(q))
    by_group = [_grouped(t, k) for t in (q, y, lse)]
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    for rows, columns in pairs.blocks():
        bias = pairs.bias(rows, columns, q if fused else lse)
        q_block, y_block, lse_block = (t[:, :, :, rows] for t in by_group)
        inputs = q_block.flatten(2, 3), k[:, :, columns], v[:, :, columns], bias, scale
        part, total = block.fused(*inputs, pairs.gaps) if fused else block.dense(*inputs, softcap)
        y_block.copy_(part.view_as(y_block))
        lse_block.copy_(total.view_as(lse_block))
    if sinks is not None:
        # One more score, whose value is 0.
        total = torch.logaddexp(lse, sinks.to(lse.dtype))
        y, lse = y * (lse - _finite(total)).exp()[..., None].to(y.dtype), total
    return y, lse


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=_wide(q))


@torch.library.custom_op("mixerlab::attention_blocked_backward", mutates_args=())
def _backward(
    y: Tensor,
    lse: Tensor,
    dy: Tensor,
    dlse: Tensor | None,
    learned_slopes: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None,
    sinks: Tensor | None,
    q_positions: Tensor | None,
    k_positions: Tensor | None,
    q_documents: Tensor | None,
    k_documents: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of q, k, v, the slopes and the sinks; the last two are empty where there is nothing to give."""
    places = ((q_positions, k_positions), (q_documents, k_documents))
    pairs = Pairs(q, k, causal, window, slopes, *places)
    fused = dlse is None and not learned_slopes and block.can_fuse(q, v, slopes, softcap)
    dy = dy.contiguous()
    parts: Sequence[Tensor]
    dq, dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
    dslopes = lse.new_zeros(q.shape[2] if learned_slopes else 0)
    dsinks = lse.new_zeros(0)
    # Finite where nothing is visible: the bias alone makes those weights 0.
    by_group = [_grouped(t, k) for t in (dq, q, y, _finite(lse), dy)]
    if sinks is not None or not fused:
        delta = (dy * y).sum(-1, dtype=lse.dtype)
        delta = delta if dlse is None else delta - dlse
        by_group.append(_grouped(delta, k))
        dsinks = dsinks if sinks is None else -((sinks - lse).exp() * delta).sum((0, 1))
    k_heads, v_heads, dk_heads, dv_heads = (t.transpose(1, 2) for t in (k, v, dk, dv))
    for rows, columns in pairs.blocks():
        bias = pairs.bias(rows, columns, q if fused else lse)
        dq_block, *saved = (t[:, :, :, rows] for t in by_group)
        q_block, *saved = (t.flatten(2, 3) for t in saved)
        inputs = q_block, k_heads[:, :, columns], v_heads[:, :, columns], bias, scale
        if fused:
            parts = block.fused_backward(*inputs, *saved[:3])
        else:
            *parts, dbias = block.dense_backward(*inputs, softcap, *saved[1:])
            if learned_slopes:
                apart = dbias.unflatten(2, (pairs.group, -1)) * pairs.distance(rows, columns, lse)
                dslopes -= apart.sum((0, 3, 4)).flatten()
        dq_block.copy_(parts[0].view_as(dq_block))
        dk_heads[:, :, columns].add_(parts[1])
        dv_heads[:, :, columns].add_(parts[2])
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dslopes, dsinks


@_backward.register_fake
def _(
    y: Tensor,
    lse: Tensor,
    dy: Tensor,
    dlse: Tensor | None,
    learned_slopes: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None,
    sinks: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    heads = q.shape[2]
    extras = lse.new_empty(heads if learned_slopes else 0), lse.new_empty(0 if sinks is None else heads)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), *extras


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[:9])
    ctx.options = inputs[9:]
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dy: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    y, lse, *inputs = ctx.saved_tensors
    slopes, sinks = inputs[3:5]
    learned = slopes is not None and ctx.needs_input_grad[3]
    dy = torch.zeros_like(y) if dy is None else dy
    *grads, dslopes, dsinks = _backward(y, lse, dy, dlse, learned, *inputs, *ctx.options)
    dslopes = dslopes.to(slopes.dtype) if learned else None
    dsinks = None if sinks is None else dsinks.to(sinks.dtype)
    return *grads, dslopes, dsinks, *[None] * 8


_forward.register_autograd(backend.without_autocast(_differentiate), setup_context=_keep)


def _wide(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """[B, T, H, ...] as [B, G, H / G, T, ...], for k [B, S, G, K]."""
    return rearrange(x, "b t (g n) ... -> b g n t ...", g=k.shape[2])


def _finite(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse == float("-inf"), 0)
