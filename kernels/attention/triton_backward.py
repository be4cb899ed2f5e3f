"""Flash attention, backward: weights are made again from the log-sum-exp; nothing is added atomically.

With p the weights of a row, d its sum of y * dy less the gradient of its log-sum-exp, and a the derivative of the cap:
ds = p (dy v - d) a, dq = scale ds k, dk = scale ds^T q, dv = p^T dy (Dao 2023, arXiv:2307.08691, section 3.1.2). One
kernel keeps queries and sums over keys, one keeps keys and sums over queries and heads, so the order never changes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.attention.triton_tile import (
    LOG2E,
    document,
    key_range,
    load_tile,
    position,
    query_range,
    score,
    tile_pointers,
    visible,
)


@triton.jit(do_not_specialize=["rows"])
def delta_kernel(
    Y, DY, DLse, Delta, rows, V_WIDTH: tl.constexpr, V_PADDED: tl.constexpr, BLOCK: tl.constexpr
):
    """The sum of y * dy less the gradient of the log-sum-exp for each of [B T H] rows, fp32."""
    o_r = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    o_v = tl.arange(0, V_PADDED)
    m_r = o_r < rows
    pointers = o_r[:, None] * V_WIDTH + o_v[None, :]
    b_y = load_tile(Y + pointers, m_r, o_v, V_WIDTH, V_PADDED, True).to(tl.float32)
    b_dy = load_tile(DY + pointers, m_r, o_v, V_WIDTH, V_PADDED, True).to(tl.float32)
    b_delta = tl.sum(b_y * b_dy, 1)
    if DLse is not None:
        b_delta -= tl.load(DLse + o_r, mask=m_r, other=0.0)
    tl.store(Delta + o_r, b_delta, mask=m_r)


@triton.jit(do_not_specialize=["T", "S", "H", "share", "window"])
def dq_kernel(
    Q, K, V, DY, Lse, Delta, DQ, DSlopes, Slopes, QPositions, KPositions, QDocuments, KDocuments, Extents, stride_qb,
    stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh, T, S, H, share, window,
    inner, outer, scale,
    CAUSAL: tl.constexpr, K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, K_PADDED: tl.constexpr,
    V_PADDED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq [B, T, H, K_WIDTH], and each query's part of the slope's gradient [B, T, H] where DSlopes is given."""
    blocks = tl.cdiv(T, BLOCK_T)
    i_block = blocks - 1 - tl.program_id(0) % blocks
    i_bh = tl.program_id(0) // blocks
    i_b = (i_bh // H).to(tl.int64)
    i_h = (i_bh % H).to(tl.int64)
    i_g = i_h // share

    o_t = i_block * BLOCK_T + tl.arange(0, BLOCK_T)
    m_t = o_t < T
    o_s = tl.arange(0, BLOCK_S)
    o_k = tl.arange(0, K_PADDED)
    o_v = tl.arange(0, V_PADDED)
    row = (i_b * T + o_t) * H + i_h
    # [BLOCK_T, K_PADDED], [BLOCK_T, V_PADDED]
    p_q = tile_pointers(Q + i_b * stride_qb + i_h * stride_qh, o_t, stride_qt, o_k)
    b_q = load_tile(p_q, m_t, o_k, K_WIDTH, K_PADDED, True)
    b_dy = load_tile(DY + row[:, None] * V_WIDTH + o_v[None, :], m_t, o_v, V_WIDTH, V_PADDED, True)
    b_lse = _reference(tl.load(Lse + row, mask=m_t, other=float("-inf")))[:, None]
    b_delta = tl.load(Delta + row, mask=m_t, other=0.0)[:, None]
    b_slope = 0.0
    if Slopes is not None:
        b_slope = tl.load(Slopes + i_h)
    q_position = position(QPositions, i_b * T, o_t, m_t, S - T)[:, None]
    q_document = document(QDocuments, i_b * T, o_t, m_t)[:, None]

    if Extents is None:
        first = i_block * BLOCK_T + S - T
        low, high = key_range(first, tl.minimum(first + BLOCK_T, S) - 1, S, window, CAUSAL)
    else:
        p_extent = Extents + (i_b * blocks + i_block) * 2
        low = tl.load(p_extent)
        high = tl.load(p_extent + 1)
    low = low // BLOCK_S * BLOCK_S
    p_k = tile_pointers(K + i_b * stride_kb + i_g * stride_kh, o_s, stride_kt, o_k)
    p_v = tile_pointers(V + i_b * stride_vb + i_g * stride_vh, o_s, stride_vt, o_v)
    b_dq = tl.zeros([BLOCK_T, K_PADDED], tl.float32)
    b_dslope = tl.zeros([BLOCK_T], tl.float32)
    for start in range(low, high, BLOCK_S):
        o_j = start + o_s
        m_s = o_j < S
        far = tl.cast(start, tl.int64)
        # [BLOCK_S, K_PADDED], [BLOCK_S, V_PADDED]
        b_k = load_tile(p_k + far * stride_kt, m_s, o_k, K_WIDTH, K_PADDED, True)
        b_v = load_tile(p_v + far * stride_vt, m_s, o_v, V_WIDTH, V_PADDED, True)
        distance = q_position - position(KPositions, i_b * S, o_j, m_s, 0)[None, :]
        b_dots = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        b_score, b_growth = score(b_dots, distance, b_slope, inner, outer, Slopes is not None)
        k_document = document(KDocuments, i_b * S, o_j, m_s)[None, :]
        m_seen = visible(
            distance, m_s[None, :], q_document, k_document, window, CAUSAL,
            QDocuments is not None, KDocuments is not None,
        )  # fmt: skip
        b_weight = tl.exp2(tl.where(m_seen, b_score - b_lse, float("-inf")))
        b_ds = b_weight * (tl.dot(b_dy, tl.trans(b_v), input_precision=PRECISION) - b_delta)
        if DSlopes is not None:
            b_dslope -= tl.sum(b_ds * tl.abs(distance).to(tl.float32), 1)
        if outer is not None:
            b_ds = b_ds * b_growth
        b_dq = tl.dot(b_ds.to(b_k.dtype), b_k, b_dq, input_precision=PRECISION)
    m_tile = m_t[:, None] & (o_k[None, :] < K_WIDTH)
    tl.store(DQ + row[:, None] * K_WIDTH + o_k[None, :], (b_dq * scale).to(DQ.dtype.element_ty), mask=m_tile)
    if DSlopes is not None:
        tl.store(DSlopes + row, b_dslope, mask=m_t)


@triton.jit(do_not_specialize=["T", "S", "H", "share", "window"])
def dkv_kernel(
    Q, K, V, DY, Lse, Delta, DK, DV, Slopes, QPositions, KPositions, QDocuments, KDocuments, Extents, stride_qb,
    stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh, T, S, H, share, window,
    inner, outer, scale,
    CAUSAL: tl.constexpr, K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, K_PADDED: tl.constexpr,
    V_PADDED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk [B, S, G, K_WIDTH] and dv [B, S, G, V_WIDTH], summed over the `share` heads of a group.

    Tiles of pairs are [keys, queries], so that weights enter their products as they are.
    """
    blocks = tl.cdiv(S, BLOCK_S)
    groups = H // share
    i_block = tl.program_id(0) % blocks
    i_bg = tl.program_id(0) // blocks
    i_b = (i_bg // groups).to(tl.int64)
    i_g = (i_bg % groups).to(tl.int64)

    o_j = i_block * BLOCK_S + tl.arange(0, BLOCK_S)
    m_s = o_j < S
    o_t = tl.arange(0, BLOCK_T)
    o_k = tl.arange(0, K_PADDED)
    o_v = tl.arange(0, V_PADDED)
    # [BLOCK_S, K_PADDED], [BLOCK_S, V_PADDED]
    p_k = tile_pointers(K + i_b * stride_kb + i_g * stride_kh, o_j, stride_kt, o_k)
    p_v = tile_pointers(V + i_b * stride_vb + i_g * stride_vh, o_j, stride_vt, o_v)
    b_k = load_tile(p_k, m_s, o_k, K_WIDTH, K_PADDED, True)
    b_v = load_tile(p_v, m_s, o_v, V_WIDTH, V_PADDED, True)
    k_position = position(KPositions, i_b * S, o_j, m_s, 0)[:, None]
    k_document = document(KDocuments, i_b * S, o_j, m_s)[:, None]

    if Extents is None:
        first = i_block * BLOCK_S
        low, high = query_range(first, tl.minimum(first + BLOCK_S, S) - 1, T, S - T, window, CAUSAL)
    else:
        p_extent = Extents + (i_b * blocks + i_block) * 2
        low = tl.load(p_extent)
        high = tl.load(p_extent + 1)
    low = low // BLOCK_T * BLOCK_T
    b_dk = tl.zeros([BLOCK_S, K_PADDED], tl.float32)
    b_dv = tl.zeros([BLOCK_S, V_PADDED], tl.float32)
    for i_head in range(0, share):
        i_h = i_g * share + i_head
        b_slope = 0.0
        if Slopes is not None:
            b_slope = tl.load(Slopes + i_h)
        p_q = tile_pointers(Q + i_b * stride_qb + i_h * stride_qh, o_t, stride_qt, o_k)
        for start in range(low, high, BLOCK_T):
            o_i = start + o_t
            m_t = o_i < T
            row = (i_b * T + o_i) * H + i_h
            # [BLOCK_T, K_PADDED], [BLOCK_T, V_PADDED]
            b_q = load_tile(p_q + tl.cast(start, tl.int64) * stride_qt, m_t, o_k, K_WIDTH, K_PADDED, True)
            b_dy = load_tile(DY + row[:, None] * V_WIDTH + o_v[None, :], m_t, o_v, V_WIDTH, V_PADDED, True)
            b_lse = _reference(tl.load(Lse + row, mask=m_t, other=float("-inf")))[None, :]
            b_delta = tl.load(Delta + row, mask=m_t, other=0.0)[None, :]
            distance = position(QPositions, i_b * T, o_i, m_t, S - T)[None, :] - k_position
            b_dots = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)
            b_score, b_growth = score(b_dots, distance, b_slope, inner, outer, Slopes is not None)
            q_document = document(QDocuments, i_b * T, o_i, m_t)[None, :]
            m_seen = visible(
                distance, m_t[None, :], q_document, k_document, window, CAUSAL,
                QDocuments is not None, KDocuments is not None,
            )  # fmt: skip
            b_weight = tl.exp2(tl.where(m_seen, b_score - b_lse, float("-inf")))
            b_dv = tl.dot(b_weight.to(b_dy.dtype), b_dy, b_dv, input_precision=PRECISION)
            b_ds = b_weight * (tl.dot(b_v, tl.trans(b_dy), input_precision=PRECISION) - b_delta)
            if outer is not None:
                b_ds = b_ds * b_growth
            b_dk = tl.dot(b_ds.to(b_q.dtype), b_q, b_dk, input_precision=PRECISION)
    row = (i_b * S + o_j) * groups + i_g
    m_tile = m_s[:, None] & (o_k[None, :] < K_WIDTH)
    tl.store(DK + row[:, None] * K_WIDTH + o_k[None, :], (b_dk * scale).to(DK.dtype.element_ty), mask=m_tile)
    m_tile = m_s[:, None] & (o_v[None, :] < V_WIDTH)
    tl.store(DV + row[:, None] * V_WIDTH + o_v[None, :], b_dv.to(DV.dtype.element_ty), mask=m_tile)


@triton.jit
def _reference(b_lse):
    """What weights are taken relative to, in units of log 2; a row that saw nothing gets weights of 0."""
    return tl.where(b_lse == float("-inf"), float("inf"), b_lse * LOG2E)
