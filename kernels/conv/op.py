"""Causal depthwise convolution: the public op, its checks and its FLOP formula."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import backend, flops
from kernels.conv import dispatch, portable, reference

IMPLEMENTATIONS = {
    "triton": dispatch.causal_conv,
    "portable": portable.causal_conv,
    "reference": reference.causal_conv,
}


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
        [B, T, D] of x's dtype; sums are fp32 or wider.
    Raises:
        ValueError: shapes that do not fit.
    """
    _check(x, weight, bias, tail, documents, tail_documents)
    if tail is None or not tail.shape[1]:
        tail = tail_documents = None
    if count := flops.counter():
        before = 0 if tail is None else tail.shape[1]
        count.record("causal_conv", causal_conv_flops(x.shape, weight.shape[0], before))
        return torch.empty_like(x)
    run = backend.implementation("causal_conv", IMPLEMENTATIONS, x, dispatch.refusal(x, weight))
    return run(x, weight, bias, None if tail is None else tail.to(x.dtype), documents, tail_documents)


def causal_conv_flops(x: tuple[int, ...], taps: int, before: int = 0) -> flops.Formula:
    """A channel's taps that lie inside of the row, `before` inputs in front of it included."""
    batch, time, width = x
    early = min(time, max(taps - 1 - before, 0))
    inside = sum(before + i + 1 for i in range(early)) + (time - early) * taps
    return flops.Formula.of("2 * B*D * taps_inside", B=batch, D=width, taps_inside=inside)


def _check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tail: Tensor | None,
    documents: Tensor | None,
    tail_documents: Tensor | None,
) -> None:
    if x.dim() != 3:
        raise ValueError(f"causal_conv wants x [B, T, D]; got {list(x.shape)}")
    if not x.is_floating_point():
        raise ValueError(f"causal_conv wants floating numbers; got x of {x.dtype}")
    batch, time, width = x.shape
    taps = weight.shape[0] if weight.dim() == 2 else 0
    if taps < 1 or weight.shape[1] != width:
        raise ValueError(f"weight must be [W, {width}] with W >= 1 for x {list(x.shape)}; got {list(weight.shape)}")
    if bias is not None and bias.shape != (width,):
        raise ValueError(f"bias must be [{width}] for x {list(x.shape)}; got {list(bias.shape)}")
    if tail is not None and (tail.dim() != 3 or tail.shape[1] >= taps or tail.shape[::2] != x.shape[::2]):
        raise ValueError(f"tail must have shape [{batch}, up to {taps - 1}, {width}]; got {list(tail.shape)}")
    if documents is not None and documents.shape != (batch, time):
        raise ValueError(f"documents must have shape [{batch}, {time}]; got {list(documents.shape)}")
    if documents is None or tail is None or not tail.shape[1]:
        return
    if tail_documents is None or tail_documents.shape != tail.shape[:2]:
        got = None if tail_documents is None else list(tail_documents.shape)
        raise ValueError(f"a tail with `documents` needs `tail_documents` {list(tail.shape[:2])}; got {got}")
