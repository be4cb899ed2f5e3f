"""Causal depthwise convolution: the public op, its checks and its FLOP formula."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import backend, flops
from kernels.conv import portable, reference

IMPLEMENTATIONS = {"portable": portable.causal_conv, "reference": reference.causal_conv}


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, tail: Tensor | None = None,
                documents: Tensor | None = None, tail_documents: Tensor | None = None) -> Tensor:
    """Each channel is a weighted sum of its last W inputs; the last tap of `weight` is the present token's.

    Args:
        x: [B, T, D]; weight: [W, D]; bias: [D].
        tail: [B, W - 1, D], the inputs before x; None: zeros.
        documents: [B, T] integers: a tap of another document gives nothing.
        tail_documents: [B, W - 1]; needed with `documents` and `tail`.
    Returns:
        [B, T, D]
    Raises:
        ValueError: shapes that do not fit.
    """
    batch, time, width = x.shape
    taps = weight.shape[0]
    if weight.dim() != 2 or weight.shape[1] != width or taps < 1:
        raise ValueError(f"weight must be [W, {width}] with W >= 1 for x {list(x.shape)}; got {list(weight.shape)}")
    if tail is not None and tail.shape != (batch, taps - 1, width):
        raise ValueError(f"tail must have shape {[batch, taps - 1, width]}; got {list(tail.shape)}")
    if documents is not None and tail is not None and tail_documents is None:
        raise ValueError("a tail with `documents` needs `tail_documents`")
    if count := flops.counter():
        count.record("causal_conv", causal_conv_flops(x.shape, taps, tail is not None))
        return torch.empty_like(x)
    tail = x.new_zeros(batch, taps - 1, width) if tail is None else tail.to(x.dtype)
    all_documents = None
    if documents is not None:
        before = documents.new_zeros(batch, taps - 1) if tail_documents is None else tail_documents.to(documents.dtype)
        all_documents = torch.cat([before, documents], 1)
    run = backend.implementation("causal_conv", IMPLEMENTATIONS, x)
    return run(x, weight, bias, torch.cat([tail, x], 1), documents, all_documents)


def causal_conv_flops(x: tuple[int, ...], taps: int, tail: bool = False) -> int:
    """2 FLOPs a channel and tap that lies inside of the row (all of them when there is a tail)."""
    batch, time, width = x
    inside = time * taps if tail else sum(min(i + 1, taps) for i in range(min(time, taps))) + max(time - taps, 0) * taps
    return 2 * batch * width * inside
