"""Linear attention in chunks: two kernels for both directions; nothing is added atomically.

A row is cut in chunks of C tokens. With W = Q K^T, S the state before a chunk, R the gradient of the one after it, L
what is left of one token at another, e at a token of the state before, f of a token at the chunk's end:

    y = (W L) V + e Q S        dv = (W L)^T dY + f K R
    dq = (dY V^T L) K + e dY S^T        dk = (dY V^T L)^T Q + f V R^T

All four are one product, out = (A B^T L) C + factor A X, so one kernel computes them; where the output has fewer heads
than the inputs (dq and dk of a group), it adds up heads in a fixed order. S and R are sums over chunks, forwards and
backwards in time. After the first product everything is fp32 (TF32 on tensor cores): a state overflows fp16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.linear.triton_tile import chunk_ids, first_dot, inside, left, summed, tile


@triton.jit(do_not_specialize=["T", "H", "share", "rows"])
def states_kernel(
    A, B, Decay, Ids, Initial, States, Final, stride_ab, stride_at, stride_ah, stride_bb, stride_bt, stride_bh,
    stride_db, stride_dt, stride_dh, T, H, share, rows,
    REVERSE: tl.constexpr, A_WIDTH: tl.constexpr, B_WIDTH: tl.constexpr, CHUNK: tl.constexpr, BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """States [n, rows, A_WIDTH, share, B_WIDTH] before each chunk and Final after the last: sums of left * a b^T.

    Forwards a is the key and b the value; REVERSE, a is the query and b the gradient of y, from the last chunk on.
    """
    tiles_a, tiles_b = tl.cdiv(A_WIDTH, BLOCK_A), tl.cdiv(B_WIDTH, BLOCK_B)
    o_a = tl.program_id(0) // tiles_b % tiles_a * BLOCK_A + tl.arange(0, BLOCK_A)
    o_b = tl.program_id(0) % tiles_b * BLOCK_B + tl.arange(0, BLOCK_B)
    i_bh = tl.program_id(0).to(tl.int64) // (tiles_a * tiles_b)
    i_b, i_h = i_bh // H, i_bh % H
    i_g = i_h // share
    m_a, m_b = o_a < A_WIDTH, o_b < B_WIDTH
    m_state = m_a[:, None] & m_b[None, :]
    o_c = tl.arange(0, CHUNK)
    chunks = tl.cdiv(T, CHUNK)

    p_state = i_bh * A_WIDTH * B_WIDTH + o_a[:, None] * B_WIDTH + o_b[None, :]
    p_states = States + (o_a[:, None] * share + i_h % share) * B_WIDTH + o_b[None, :]
    # [BLOCK_A, BLOCK_B]
    b_state = tl.load(Initial + p_state, mask=m_state, other=0.0)
    for i in range(chunks):
        i_c = chunks - 1 - i if REVERSE else i
        o_t = i_c * CHUNK + o_c
        m_t = o_t < T
        i_row = i_c * rows.to(tl.int64) + i_b * (H // share) + i_g
        tl.store(p_states + i_row * A_WIDTH * share * B_WIDTH, b_state, mask=m_state)
        # [BLOCK_A, CHUNK], [CHUNK, BLOCK_B]
        b_a = tile(A + i_b * stride_ab + i_g * stride_ah, o_a, 1, o_t, stride_at, m_a, m_t).to(tl.float32)
        b_b = tile(B + i_b * stride_bb + i_h * stride_bh, o_t, stride_bt, o_b, 1, m_t, m_b).to(tl.float32)
        b_since, b_total = o_c, 0
        b_ids, id_before, id_last = o_c, 0, 0
        if Decay is not None:
            b_since, b_total = summed(Decay + i_b * stride_db + i_h * stride_dh, o_t, stride_dt, m_t)
        if Ids is not None:
            b_ids, id_before, id_last = chunk_ids(Ids, i_b, T, i_c * CHUNK, o_t, m_t, CHUNK)
        b_left = left(
            b_since, b_total, b_ids, id_before, id_last, Decay is not None, Ids is not None, not REVERSE
        )
        if Decay is not None:
            b_state *= tl.exp(tl.cast(b_total, tl.float32))
        if Ids is not None:
            b_state = tl.where(id_before == id_last, b_state, 0.0)
        b_state = tl.dot(b_a * b_left[None, :], b_b, b_state, input_precision=PRECISION)
    tl.store(Final + p_state, b_state, mask=m_state)


@triton.jit(do_not_specialize=["T", "H", "rows", "loop", "share", "share_a", "share_b", "share_c"])
def product_kernel(
    A, B, C, X, Decay, Ids, Out, stride_ab, stride_at, stride_ah, stride_bb, stride_bt, stride_bh, stride_cb, stride_ct,
    stride_ch, stride_xs, stride_xi, stride_xo, stride_db, stride_dt, stride_dh, T, H, rows, loop, share, share_a,
    share_b, share_c,
    STRICT: tl.constexpr, REVERSE: tl.constexpr, INNER: tl.constexpr, OUTER: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_O: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Out [B, T, H / loop, OUTER] = sum over loop heads of (A B^T L) C + left * A X; see the top of the file.

    Head h reads head h // share_a of A, and so on; X [n, rows, (strides) INNER, OUTER, share]. REVERSE: a token sees
    those after it.
    """
    chunks, tiles = tl.cdiv(T, CHUNK), tl.cdiv(OUTER, BLOCK_O)
    o_o = tl.program_id(0) % tiles * BLOCK_O + tl.arange(0, BLOCK_O)
    i_c = tl.program_id(0) // tiles % chunks
    i_out = (tl.program_id(0) // (tiles * chunks)).to(tl.int64)
    heads = H // loop
    i_b, i_o = i_out // heads, i_out % heads
    o_c = tl.arange(0, CHUNK)
    o_t = i_c * CHUNK + o_c
    m_t, m_o = o_t < T, o_o < OUTER
    b_ids, id_before, id_last = o_c, 0, 0
    if Ids is not None:
        b_ids, id_before, id_last = chunk_ids(Ids, i_b, T, i_c * CHUNK, o_t, m_t, CHUNK)

    b_out = tl.zeros([CHUNK, BLOCK_O], tl.float32)
    for i in range(loop):
        i_h = i_o * loop + i
        i_row = i_c * rows.to(tl.int64) + i_b * (H // share) + i_h // share
        p_x = X + i_row * INNER * OUTER * share + i_h % share * stride_xs
        p_a = A + i_b * stride_ab + i_h // share_a * stride_ah
        p_b = B + i_b * stride_bb + i_h // share_b * stride_bh
        b_since, b_total = o_c, 0
        if Decay is not None:
            b_since, b_total = summed(Decay + i_b * stride_db + i_h * stride_dh, o_t, stride_dt, m_t)

        b_pairs = tl.zeros([CHUNK, CHUNK], tl.float32)
        for i_i in range(0, INNER, BLOCK_I):
            o_i = i_i + tl.arange(0, BLOCK_I)
            # [CHUNK, BLOCK_I], [BLOCK_I, CHUNK]
            b_a = tile(p_a, o_t, stride_at, o_i, 1, m_t, o_i < INNER)
            b_b = tile(p_b, o_i, 1, o_t, stride_bt, o_i < INNER, m_t)
            b_pairs = first_dot(b_a, b_b, b_pairs, PRECISION)
        b_pairs *= inside(b_since, b_ids, o_c, CHUNK, Decay is not None, Ids is not None, STRICT, REVERSE)
        # [CHUNK, BLOCK_O]
        b_c = tile(C + i_b * stride_cb + i_h // share_c * stride_ch, o_t, stride_ct, o_o, 1, m_t, m_o)
        b_out = tl.dot(b_pairs, b_c.to(tl.float32), b_out, input_precision=PRECISION)

        # Read again rather than kept: the two products would not fit into registers at once.
        b_behind = tl.zeros([CHUNK, BLOCK_O], tl.float32)
        for i_i in range(0, INNER, BLOCK_I):
            o_i = i_i + tl.arange(0, BLOCK_I)
            # [CHUNK, BLOCK_I], [BLOCK_I, BLOCK_O]
            b_a = tile(p_a, o_t, stride_at, o_i, 1, m_t, o_i < INNER)
            b_x = tile(p_x, o_i, stride_xi, o_o, stride_xo, o_i < INNER, m_o)
            b_behind = tl.dot(b_a.to(tl.float32), b_x, b_behind, input_precision=PRECISION)
        b_left = left(b_since, b_total, b_ids, id_before, id_last, Decay is not None, Ids is not None, REVERSE)
        b_out += b_behind * b_left[:, None]
    p_out = Out + ((i_b * T + o_t)[:, None] * heads + i_o) * OUTER + o_o[None, :]
    tl.store(p_out, b_out.to(Out.dtype.element_ty), mask=m_t[:, None] & m_o[None, :])
