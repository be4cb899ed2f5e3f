"""Causal depthwise convolution, forward: a tile of time and channels, its taps unrolled."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.conv.triton_tile import document, inputs, place


@triton.jit(do_not_specialize=["T", "P"])
def conv_forward_kernel(
    X, Weight, Bias, Tail, Documents, TailDocuments, Y, stride_b, stride_t, T, D, P,
    TAPS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One tile of y. X [B, T, D] strided but for channels, Weight [TAPS, D], Tail [B, P, D], Y [B, T, D] contiguous."""
    i_b, o_t, o_d, _ = place(T, D, 0, BLOCK_T, BLOCK_D)
    b_y = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    if Bias is not None:
        b_y += tl.load(Bias + o_d, mask=o_d < D, other=0.0).to(tl.float32)[None, :]
    if Documents is not None:
        b_document = document(Documents, TailDocuments, i_b, o_t, T, P)
    for back in tl.static_range(TAPS):
        # [BLOCK_T, BLOCK_D]
        b_x = inputs(X, Tail, i_b, o_t - back, o_d, stride_b, stride_t, T, D, P)
        if Documents is not None:
            b_other = document(Documents, TailDocuments, i_b, o_t - back, T, P)
            b_x = tl.where((b_document == b_other)[:, None], b_x, 0.0)
        b_y += tl.load(Weight + (TAPS - 1 - back) * D + o_d, mask=o_d < D, other=0.0).to(tl.float32)[None, :] * b_x
    p_y = Y + ((i_b * T + o_t) * D)[:, None] + o_d[None, :]
    tl.store(p_y, b_y.to(Y.dtype.element_ty), mask=(o_t < T)[:, None] & (o_d < D)[None, :])
