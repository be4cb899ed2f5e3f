"""Causal depthwise convolution by its definition."""

from __future__ import annotations

import torch
from torch import Tensor


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    inputs: Tensor,
    documents: Tensor | None,
    all_documents: Tensor | None,
) -> Tensor:
    """y_t = sum_i weight_i * input_{t-W+1+i} over the taps of t's own document.

    Args:
        x: [B, T, D]; weight: [W, D]; bias: [D] or None.
        inputs: [B, W - 1 + T, D], the tail and x; documents [B, T] and all_documents [B, W - 1 + T] or both None.
    """
    y = torch.zeros_like(x) if bias is None else bias.expand_as(x)
    for i, taps in enumerate(weight):
        piece = inputs[:, i : i + x.shape[1]]
        if documents is not None and all_documents is not None:
            piece = piece.masked_fill((all_documents[:, i : i + x.shape[1]] != documents)[..., None], 0)
        y = y + taps * piece
    return y
