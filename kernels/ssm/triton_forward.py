"""Selective scan, forward: a program carries the states of a few channels through time, in registers.

Where rows and channels are too few for a GPU, time is cut into segments. Their states are found in three steps: what
each segment makes of a state of zero and how much it keeps of what was before (`scan_forward_kernel` without Y), the
state before each (`scan_join_kernel`), and then all outputs at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.ssm.triton_tile import LOG2E, decay_of, place, vector


@triton.jit(do_not_specialize=["T", "segments", "span"])
def scan_forward_kernel(
    X, Dt, A, B, C, Skip, Starts, Fresh, Y, Last, Before, Added, Kept, stride_xb, stride_xt, stride_db, stride_dt,
    stride_bb, stride_bt, stride_cb, stride_ct, T, D, segments, span,
    N: tl.constexpr, N_PADDED: tl.constexpr, BLOCK_D: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """One segment, tokens [i_s span, (i_s + 1) span), of BLOCK_D channels.

    With Y: from Starts [B, segments, D, N] to Y [B, T, D], Last [B, D, N] and Before [B, T / PIECE, D, N], the state
    before each piece of time. Without: Added and Kept [B, segments, D, N], its result from a state of zero and the
    product of its decays.
    """
    i_b, i_s, o_d, o_n, o_h, m_d, m_n, m_h = place(D, segments, N, N_PADDED, BLOCK_D)
    b_a = tl.load(A + o_h, mask=m_h, other=0.0) * LOG2E
    p_segment = (i_b * segments + i_s) * D * N + o_h
    b_h = tl.zeros([BLOCK_D, N_PADDED], tl.float32)
    b_kept = tl.full([BLOCK_D, N_PADDED], 1.0, tl.float32)
    if Y is not None:
        b_h = tl.load(Starts + p_segment, mask=m_h, other=0.0)
        if Skip is not None:
            b_skip = vector(Skip, o_d, m_d)
    first = i_s * span
    last = tl.minimum(first + span, T)
    for start in range(first, last, PIECE):
        if Y is not None:
            i_piece = i_b * tl.cdiv(T, PIECE) + start // PIECE
            tl.store(Before + i_piece * D * N + o_h, b_h, mask=m_h)
        for i_t in tl.range(start, tl.minimum(start + PIECE, last), loop_unroll_factor=4):
            o_t = tl.cast(i_t, tl.int64)
            # [BLOCK_D], [BLOCK_D], [N_PADDED]
            b_x = vector(X + i_b * stride_xb + o_t * stride_xt, o_d, m_d)
            b_dt = vector(Dt + i_b * stride_db + o_t * stride_dt, o_d, m_d)
            b_b = vector(B + i_b * stride_bb + o_t * stride_bt, o_n, m_n)
            b_decay = decay_of(b_dt, b_a, Fresh, i_b * T + o_t)
            b_h = b_decay * b_h + (b_dt * b_x)[:, None] * b_b[None, :]
            if Y is None:
                b_kept *= b_decay
            else:
                b_c = vector(C + i_b * stride_cb + o_t * stride_ct, o_n, m_n)
                b_y = tl.sum(b_h * b_c[None, :], 1)
                if Skip is not None:
                    b_y += b_skip * b_x
                tl.store(Y + (i_b * T + o_t) * D + o_d, b_y.to(Y.dtype.element_ty), mask=m_d)
    if Y is None:
        tl.store(Added + p_segment, b_h, mask=m_h)
        tl.store(Kept + p_segment, b_kept, mask=m_h)
    elif i_s == segments - 1:
        tl.store(Last + i_b * D * N + o_h, b_h, mask=m_h)


@triton.jit(do_not_specialize=["segments", "size"])
def scan_join_kernel(First, Added, Kept, Joined, segments, size, REVERSE: tl.constexpr, BLOCK: tl.constexpr):
    """The state before each segment, [B, segments, size], from the one before all, [B, size]; or its gradient after."""
    blocks = tl.cdiv(size, BLOCK)
    i_b = (tl.program_id(0) // blocks).to(tl.int64)
    o_h = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    m_h = o_h < size
    b_h = tl.load(First + i_b * size + o_h, mask=m_h, other=0.0)
    for i in range(0, segments):
        i_s = segments - 1 - i if REVERSE else i
        p_segment = (i_b * segments + i_s) * size + o_h
        tl.store(Joined + p_segment, b_h, mask=m_h)
        b_kept = tl.load(Kept + p_segment, mask=m_h, other=0.0)
        b_h = b_kept * b_h + tl.load(Added + p_segment, mask=m_h, other=0.0)
