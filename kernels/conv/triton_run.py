"""From tensors to launches, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels.conv.triton_backward import conv_backward_kernel
from kernels.conv.triton_forward import conv_forward_kernel
from kernels.triton_launch import empty, launch

# A tile: small, so that many fit onto a multiprocessor and hide the wait for memory, which is all the time there is.
BLOCK_T, BLOCK_D = 32, 64


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tail: Tensor | None,
    documents: Tensor | None,
    tail_documents: Tensor | None,
) -> Tensor:
    """y [B, T, D] of x's dtype; any strides."""
    (batch, time, width), taps = x.shape, weight.shape[0]
    x, before, rest = _prepared(x, tail, documents, tail_documents)
    bias = None if bias is None else bias.contiguous()
    y = empty(x, batch, time, width)
    block = 1 if time == 1 else BLOCK_T
    tiles = batch * -(-time // block) * -(-width // BLOCK_D)
    launch(
        conv_forward_kernel, tiles, x, weight.contiguous(), bias, *rest, y, *x.stride()[:2], time, width, before,
        TAPS=taps, BLOCK_T=block, BLOCK_D=BLOCK_D,
    )  # fmt: skip
    return y


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    tail: Tensor | None,
    documents: Tensor | None,
    tail_documents: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, weight [W, D] fp32, bias [D] fp32 and tail [B, P, D]."""
    (batch, time, width), taps = x.shape, weight.shape[0]
    x, before, rest = _prepared(x, tail, documents, tail_documents)
    dx, dtail = empty(x, *x.shape), empty(x, batch, before, width)
    parts = batch * -(-(before + time) // BLOCK_T)
    sums = empty(x, parts, taps + 1, width, dtype=torch.float32)
    launch(
        conv_backward_kernel, parts * -(-width // BLOCK_D), dy.contiguous(), x, weight.contiguous(), *rest, dx,
        dtail, sums, *x.stride()[:2], time, width, before, TAPS=taps, BLOCK_T=BLOCK_T, BLOCK_D=BLOCK_D,
    )  # fmt: skip
    total = sums.sum(0)
    return dx, total[:-1], total[-1].clone(), dtail


def _prepared(
    x: Tensor, tail: Tensor | None, documents: Tensor | None, tail_documents: Tensor | None
) -> tuple[Tensor, int, list[Tensor | None]]:
    """x with its channels beside each other, P, and the rest contiguous."""
    rest = [None if tail is None else tail.contiguous()]
    rest += [None if t is None else t.to(torch.int32).contiguous() for t in (documents, tail_documents)]
    before = 0 if tail is None else tail.shape[1]
    return x if x.stride(-1) == 1 else x.contiguous(), before, rest


def examples() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Calls whose kernels `kernels.triton_aot` compiles."""
    yield "convolution, bfloat16", partial(_example, torch.bfloat16, 4)
    yield "convolution, bfloat16, tail and documents", partial(_example, torch.bfloat16, 4, True)
    yield "convolution, float32, tail and documents", partial(_example, torch.float32, 4, True)
    yield "convolution, bfloat16, 16 taps", partial(_example, torch.bfloat16, 16)


def _example(kind: torch.dtype, taps: int, every: bool = False) -> None:
    """Mamba's convolution at width 2048."""
    x = torch.empty(2, 4096, 2048, dtype=kind, device="meta")
    weight = x.new_empty(taps, 2048, dtype=torch.float32)
    ids = x.new_empty(2, 4096, dtype=torch.int32)
    rest = (x[:, : taps - 1].contiguous(), ids, ids[:, : taps - 1].contiguous()) if every else (None, None, None)
    forward(x, weight, weight[0] if every else None, *rest)
    backward(x, x, weight, *rest)
