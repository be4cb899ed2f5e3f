"""Softmax attention a block of queries at a time: memory linear in the lengths, keys out of reach never read.

The H / G query heads of a key head are rows of one block: q [B, G, rows, K] against k [B, G, columns, K]. A block runs
on torch's fused operator for CPUs where that can say it, else on products in at least fp32; both recompute the weights
in the backward pass from the log-sum-exp.
Source: Rabe and Staats 2021, arXiv:2112.05682 (blocks of queries); Dao et al. 2022, arXiv:2205.14135, appendix B.4
(backward).
"""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.attention.pairs import Pairs

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


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
    tensors = (q, k, v, alibi_slopes, sinks, q_positions, k_positions, q_documents, k_documents)
    # torch.compile takes no tensor twice, and queries and keys often share their documents.
    views = (None if t is None else t.view_as(t) for t in tensors)
    return _Blocked.apply(*views, causal, window, scale, softcap)


class _Blocked(torch.autograd.Function):
    """`attention` with its options in the order above."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, sinks: Tensor | None, *others: Any
    ) -> tuple[Tensor, Tensor]:
        *places, causal, window, scale, softcap = others
        pairs = _pairs(q, k, slopes, places, causal, window)
        run = _fused if _can_fuse(q, v, slopes, softcap) else _dense
        y = q.new_zeros(*q.shape[:3], v.shape[3])
        lse = q.new_full(q.shape[:3], float("-inf"), dtype=torch.promote_types(q.dtype, torch.float32))
        for rows, columns in pairs.blocks():
            bias = pairs.bias(rows, columns, q if run is _fused else lse)
            part, total = run(*_block(q, k, v, rows, columns), bias, scale, softcap)
            y[:, rows], lse[:, rows] = _heads(part, pairs.group), _heads(total, pairs.group)
        if sinks is not None:
            # One more score whose value is 0.
            total = torch.logaddexp(lse, sinks.to(lse.dtype))
            y, lse = y * (lse - _finite(total)).exp()[..., None].to(y.dtype), total
        ctx.save_for_backward(q, k, v, y, lse, slopes, sinks, *places)
        ctx.options = causal, window, scale, softcap
        ctx.set_materialize_grads(False)
        return y, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, y, lse, slopes, sinks, *places = ctx.saved_tensors
        causal, window, scale, softcap = ctx.options
        pairs = _pairs(q, k, slopes, places, causal, window)
        run = _fused_backward if dlse is None and _can_fuse(q, v, slopes, softcap) else _dense_backward
        dy = torch.zeros_like(y) if dy is None else dy.contiguous()
        delta = (dy * y).sum(-1, dtype=lse.dtype)
        delta = delta if dlse is None else delta - dlse
        dq, dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
        dslopes = None if slopes is None else torch.zeros_like(slopes)
        dsinks = None if sinks is None else -((sinks - lse).exp() * delta).sum((0, 1)).to(sinks.dtype)
        # Finite where nothing is visible: the bias alone makes those weights 0.
        lse = _finite(lse)
        for rows, columns in pairs.blocks():
            bias = pairs.bias(rows, columns, q if run is _fused_backward else lse)
            saved = (_rows(t[:, rows], pairs.group) for t in (dy, y, lse, delta))
            *grads, dscores = run(*_block(q, k, v, rows, columns), bias, scale, softcap, *saved)
            dq[:, rows] = _heads(grads[0], pairs.group)
            dk[:, columns] += grads[1].transpose(1, 2)
            dv[:, columns] += grads[2].transpose(1, 2)
            if dslopes is not None and dscores is not None:
                dscores = dscores.unflatten(2, (pairs.group, -1)) * pairs.distance(rows, columns, lse)
                dslopes -= dscores.sum((0, 3, 4)).flatten()
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dslopes, dsinks, *[None] * 8


def _pairs(
    q: Tensor, k: Tensor, slopes: Tensor | None, places: list[Tensor | None], causal: bool, window: int | None
) -> Pairs:
    group = q.shape[2] // k.shape[2]
    return Pairs(q.shape[1], k.shape[1], group, causal, window, slopes, (places[0], places[1]), (places[2], places[3]))


def _block(q: Tensor, k: Tensor, v: Tensor, rows: slice, columns: slice) -> tuple[Tensor, Tensor, Tensor]:
    group = q.shape[2] // k.shape[2]
    return _rows(q[:, rows], group), k[:, columns].transpose(1, 2), v[:, columns].transpose(1, 2)


def _rows(x: Tensor, group: int) -> Tensor:
    """[B, T, H, ...] -> [B, G, group * T, ...]."""
    return rearrange(x, "b t (g n) ... -> b g (n t) ...", n=group)


def _heads(x: Tensor, group: int) -> Tensor:
    """What `_rows` did, undone."""
    return rearrange(x, "b g (n t) ... -> b t (g n) ...", n=group)


def _finite(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse == float("-inf"), 0)


def _can_fuse(q: Tensor, v: Tensor, slopes: Tensor | None, softcap: float | None) -> bool:
    """Can torch's fused operator for CPUs say it? It takes its bias in q's dtype and gives no gradient to it."""
    narrow = torch.finfo(q.dtype).bits < 32
    biased = slopes is not None and (narrow or slopes.requires_grad)
    return q.device.type == "cpu" and softcap is None and not biased and q.shape[3] == v.shape[3]


def _fused(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, softcap: None
) -> tuple[Tensor, Tensor]:
    """A block's output [B, G, rows, V] and log-sum-exp [B, G, rows]."""
    y, lse = _flash(q, k, v, 0.0, False, attn_mask=bias, scale=scale)
    if bias is None:
        return y, lse
    empty = bias.amax(-1) == float("-inf")
    return y.masked_fill(empty[..., None], 0), lse.masked_fill(empty, float("-inf"))


def _fused_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    scale: float,
    softcap: None,
    dy: Tensor,
    y: Tensor,
    lse: Tensor,
    delta: Tensor,
) -> tuple[Tensor, Tensor, Tensor, None]:
    """Gradients of a block's q, k and v."""
    return *_flash_backward(dy, q, k, v, y, lse, 0.0, False, attn_mask=bias, scale=scale), None


def _dense(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """As `_fused`, on any device; in at least fp32."""
    scores, _ = _scores(q, k, bias, scale, softcap)
    lse = scores.logsumexp(-1)
    return (scores - _finite(lse)[..., None]).exp() @ v.to(scores.dtype), lse


def _dense_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    scale: float,
    softcap: float | None,
    dy: Tensor,
    y: Tensor,
    lse: Tensor,
    delta: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of a block's q, k and v, and of the scores that the bias was added to."""
    scores, slope = _scores(q, k, bias, scale, softcap)
    dy, v = dy.to(scores.dtype), v.to(scores.dtype)
    weights = (scores - lse[..., None]).exp()
    dscores = weights * (dy @ v.transpose(2, 3) - delta[..., None])
    dproducts = dscores * scale if slope is None else dscores * slope * scale
    dq, dk = dproducts @ k.to(scores.dtype), dproducts.transpose(2, 3) @ q.to(scores.dtype)
    return dq, dk, weights.transpose(2, 3) @ dy, dscores


def _scores(
    q: Tensor, k: Tensor, bias: Tensor | None, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor | None]:
    """[B, G, rows, columns] in at least fp32, and the derivative of the cap."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores, slope = q.to(wide) @ k.to(wide).transpose(2, 3) * scale, None
    if softcap is not None:
        squashed = torch.tanh(scores / softcap)
        scores, slope = softcap * squashed, 1 - squashed.square()
    return (scores if bias is None else scores + bias), slope
