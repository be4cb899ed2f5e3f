"""The Triton kernels as PyTorch operators: with shapes for tracing, a gradient, and reasons why they cannot run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels import backend

MAX_TAPS = 16
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def refusal(x: Tensor, weight: Tensor) -> str | None:
    """What of this call the kernels do not have; None: nothing."""
    if weight.shape[0] > MAX_TAPS:
        return f"W={weight.shape[0]} taps must be at most {MAX_TAPS}"
    for name, tensor in (("x", x), ("weight", weight)):
        if tensor.dtype not in DTYPES:
            return f"dtype {tensor.dtype} of {name} must be one of {', '.join(map(str, DTYPES))}"
    return None


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tail: Tensor | None,
    documents: Tensor | None,
    tail_documents: Tensor | None,
) -> Tensor:
    """As `reference.causal_conv`, on the GPU's kernels."""
    return forward(x, weight, bias, tail, documents, tail_documents)


@torch.library.custom_op("mixerlab::causal_conv", mutates_args=())
def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tail: Tensor | None,
    documents: Tensor | None,
    tail_documents: Tensor | None,
) -> Tensor:
    """y [B, T, D]."""
    from kernels.conv import triton_run as run

    return run.forward(x, weight, bias, tail, documents, tail_documents)


@forward.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("mixerlab::causal_conv_backward", mutates_args=())
def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    tail: Tensor | None,
    documents: Tensor | None,
    tail_documents: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, of weight and bias in fp32, and of tail, which is [B, 0, D] where there is none."""
    from kernels.conv import triton_run as run

    return run.backward(dy, x, weight, tail, documents, tail_documents)


@backward.register_fake
def _(dy: Tensor, x: Tensor, weight: Tensor, tail: Tensor | None, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide = torch.float32
    dtail = x.new_empty(x.shape[0], 0 if tail is None else tail.shape[1], x.shape[2])
    return x.new_empty(x.shape), x.new_empty(weight.shape, dtype=wide), x.new_empty(x.shape[2], dtype=wide), dtail


def _keep(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, weight, bias, *rest = inputs
    ctx.save_for_backward(x, weight, *rest)
    ctx.bias = None if bias is None else bias.dtype


def _differentiate(ctx: Any, dy: Tensor) -> tuple:
    x, weight, tail, *ids = ctx.saved_tensors
    dx, dweight, dbias, dtail = backward(dy, x, weight, tail, *ids)
    dbias = None if ctx.bias is None else dbias.to(ctx.bias)
    return dx, dweight.to(weight.dtype), dbias, None if tail is None else dtail, None, None


forward.register_autograd(backend.without_autocast(_differentiate), setup_context=_keep)
