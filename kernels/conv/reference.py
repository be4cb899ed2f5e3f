"""Causal depthwise convolution by its definition."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tail: Tensor | None,
    documents: Tensor | None,
    tail_documents: Tensor | None,
) -> Tensor:
    """y_t = bias + sum_i weight_i * input_{t-W+1+i} over the taps of t's own document.

    Arguments as in `op.causal_conv`, checked; a tail is None or has tokens.
    """
    time, front = x.shape[1], weight.shape[0] - 1 - (0 if tail is None else tail.shape[1])
    inputs = pad(x if tail is None else torch.cat([tail, x], 1), (0, 0, front, 0))
    if documents is not None:
        ids = documents if tail_documents is None else torch.cat([tail_documents.to(documents.dtype), documents], 1)
        ids = pad(ids, (front, 0))
    y = torch.zeros_like(x) if bias is None else bias.expand_as(x)
    for i, taps in enumerate(weight):
        piece = inputs[:, i : i + time]
        if documents is not None:
            piece = piece.masked_fill((ids[:, i : i + time] != documents)[..., None], 0)
        y = y + taps * piece
    return y.to(x.dtype)
