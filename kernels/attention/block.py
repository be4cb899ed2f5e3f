"""One block of attention: the H / G query heads of a key head are rows, q [B, G, rows, K] and k [B, G, columns, K].

It runs on torch's fused operator for CPUs where that can say it, else on products in at least fp32; both recompute the
weights in the backward pass from the log-sum-exp. A bias, [1 or B, 1 or G, rows, columns], is added to the scores.
"""

from __future__ import annotations

import torch
from torch import Tensor

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def can_fuse(q: Tensor, v: Tensor, slopes: Tensor | None, softcap: float | None) -> bool:
    """Can the fused operator say it? Its bias has q's dtype, in which large distances are no numbers of their own."""
    narrow = torch.finfo(q.dtype).bits < 32
    rounded = narrow and slopes is not None
    return q.device.type == "cpu" and softcap is None and not rounded and q.shape[3] == v.shape[3]


def fused(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, gaps: bool
) -> tuple[Tensor, Tensor]:
    """Output [B, G, rows, V] and log-sum-exp [B, G, rows]; `gaps`: a row may see nothing."""
    y, lse = _flash(q, k, v, 0.0, False, attn_mask=bias, scale=scale)
    if bias is None or not gaps:
        return y, lse
    empty = bias.amax(-1) == float("-inf")
    return y.masked_fill(empty[..., None], 0), lse.masked_fill(empty, float("-inf"))


def fused_backward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, y: Tensor, lse: Tensor, dy: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    return _flash_backward(dy, q, k, v, y, lse, 0.0, False, attn_mask=bias, scale=scale)


def dense(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """As `fused`, on any device; in at least fp32."""
    scores, _ = _scores(q, k, bias, scale, softcap)
    lse = scores.logsumexp(-1)
    # Rows that see nothing: exp(-inf - 0).
    weights = (scores - lse.masked_fill(lse == float("-inf"), 0)[..., None]).exp()
    return weights @ v.to(scores.dtype), lse


def dense_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    scale: float,
    softcap: float | None,
    lse: Tensor,
    dy: Tensor,
    delta: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and the bias; delta [B, G, rows] is dy . y less the gradient of the log-sum-exp."""
    scores, slope = _scores(q, k, bias, scale, softcap)
    dy, v = dy.to(scores.dtype), v.to(scores.dtype)
    weights = (scores - lse[..., None]).exp()
    dscores = weights * (dy @ v.transpose(2, 3) - delta[..., None])
    dproducts = scale * (dscores if slope is None else dscores * slope)
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
