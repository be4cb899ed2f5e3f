"""Linear attention in chunks: three kernels for both directions; nothing is added atomically.

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

# exp of it is 0, and sums of it over a chunk are far from infinity.
LEAST = tl.constexpr(-800.0)


@triton.jit
def tile(p_base, o_rows, stride_r, o_cols, stride_c, m_rows, m_cols):
    """[rows, cols] with zeros outside; 64-bit offsets, for tensors of more than 2**31 elements."""
    p_tile = p_base + o_rows[:, None].to(tl.int64) * stride_r + o_cols[None, :].to(tl.int64) * stride_c
    return tl.load(p_tile, mask=m_rows[:, None] & m_cols[None, :], other=0.0)


@triton.jit
def first_dot(b_a, b_b, b_sum, PRECISION: tl.constexpr):
    """Products of inputs: as they are where both have one dtype, else in fp32."""
    if b_a.dtype == b_b.dtype:
        b_sum = tl.dot(b_a, b_b, b_sum, input_precision=PRECISION)
    else:
        b_sum = tl.dot(b_a.to(tl.float32), b_b.to(tl.float32), b_sum, input_precision=PRECISION)
    return b_sum


@triton.jit
def summed(Decay, o_t, stride_t, m_t):
    """Log-decay from the chunk's start to each token, and over the chunk; float64, so that differences keep digits."""
    b_steps = tl.load(Decay + o_t.to(tl.int64) * stride_t, mask=m_t, other=0.0).to(tl.float64)
    b_steps = tl.maximum(b_steps, LEAST)
    return tl.cumsum(b_steps, 0), tl.sum(b_steps, 0)


@triton.jit
def left(b_since, b_total, b_ids, id_before, id_last, DECAY: tl.constexpr, IDS: tl.constexpr, AT_END: tl.constexpr):
    """[C]: what is left at each token of the state before the chunk or, AT_END, of each token at the chunk's end."""
    b_left = tl.full(b_since.shape, 1.0, tl.float32)
    if DECAY:
        b_left = tl.exp((b_total - b_since if AT_END else b_since).to(tl.float32))
    if IDS:
        b_left = tl.where(b_ids == (id_last if AT_END else id_before), b_left, 0.0)
    return b_left


@triton.jit
def inside(
    b_since, b_ids, o_c, CHUNK: tl.constexpr, DECAY: tl.constexpr, IDS: tl.constexpr, STRICT: tl.constexpr,
    REVERSE: tl.constexpr,
):  # fmt: skip
    """[C, C]: what is left of the column's token at the row's, 0 where it is not seen; REVERSE: the other way round."""
    later, earlier = o_c[:, None], o_c[None, :]
    if REVERSE:
        later, earlier = o_c[None, :], o_c[:, None]
    m_seen = later > earlier if STRICT else later >= earlier
    if IDS:
        m_seen = m_seen & (b_ids[:, None] == b_ids[None, :])
    b_left = tl.where(m_seen, 1.0, 0.0)
    if DECAY:
        # Two fp32 parts of the float64 sum: their difference has all digits of an fp32 number.
        b_high = b_since.to(tl.float32)
        b_low = (b_since - b_high.to(tl.float64)).to(tl.float32)
        b_between = (b_high[:, None] - b_high[None, :]) + (b_low[:, None] - b_low[None, :])
        b_between = -b_between if REVERSE else b_between
        b_left = tl.where(m_seen, tl.exp(tl.where(m_seen, b_between, 0.0)), 0.0)
    return b_left


@triton.jit
def chunk_ids(Ids, i_b, T, start, o_t, m_t, CHUNK: tl.constexpr):
    """Documents of the chunk's tokens, of the token before it and of its last one; Ids [B, 1 + T]."""
    p_ids = Ids + i_b * (T + 1)
    b_ids = tl.load(p_ids + 1 + o_t, mask=m_t, other=-1)
    return b_ids, tl.load(p_ids + start), tl.load(p_ids + tl.minimum(start + CHUNK, T))


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
    i_bh = (tl.program_id(0) // (tiles_a * tiles_b)).to(tl.int64)
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
        i_row = i_c.to(tl.int64) * rows + i_b * (H // share) + i_g
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
            b_state *= tl.exp(b_total.to(tl.float32))
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
        i_row = i_c.to(tl.int64) * rows + i_b * (H // share) + i_h // share
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


@triton.jit(do_not_specialize=["T", "H", "share", "rows"])
def decay_kernel(
    Q, K, V, DY, States, Later, Decay, Ids, DDecay, stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh,
    stride_vb, stride_vt, stride_vh, stride_yb, stride_yt, stride_yh, stride_db, stride_dt, stride_dh, T, H, share, rows,
    K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """DDecay [B, T, H]: for each log-decay the sum over all pairs (token or state, query) that it stands between."""
    chunks = tl.cdiv(T, CHUNK)
    i_c = tl.program_id(0) % chunks
    i_bh = (tl.program_id(0) // chunks).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    i_g = i_h // share
    o_c = tl.arange(0, CHUNK)
    o_t = i_c * CHUNK + o_c
    m_t = o_t < T
    p_q, p_k = Q + i_b * stride_qb + i_g * stride_qh, K + i_b * stride_kb + i_g * stride_kh
    p_v, p_y = V + i_b * stride_vb + i_h * stride_vh, DY + i_b * stride_yb + i_h * stride_yh
    i_row = i_c.to(tl.int64) * rows + i_b * (H // share) + i_g
    p_state = i_row * K_WIDTH * share * V_WIDTH + i_h % share * V_WIDTH

    b_ids, id_before, id_last = o_c, 0, 0
    if Ids is not None:
        b_ids, id_before, id_last = chunk_ids(Ids, i_b, T, i_c * CHUNK, o_t, m_t, CHUNK)
    b_since, b_total = summed(Decay + i_b * stride_db + i_h * stride_dh, o_t, stride_dt, m_t)

    # One product at a time, so that they fit into registers. A token's pair with itself stands between nothing.
    b_weights = tl.zeros([CHUNK, CHUNK], tl.float32)
    for i_k in range(0, K_WIDTH, BLOCK_K):
        o_k = i_k + tl.arange(0, BLOCK_K)
        # [CHUNK, BLOCK_K], [BLOCK_K, CHUNK]
        b_q = tile(p_q, o_t, stride_qt, o_k, 1, m_t, o_k < K_WIDTH)
        b_k = tile(p_k, o_k, 1, o_t, stride_kt, o_k < K_WIDTH, m_t)
        b_weights = first_dot(b_q, b_k, b_weights, PRECISION)
    b_weights *= inside(b_since, b_ids, o_c, CHUNK, True, Ids is not None, True, False)
    b_pairs = tl.zeros([CHUNK, CHUNK], tl.float32)
    for i_v in range(0, V_WIDTH, BLOCK_V):
        o_v = i_v + tl.arange(0, BLOCK_V)
        # [CHUNK, BLOCK_V], [BLOCK_V, CHUNK]
        b_y = tile(p_y, o_t, stride_yt, o_v, 1, m_t, o_v < V_WIDTH)
        b_v = tile(p_v, o_v, 1, o_t, stride_vt, o_v < V_WIDTH, m_t)
        b_pairs = first_dot(b_y, b_v, b_pairs, PRECISION)
    b_pairs *= b_weights
    b_ends = tl.sum(b_pairs, 1) - tl.sum(b_pairs, 0)

    # [CHUNK]: dy . (q S) and v . (k R); and S . R
    b_queries, b_keys, kept = tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK], tl.float32), 0.0
    for i_k in range(0, K_WIDTH, BLOCK_K):
        o_k = i_k + tl.arange(0, BLOCK_K)
        m_k = o_k < K_WIDTH
        for i_v in range(0, V_WIDTH, BLOCK_V):
            o_v = i_v + tl.arange(0, BLOCK_V)
            m_v = o_v < V_WIDTH
            # [BLOCK_K, BLOCK_V], [CHUNK, BLOCK_K], [CHUNK, BLOCK_V]
            b_s = tile(States + p_state, o_k, share * V_WIDTH, o_v, 1, m_k, m_v)
            b_q = tile(p_q, o_t, stride_qt, o_k, 1, m_t, m_k).to(tl.float32)
            b_y = tile(p_y, o_t, stride_yt, o_v, 1, m_t, m_v).to(tl.float32)
            b_queries += tl.sum(tl.dot(b_q, b_s, input_precision=PRECISION) * b_y, 1)
            b_r = tile(Later + p_state, o_k, share * V_WIDTH, o_v, 1, m_k, m_v)
            b_k = tile(p_k, o_t, stride_kt, o_k, 1, m_t, m_k).to(tl.float32)
            b_v = tile(p_v, o_t, stride_vt, o_v, 1, m_t, m_v).to(tl.float32)
            b_keys += tl.sum(tl.dot(b_k, b_r, input_precision=PRECISION) * b_v, 1)
            kept += tl.sum(tl.sum(b_s * b_r, 1), 0)
    if Ids is not None:
        kept = tl.where(id_before == id_last, kept, 0.0)
    b_ends += b_queries * left(b_since, b_total, b_ids, id_before, id_last, True, Ids is not None, False)
    b_keys *= left(b_since, b_total, b_ids, id_before, id_last, True, Ids is not None, True)
    # Queries from here on, keys before.
    m_later = o_c[None, :] >= o_c[:, None]
    b_grad = tl.sum(tl.where(m_later, b_ends[None, :], b_keys[None, :]), 1) + kept * tl.exp(b_total.to(tl.float32))
    tl.store(DDecay + (i_b * T + o_t) * H + i_h, b_grad, mask=m_t)
