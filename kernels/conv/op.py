"""Causal depthwise convolution: the public op, its checks and its FLOP formula."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels import backend, flops
from kernels.conv import portable, reference

IMPLEMENTATIONS = {"portable": portable.causal_conv, "reference": reference.causal_conv}


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    tail: Tensor | None = None,
    documents: Tensor | None = None,
    tail_documents: Tensor | None = None,
) -> Tensor:
    """Each channel is a weighted sum of its last W inputs; the last tap of `weight` is the present token's.

    Args:
        x: [B, T, D]; weight: [W, D]; bias: [D].
        tail: [B, P, D], the inputs before x, P <= W - 1; what is before them is zero. None: P = 0.
        documents: [B, T] integers: a tap of another document gives nothing.
        tail_documents: [B, P]; needed with `documents` and `tail`.
    Returns:
        [B, T, D]
    Raises:
        ValueError: shapes that do not fit.
    """
    batch, _time, width = x.shape
    taps = weight.shape[0]
    if weight.dim() != 2 or weight.shape[1] != width or taps < 1:
        raise ValueError(f"weight must be [W, {width}] with W >= 1 for x {list(x.shape)}; got {list(weight.shape)}")
    tail = x[:, :0] if tail is None else tail.to(x.dtype)
    if tail.dim() != 3 or tail.shape[1] >= taps or tail.shape[::2] != x.shape[::2]:
        raise ValueError(f"tail must have shape [{batch}, up to {taps - 1}, {width}]; got {list(tail.shape)}")
    if documents is not None and tail.shape[1] and (tail_documents is None or tail_documents.shape != tail.shape[:2]):
        raise ValueError(f"a tail with `documents` needs `tail_documents` {list(tail.shape[:2])}")
    if count := flops.counter():
        count.record("causal_conv", causal_conv_flops(x.shape, taps, tail.shape[1]))
        return torch.empty_like(x)
    missing = taps - 1 - tail.shape[1]
    inputs = pad(torch.cat([tail, x], 1), (0, 0, missing, 0))
    all_documents = None
    if documents is not None:
        before = documents[:, :0] if tail_documents is None else tail_documents.to(documents.dtype)
        all_documents = pad(torch.cat([before, documents], 1), (missing, 0))
    run = backend.implementation("causal_conv", IMPLEMENTATIONS, x)
    return run(x, weight, bias, inputs, documents, all_documents)


def causal_conv_flops(x: tuple[int, ...], taps: int, before: int = 0) -> flops.Formula:
    """A channel's taps that lie inside of the row, `before` inputs in front of it included."""
    batch, time, width = x
    early = min(time, max(taps - 1 - before, 0))
    inside = sum(before + i + 1 for i in range(early)) + (time - early) * taps
    return flops.Formula.of("2 * B*D * taps_inside", B=batch, D=width, taps_inside=inside)
