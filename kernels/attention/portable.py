"""Softmax attention on `scaled_dot_product_attention`: any device, no kernel of ours."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels.attention import reference


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
    """As `reference.attention`; the log-sum-exp is None unless asked for.

    What the fused form cannot say (softcap, sinks, learned slopes, the log-sum-exp) takes the dense definition.
    """
    positions: dict[str, Any] = dict(q_positions=q_positions, k_positions=k_positions)
    documents: dict[str, Any] = dict(q_documents=q_documents, k_documents=k_documents)
    learned_slopes = alibi_slopes is not None and alibi_slopes.requires_grad
    if lse or softcap is not None or sinks is not None or learned_slopes or 0 in (*q.shape, *k.shape):
        return reference.attention(
            q,
            k,
            v,
            causal=causal,
            window=window,
            scale=scale,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            **positions,
            **documents,
            dropout=dropout,
        )
    queries, keys = q.shape[1], k.shape[1]
    plain = alibi_slopes is None and all(t is None for t in (*positions.values(), *documents.values()))
    if plain and causal and (window is None or window >= keys) and (queries == 1 or queries == keys):
        return _fused(q, k, v, None, queries > 1, scale, dropout), None
    seen = reference.visible(queries, keys, causal=causal, window=window, **positions, **documents, device=q.device)
    if seen is None and alibi_slopes is None:
        return _fused(q, k, v, None, False, scale, dropout), None
    if seen is None:
        seen = torch.ones(1, queries, keys, dtype=torch.bool, device=q.device)
    # A row that sees nothing attends to everything and is then cut off: finite values, no gradient.
    empty = ~seen.any(-1)
    mask = (seen | empty[..., None])[:, None]
    if alibi_slopes is not None:
        distance = reference.distances(queries, keys, q_positions, k_positions, q.device).abs()[:, None]
        bias = -alibi_slopes[:, None, None].to(q.dtype) * distance.to(q.dtype)
        mask = bias.masked_fill(~mask, float("-inf"))
    y = _fused(q, k, v, mask.expand(q.shape[0], -1, -1, -1), False, scale, dropout)
    return y.masked_fill(empty[:, :, None, None], 0), None


def _fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, dropout: float) -> Tensor:
    """Attention over [B, T, H, K] with G key/value heads through torch's fused op, which wants heads before time."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    group, queries = q.shape[1] // k.shape[1], q.shape[2]
    if group > 1 and queries == 1 and (mask is None or mask.shape[1] == 1):
        # Decode: the group becomes the query axis, so that each key is read once.
        q = q.reshape(q.shape[0], k.shape[1], group, q.shape[-1])
        y = scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale)
        return y.reshape(y.shape[0], 1, -1, y.shape[-1])
    y = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, dropout_p=dropout, scale=scale, enable_gqa=group > 1
    )
    return y.transpose(1, 2)
