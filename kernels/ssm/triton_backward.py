"""Selective scan, backward: pieces of time from the last to the first, each run again from the state before it.

The states of one piece go through a small scratch of the program; sums over channels (of b and c) and over rows (of a
and d) are left as parts, which are added in a fixed order outside: no atomics.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.ssm.triton_tile import LOG2E, decay_of, place, vector


@triton.jit(do_not_specialize=["T", "segments", "span"])
def scan_reach_kernel(
    DY, Dt, A, C, Fresh, Added, Kept, stride_db, stride_dt, stride_cb, stride_ct, T, D, segments, span,
    N: tl.constexpr, N_PADDED: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """What a segment's own outputs ask of the state before it, and the product of its decays, [B, segments, D, N]."""
    i_b, i_s, o_d, o_n, o_h, m_d, m_n, m_h = place(D, segments, N, N_PADDED, BLOCK_D)
    b_a = tl.load(A + o_h, mask=m_h, other=0.0) * LOG2E
    b_g = tl.zeros([BLOCK_D, N_PADDED], tl.float32)
    b_kept = tl.full([BLOCK_D, N_PADDED], 1.0, tl.float32)
    first = i_s * span
    last = tl.minimum(first + span, T)
    for i in tl.range(0, last - first, loop_unroll_factor=4):
        o_t = tl.cast(last - 1 - i, tl.int64)
        b_dy = vector(DY + (i_b * T + o_t) * D, o_d, m_d)
        b_dt = vector(Dt + i_b * stride_db + o_t * stride_dt, o_d, m_d)
        b_c = vector(C + i_b * stride_cb + o_t * stride_ct, o_n, m_n)
        b_decay = decay_of(b_dt, b_a, Fresh, i_b * T + o_t)
        b_g = b_decay * (b_dy[:, None] * b_c[None, :] + b_g)
        b_kept *= b_decay
    p_segment = (i_b * segments + i_s) * D * N + o_h
    tl.store(Added + p_segment, b_g, mask=m_h)
    tl.store(Kept + p_segment, b_kept, mask=m_h)


@triton.jit(do_not_specialize=["rows", "T", "segments", "span"])
def scan_backward_kernel(
    DY, X, Dt, A, B, C, Skip, Fresh, Before, After, Scratch, DX, DDt, DA, DB, DC, DSkip, DState, stride_xb, stride_xt,
    stride_db, stride_dt, stride_bb, stride_bt, stride_cb, stride_ct, rows, T, D, segments, span,
    N: tl.constexpr, N_PADDED: tl.constexpr, BLOCK_D: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """One segment of BLOCK_D channels, backwards.

    DY [rows, T, D] contiguous; After [rows, segments, D, N]: gradient of the state after each segment; Scratch
    [programs, PIECE, BLOCK_D, N_PADDED]. Out: DX and DDt [rows, T, D], DState [rows, D, N]; parts to be summed: DA
    [rows, segments, D, N], DSkip [rows, segments, D], DB and DC [blocks of channels, rows, T, N].
    """
    i_b, i_s, o_d, o_n, o_h, m_d, m_n, m_h = place(D, segments, N, N_PADDED, BLOCK_D)
    b_a = tl.load(A + o_h, mask=m_h, other=0.0)
    b_a2 = b_a * LOG2E
    p_segment = (i_b * segments + i_s) * D * N + o_h
    b_g = tl.load(After + p_segment, mask=m_h, other=0.0)
    b_da = tl.zeros([BLOCK_D, N_PADDED], tl.float32)
    b_dskip = tl.zeros([BLOCK_D], tl.float32)
    if Skip is not None:
        b_skip = vector(Skip, o_d, m_d)
    o_scratch = tl.arange(0, BLOCK_D)[:, None] * N_PADDED + o_n[None, :]
    p_scratch = Scratch + tl.program_id(0).to(tl.int64) * PIECE * BLOCK_D * N_PADDED + o_scratch
    i_part = (tl.program_id(0) % tl.cdiv(D, BLOCK_D)).to(tl.int64) * rows + i_b
    first = i_s * span
    last = tl.minimum(first + span, T)
    pieces = tl.cdiv(last - first, PIECE)
    for i_piece in range(0, pieces):
        start = first + (pieces - 1 - i_piece) * PIECE
        count = tl.minimum(PIECE, last - start)
        b_h = tl.load(Before + (i_b * tl.cdiv(T, PIECE) + start // PIECE) * D * N + o_h, mask=m_h, other=0.0)
        for i in tl.range(0, count, loop_unroll_factor=4):
            o_t = tl.cast(start + i, tl.int64)
            tl.store(p_scratch + i * BLOCK_D * N_PADDED, b_h)
            b_x = vector(X + i_b * stride_xb + o_t * stride_xt, o_d, m_d)
            b_dt = vector(Dt + i_b * stride_db + o_t * stride_dt, o_d, m_d)
            b_b = vector(B + i_b * stride_bb + o_t * stride_bt, o_n, m_n)
            b_h = decay_of(b_dt, b_a2, Fresh, i_b * T + o_t) * b_h + (b_dt * b_x)[:, None] * b_b[None, :]
        # Another thread may read what one has written.
        tl.debug_barrier()
        for i in tl.range(0, count, loop_unroll_factor=2):
            o_t = tl.cast(start + count - 1 - i, tl.int64)
            b_dy = vector(DY + (i_b * T + o_t) * D, o_d, m_d)
            b_x = vector(X + i_b * stride_xb + o_t * stride_xt, o_d, m_d)
            b_dt = vector(Dt + i_b * stride_db + o_t * stride_dt, o_d, m_d)
            b_b = vector(B + i_b * stride_bb + o_t * stride_bt, o_n, m_n)
            b_c = vector(C + i_b * stride_cb + o_t * stride_ct, o_n, m_n)
            # [BLOCK_D, N_PADDED], the state before the token
            b_h = tl.load(p_scratch + (count - 1 - i) * BLOCK_D * N_PADDED)
            b_decay = decay_of(b_dt, b_a2, Fresh, i_b * T + o_t)
            b_taken = b_dt * b_x
            b_g += b_dy[:, None] * b_c[None, :]
            o_part = (i_part * T + o_t) * N + o_n
            b_after = b_decay * b_h + b_taken[:, None] * b_b[None, :]
            tl.store(DC + o_part, tl.sum(b_dy[:, None] * b_after, 0), mask=m_n)
            tl.store(DB + o_part, tl.sum(b_taken[:, None] * b_g, 0), mask=m_n)
            b_dtaken = tl.sum(b_g * b_b[None, :], 1)
            b_g *= b_decay
            # Gradient of dt a, the logarithm of the decay.
            b_h *= b_g
            b_da += b_dt[:, None] * b_h
            b_ddt = tl.sum(b_h * b_a, 1) + b_dtaken * b_x
            b_dx = b_dtaken * b_dt
            if Skip is not None:
                b_dx += b_skip * b_dy
                b_dskip += b_dy * b_x
            o_x = (i_b * T + o_t) * D + o_d
            tl.store(DX + o_x, b_dx.to(DX.dtype.element_ty), mask=m_d)
            tl.store(DDt + o_x, b_ddt, mask=m_d)
        tl.debug_barrier()
    tl.store(DA + p_segment, b_da, mask=m_h)
    if Skip is not None:
        tl.store(DSkip + (i_b * segments + i_s) * D + o_d, b_dskip, mask=m_d)
    if i_s == 0:
        tl.store(DState + i_b * D * N + o_h, b_g, mask=m_h)
