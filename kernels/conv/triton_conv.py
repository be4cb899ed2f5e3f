"""Causal depthwise convolution in Triton: tiles of time and channels, taps unrolled, no atomics.

The gradient of the weight is summed within each tile and then, in a fixed order, over the tiles: the same to the last
bit from run to run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_launch import empty, launch

BLOCK_T, BLOCK_D = 32, 128


@triton.jit
def _place(T, D, before, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    """Row, time offsets from -before on and channel offsets of this program, and its place among those of a channel."""
    program = tl.program_id(0)
    columns = tl.cdiv(D, BLOCK_D)
    blocks = tl.cdiv(before + T, BLOCK_T)
    o_d = program % columns * BLOCK_D + tl.arange(0, BLOCK_D)
    i_part = (program // columns).to(tl.int64)
    o_t = i_part % blocks * BLOCK_T + tl.arange(0, BLOCK_T) - before
    return i_part // blocks, o_t, o_d, i_part


@triton.jit
def _document(Documents, TailDocuments, i_b, o_t, T, P):
    """Document ids of times from -P on, those of the tail below 0."""
    ids = tl.load(Documents + i_b * T + o_t, mask=(o_t >= 0) & (o_t < T), other=0)
    if TailDocuments is not None:
        ids += tl.load(TailDocuments + i_b * P + P + o_t, mask=(o_t < 0) & (o_t >= -P), other=0)
    return ids


@triton.jit
def _inputs(X, Tail, i_b, o_t, o_d, stride_b, stride_t, T, D, P):
    """[times, channels] fp32: x, the tail below time 0, and 0 outside of both."""
    m_d = (o_d < D)[None, :]
    p_x = X + i_b * stride_b + (o_t * stride_t)[:, None] + o_d[None, :]
    b_x = tl.load(p_x, mask=((o_t >= 0) & (o_t < T))[:, None] & m_d, other=0.0).to(tl.float32)
    if Tail is not None:
        p_tail = Tail + ((i_b * P + P + o_t) * D)[:, None] + o_d[None, :]
        b_x += tl.load(p_tail, mask=((o_t < 0) & (o_t >= -P))[:, None] & m_d, other=0.0).to(tl.float32)
    return b_x


@triton.jit(do_not_specialize=["T", "P"])
def conv_forward_kernel(
    X, Weight, Bias, Tail, Documents, TailDocuments, Y, stride_b, stride_t, T, D, P,
    TAPS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One tile of y. X [B, T, D] strided but for channels, Weight [TAPS, D], Tail [B, P, D], Y [B, T, D] contiguous."""
    i_b, o_t, o_d, _ = _place(T, D, 0, BLOCK_T, BLOCK_D)
    b_y = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    if Bias is not None:
        b_y += tl.load(Bias + o_d, mask=o_d < D, other=0.0).to(tl.float32)[None, :]
    if Documents is not None:
        b_document = _document(Documents, TailDocuments, i_b, o_t, T, P)
    for back in tl.static_range(TAPS):
        # [BLOCK_T, BLOCK_D]
        b_x = _inputs(X, Tail, i_b, o_t - back, o_d, stride_b, stride_t, T, D, P)
        if Documents is not None:
            b_other = _document(Documents, TailDocuments, i_b, o_t - back, T, P)
            b_x = tl.where((b_document == b_other)[:, None], b_x, 0.0)
        b_y += tl.load(Weight + (TAPS - 1 - back) * D + o_d, mask=o_d < D, other=0.0).to(tl.float32)[None, :] * b_x
    p_y = Y + ((i_b * T + o_t) * D)[:, None] + o_d[None, :]
    tl.store(p_y, b_y.to(Y.dtype.element_ty), mask=(o_t < T)[:, None] & (o_d < D)[None, :])


@triton.jit(do_not_specialize=["T", "P"])
def conv_backward_kernel(
    DY, X, Weight, Tail, Documents, TailDocuments, DX, DTail, Sums, stride_b, stride_t, T, D, P,
    TAPS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One tile of the gradients of the tail and x, and what it adds to those of weight and bias.

    DY [B, T, D] contiguous; Sums [tiles of time of all rows, TAPS + 1, D] fp32, the bias last.
    """
    i_b, o_t, o_d, i_part = _place(T, D, P, BLOCK_T, BLOCK_D)
    m_d = o_d < D
    b_x = _inputs(X, Tail, i_b, o_t, o_d, stride_b, stride_t, T, D, P)
    b_dx = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    if Documents is not None:
        b_document = _document(Documents, TailDocuments, i_b, o_t, T, P)
    p_sums = Sums + i_part * (TAPS + 1) * D + o_d
    for back in tl.static_range(TAPS):
        tap = TAPS - 1 - back
        o_later = o_t + back
        m_later = (o_later >= 0) & (o_later < T)
        if Documents is not None:
            m_later = m_later & (b_document == _document(Documents, TailDocuments, i_b, o_later, T, P))
        # [BLOCK_T, BLOCK_D]
        p_dy = DY + ((i_b * T + o_later) * D)[:, None] + o_d[None, :]
        b_dy = tl.load(p_dy, mask=m_later[:, None] & m_d[None, :], other=0.0).to(tl.float32)
        b_dx += tl.load(Weight + tap * D + o_d, mask=m_d, other=0.0).to(tl.float32)[None, :] * b_dy
        tl.store(p_sums + tap * D, tl.sum(tl.where(m_later[:, None], b_dy * b_x, 0.0), 0), mask=m_d)
        if back == 0:
            tl.store(p_sums + TAPS * D, tl.sum(b_dy, 0), mask=m_d)
    p_dx = DX + ((i_b * T + o_t) * D)[:, None] + o_d[None, :]
    tl.store(p_dx, b_dx.to(DX.dtype.element_ty), mask=((o_t >= 0) & (o_t < T))[:, None] & m_d[None, :])
    if Tail is not None:
        p_tail = DTail + ((i_b * P + P + o_t) * D)[:, None] + o_d[None, :]
        tl.store(p_tail, b_dx.to(DTail.dtype.element_ty), mask=((o_t < 0) & (o_t >= -P))[:, None] & m_d[None, :])


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
    y = empty(x, batch, time, width)
    block = 1 if time == 1 else BLOCK_T
    tiles = batch * triton.cdiv(time, block) * triton.cdiv(width, BLOCK_D)
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
    parts = batch * triton.cdiv(before + time, BLOCK_T)
    sums = empty(x, parts, taps + 1, width, dtype=torch.float32)
    launch(
        conv_backward_kernel, parts * triton.cdiv(width, BLOCK_D), dy.contiguous(), x, weight.contiguous(), *rest, dx,
        dtail, sums, *x.stride()[:2], time, width, before, TAPS=taps, BLOCK_T=BLOCK_T, BLOCK_D=BLOCK_D,
    )  # fmt: skip
    total = sums.sum(0)
    return dx, total[:-1], total[-1].clone(), dtail


def _prepared(
    x: Tensor, tail: Tensor | None, documents: Tensor | None, tail_documents: Tensor | None
) -> tuple[Tensor, int, tuple[Tensor | None, Tensor | None, Tensor | None]]:
    """x with its channels beside each other, P, and the rest contiguous."""
    tail = None if tail is None else tail.contiguous()
    ids = [None if t is None else t.to(torch.int32).contiguous() for t in (documents, tail_documents)]
    before = 0 if tail is None else tail.shape[1]
    return x if x.stride(-1) == 1 else x.contiguous(), before, (tail, *ids)


def examples() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Calls whose kernels `kernels.triton_aot` compiles."""
    for kind in (torch.bfloat16, torch.float16, torch.float32):
        name = str(kind).removeprefix("torch.")
        yield f"convolution, {name}", partial(_example, kind, 4)
        yield f"convolution, {name}, tail and documents", partial(_example, kind, 4, True)
    yield "convolution, bfloat16, 16 taps", partial(_example, torch.bfloat16, 16)


def _example(kind: torch.dtype, taps: int, every: bool = False) -> None:
    """Mamba's convolution at width 2048."""
    x = torch.empty(2, 4096, 2048, dtype=kind, device="meta")
    weight = x.new_empty(taps, 2048, dtype=torch.float32)
    ids = x.new_empty(2, 4096, dtype=torch.int32)
    rest = (x[:, : taps - 1].contiguous(), ids, ids[:, : taps - 1].contiguous()) if every else (None, None, None)
    forward(x, weight, weight[0] if every else None, *rest)
    backward(x, x, weight, *rest)
