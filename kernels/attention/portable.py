"""Softmax attention in plain PyTorch: any device, no kernel of ours, memory linear in the lengths.

Three ways: torch's fused op where it can say the call, blocks of queries (`blocked`) where not, and the definition for
what needs all weights at once (dropout).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from kernels.attention import blocked, reference


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
    dropout: float,
    lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """As `reference.attention`; the log-sum-exp is in at least fp32, or None where it is not asked for."""
    masks: dict[str, Any] = dict(
        causal=causal,
        window=window,
        q_positions=q_positions,
        k_positions=k_positions,
        q_documents=q_documents,
        k_documents=k_documents,
    )
    extras: dict[str, Any] = dict(softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks)
    if dropout or 0 in (*q.shape, *k.shape):
        y, log_sum = reference.attention(q, k, v, scale=scale, dropout=dropout, **masks, **extras)
        return y, log_sum.to(torch.promote_types(q.dtype, torch.float32))
    width = v.shape[3]
    total: Tensor | None = None
    if q.device.type == "cpu":
        q, k, v = (t if t.stride(3) == 1 else t.contiguous() for t in _level(q, k, v))
    if lse or any(option is not None for option in extras.values()) or not _fits(q.shape[1], k.shape[1], **masks):
        y, total = blocked.attention(q, k, v, scale=scale, **masks, **extras)
    else:
        y = _fused(q, k, v, causal, scale)
    # The gradient of a slice is a copy.
    return (y if y.shape[3] == width else y[..., :width]), total


def _fits(queries: int, keys: int, *, causal: bool, window: int | None, **places: Tensor | None) -> bool:
    """Is it all pairs, or a square causal mask: what the fused op can say without a mask?"""
    documents = any(places[name] is not None for name in ("q_documents", "k_documents"))
    if documents or (window is not None and (places["q_positions"] is not None or window < max(queries, keys))):
        return False
    return not causal or (places["q_positions"] is None and queries in (1, keys))


def _fused(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    """Attention over [B, T, H, K] with G key/value heads through torch's fused op, which wants heads before time."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    group, queries = q.shape[1] // k.shape[1], q.shape[2]
    if queries == 1:
        if group > 1:
            # Decode: the group becomes the query axis, so that each key is read once.
            q = q.reshape(q.shape[0], k.shape[1], group, q.shape[-1])
            y = scaled_dot_product_attention(q, k, v, scale=scale)
            return y.reshape(y.shape[0], 1, -1, y.shape[-1])
        # The last query sees all keys. A plain bool: under torch.compile lengths are symbols.
        causal = False
    y = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=group > 1)
    return y.transpose(1, 2)


def _level(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Zeros up to one width of queries, keys and values: the fused op for CPUs knows no other."""
    more = v.shape[3] - k.shape[3]
    if more > 0:
        q, k = pad(q, (0, more)), pad(k, (0, more))
    return q, k, pad(v, (0, -more)) if more < 0 else v
