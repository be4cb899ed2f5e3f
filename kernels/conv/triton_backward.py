"""Causal depthwise convolution, backward: all gradients of a tile of inputs, without atomics.

The gradients of weight and bias are summed within each tile here and then, in a fixed order, over the tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.conv.triton_tile import document, inputs, place


@triton.jit(do_not_specialize=["T", "P"])
def conv_backward_kernel(
    DY, X, Weight, Tail, Documents, TailDocuments, DX, DTail, Sums, stride_b, stride_t, T, D, P,
    TAPS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One tile of the gradients of the tail and x, and what it adds to those of weight and bias.

    DY [B, T, D] contiguous; Sums [tiles of time of all rows, TAPS + 1, D] fp32, the bias last.
    """
    i_b, o_t, o_d, i_part = place(T, D, P, BLOCK_T, BLOCK_D)
    m_d = o_d < D
    b_x = inputs(X, Tail, i_b, o_t, o_d, stride_b, stride_t, T, D, P)
    b_dx = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    if Documents is not None:
        b_document = document(Documents, TailDocuments, i_b, o_t, T, P)
    p_sums = Sums + i_part * (TAPS + 1) * D + o_d
    for back in tl.static_range(TAPS):
        tap = TAPS - 1 - back
        o_later = o_t + back
        m_later = (o_later >= 0) & (o_later < T)
        if Documents is not None:
            m_later = m_later & (b_document == document(Documents, TailDocuments, i_b, o_later, T, P))
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
