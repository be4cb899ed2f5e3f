"""Additive attention by its definition: all pairs and channels at once, right in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.attention.reference import visible


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    *,
    causal: bool,
    window: int | None,
    q_positions: Tensor | None,
    k_positions: Tensor | None,
    q_documents: Tensor | None,
    k_documents: Tensor | None,
) -> Tensor:
    """[B, T, H, V]; arguments as in `op.additive_attention`, the bias already added to q. Memory grows with T S A."""
    scores = torch.einsum("btsha,ha->bhts", torch.tanh(q[:, :, None] + k[:, None]), weight.to(q.dtype))
    seen = visible(
        q.shape[1],
        k.shape[1],
        causal=causal,
        window=window,
        q_positions=q_positions,
        k_positions=k_positions,
        q_documents=q_documents,
        k_documents=k_documents,
        device=q.device,
    )
    if seen is not None:
        scores = scores.masked_fill(~seen[:, None], float("-inf"))
    # The maximum only keeps exp in range, so no gradient needs to pass it; finite in rows that see nothing.
    top = scores.detach().amax(-1, keepdim=True) if scores.shape[-1] else scores.new_zeros(*scores.shape[:3], 1)
    weights = torch.exp(scores - top.masked_fill(top == float("-inf"), 0))
    total = weights.sum(-1, keepdim=True)
    return torch.einsum("bhts,bshv->bthv", weights / total.masked_fill(total == 0, 1), v)
