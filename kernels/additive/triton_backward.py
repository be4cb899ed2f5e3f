"""Additive attention, backward: tiles of pairs are made again; nothing is added atomically.

With r = (1 - tanh(q + k)) / 2, p the weights of a row and d its sum of y * dy: ds = p (dy v - d), and through each
channel dscore/dq = dscore/dk = 4 w r (1 - r), dscore/dw = 1 - 2 r. One kernel keeps queries and sums over keys, one
keeps keys and sums over queries, so the order never changes; each tile's part of dw is added up outside. A program
gives the gradients of OWN channels. Where there are more, the scores are made first, BLOCK_A channels at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.additive.triton_forward import SCORE, remainder, weighted_remainders
from kernels.attention.triton_tile import (
    document,
    key_range,
    load_tile,
    position,
    query_range,
    tile_pointers,
    visible,
)


@triton.jit(do_not_specialize=["T", "S", "H", "window"])
def additive_dq_kernel(
    Q, K, V, W, DY, Reference, Delta, DQ, DW, QPositions, KPositions, QDocuments, KDocuments, Extents, stride_qb,
    stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh, T, S, H, window,
    CAUSAL: tl.constexpr, APPROXIMATE: tl.constexpr, A_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    A_PADDED: tl.constexpr, V_PADDED: tl.constexpr, OWN: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_A: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq [B, T, H, A_WIDTH], and each tile's part of dw, [B, tiles, H, A_WIDTH] fp32."""
    blocks = tl.cdiv(T, BLOCK_T)
    chunks: tl.constexpr = A_PADDED // OWN
    i_a = tl.program_id(0) % chunks * OWN
    program = tl.program_id(0) // chunks
    i_block = blocks - 1 - program % blocks
    i_bh = program // blocks
    i_b = (i_bh // H).to(tl.int64)
    i_h = (i_bh % H).to(tl.int64)

    o_t = i_block * BLOCK_T + tl.arange(0, BLOCK_T)
    m_t = o_t < T
    o_s = tl.arange(0, BLOCK_S)
    o_a = i_a + tl.arange(0, OWN)
    o_c = tl.arange(0, BLOCK_A)
    o_v = tl.arange(0, V_PADDED)
    row = (i_b * T + o_t) * H + i_h
    # [OWN], [BLOCK_T, OWN], [BLOCK_T, V_PADDED]
    b_w = tl.load(W + i_h * A_WIDTH + o_a, mask=o_a < A_WIDTH, other=0.0)
    q_rows = Q + i_b * stride_qb + i_h * stride_qh + o_t[:, None].to(tl.int64) * stride_qt
    p_q = q_rows + o_a[None, :]
    b_q = load_tile(p_q, m_t, o_a, A_WIDTH, A_PADDED, True).to(tl.float32)
    b_dy = load_tile(DY + row[:, None] * V_WIDTH + o_v[None, :], m_t, o_v, V_WIDTH, V_PADDED, True)
    reference = tl.load(Reference + row, mask=m_t, other=float("inf"))[:, None]
    b_delta = tl.load(Delta + row, mask=m_t, other=0.0)[:, None]
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

    k_rows = K + i_b * stride_kb + i_h * stride_kh + o_s[:, None].to(tl.int64) * stride_kt
    p_k = k_rows + o_a[None, :]
    p_v = tile_pointers(V + i_b * stride_vb + i_h * stride_vh, o_s, stride_vt, o_v)
    b_dq = tl.zeros([BLOCK_T, OWN], tl.float32)
    b_dw = tl.zeros([BLOCK_T, OWN], tl.float32)
    for start in range(low, high, BLOCK_S):
        o_j = start + o_s
        m_s = o_j < S
        far = tl.cast(start, tl.int64)
        # [BLOCK_S, OWN], [BLOCK_S, V_PADDED]
        b_k = load_tile(p_k + far * stride_kt, m_s, o_a, A_WIDTH, A_PADDED, True).to(tl.float32)
        b_v = load_tile(p_v + far * stride_vt, m_s, o_v, V_WIDTH, V_PADDED, True)
        k_position = position(KPositions, i_b * S, o_j, m_s, 0)[None, :]
        k_document = document(KDocuments, i_b * S, o_j, m_s)[None, :]
        m_seen = visible(
            q_position - k_position, m_s[None, :], q_document, k_document, window, CAUSAL,
            QDocuments is not None, KDocuments is not None,
        )  # fmt: skip
        b_dweight = tl.dot(b_dy, tl.trans(b_v), input_precision=PRECISION) - b_delta
        # [BLOCK_T, BLOCK_S, OWN]
        b_r = remainder(b_q[:, None, :] + b_k[None, :, :], APPROXIMATE)
        if chunks == 1:
            b_sum = tl.sum(b_r * b_w[None, None, :], 2)
        else:
            b_sum = weighted_remainders(
                q_rows + o_c[None, :], k_rows + far * stride_kt + o_c[None, :], W + i_h * A_WIDTH, m_t, m_s, o_c,
                A_WIDTH, A_PADDED, BLOCK_A, APPROXIMATE,
            )  # fmt: skip
        b_score = b_sum * SCORE
        b_ds = (tl.exp2(tl.where(m_seen, b_score - reference, float("-inf"))) * b_dweight)[:, :, None]
        b_dw += tl.sum(b_ds * (1.0 - 2.0 * b_r), 1)
        b_dq += tl.sum(b_ds * (b_r - b_r * b_r), 1)
    m_tile = m_t[:, None] & (o_a[None, :] < A_WIDTH)
    b_dq = 4.0 * b_w[None, :] * b_dq
    tl.store(DQ + row[:, None] * A_WIDTH + o_a[None, :], b_dq.to(DQ.dtype.element_ty), mask=m_tile)
    p_dw = DW + ((i_b * blocks + i_block) * H + i_h) * A_WIDTH + o_a
    tl.store(p_dw, tl.sum(b_dw, 0), mask=o_a < A_WIDTH)


@triton.jit(do_not_specialize=["T", "S", "H", "window"])
def additive_dkv_kernel(
    Q, K, V, W, DY, Reference, Delta, DK, DV, QPositions, KPositions, QDocuments, KDocuments, Extents, stride_qb,
    stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh, T, S, H, window,
    CAUSAL: tl.constexpr, APPROXIMATE: tl.constexpr, A_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    A_PADDED: tl.constexpr, V_PADDED: tl.constexpr, OWN: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_A: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk [B, S, H, A_WIDTH] and dv [B, S, H, V_WIDTH]; tiles of pairs are [keys, queries]."""
    blocks = tl.cdiv(S, BLOCK_S)
    chunks: tl.constexpr = A_PADDED // OWN
    i_a = tl.program_id(0) % chunks * OWN
    program = tl.program_id(0) // chunks
    i_block = program % blocks
    i_bh = program // blocks
    i_b = (i_bh // H).to(tl.int64)
    i_h = (i_bh % H).to(tl.int64)

    o_j = i_block * BLOCK_S + tl.arange(0, BLOCK_S)
    m_s = o_j < S
    o_t = tl.arange(0, BLOCK_T)
    o_a = i_a + tl.arange(0, OWN)
    o_c = tl.arange(0, BLOCK_A)
    o_v = tl.arange(0, V_PADDED)
    # [OWN], [BLOCK_S, OWN], [BLOCK_S, V_PADDED]
    b_w = tl.load(W + i_h * A_WIDTH + o_a, mask=o_a < A_WIDTH, other=0.0)
    k_rows = K + i_b * stride_kb + i_h * stride_kh + o_j[:, None].to(tl.int64) * stride_kt
    p_k = k_rows + o_a[None, :]
    p_v = tile_pointers(V + i_b * stride_vb + i_h * stride_vh, o_j, stride_vt, o_v)
    b_k = load_tile(p_k, m_s, o_a, A_WIDTH, A_PADDED, True).to(tl.float32)
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

    q_rows = Q + i_b * stride_qb + i_h * stride_qh + o_t[:, None].to(tl.int64) * stride_qt
    p_q = q_rows + o_a[None, :]
    b_dk = tl.zeros([BLOCK_S, OWN], tl.float32)
    b_dv = tl.zeros([BLOCK_S, V_PADDED], tl.float32)
    for start in range(low, high, BLOCK_T):
        o_i = start + o_t
        m_t = o_i < T
        row = (i_b * T + o_i) * H + i_h
        far = tl.cast(start, tl.int64)
        # [BLOCK_T, OWN], [BLOCK_T, V_PADDED]
        b_q = load_tile(p_q + far * stride_qt, m_t, o_a, A_WIDTH, A_PADDED, True).to(tl.float32)
        b_dy = load_tile(DY + row[:, None] * V_WIDTH + o_v[None, :], m_t, o_v, V_WIDTH, V_PADDED, True)
        reference = tl.load(Reference + row, mask=m_t, other=float("inf"))[None, :]
        b_delta = tl.load(Delta + row, mask=m_t, other=0.0)[None, :]
        q_position = position(QPositions, i_b * T, o_i, m_t, S - T)[None, :]
        q_document = document(QDocuments, i_b * T, o_i, m_t)[None, :]
        m_seen = visible(
            q_position - k_position, m_t[None, :], q_document, k_document, window, CAUSAL,
            QDocuments is not None, KDocuments is not None,
        )  # fmt: skip
        b_dweight = tl.dot(b_v, tl.trans(b_dy), input_precision=PRECISION) - b_delta
        # [BLOCK_S, BLOCK_T, OWN]
        b_r = remainder(b_k[:, None, :] + b_q[None, :, :], APPROXIMATE)
        if chunks == 1:
            b_sum = tl.sum(b_r * b_w[None, None, :], 2)
        else:
            b_sum = weighted_remainders(
                k_rows + o_c[None, :], q_rows + far * stride_qt + o_c[None, :], W + i_h * A_WIDTH, m_s, m_t, o_c,
                A_WIDTH, A_PADDED, BLOCK_A, APPROXIMATE,
            )  # fmt: skip
        b_score = b_sum * SCORE
        b_weight = tl.exp2(tl.where(m_seen, b_score - reference, float("-inf")))
        b_dv = tl.dot(b_weight.to(b_dy.dtype), b_dy, b_dv, input_precision=PRECISION)
        b_dk += tl.sum((b_weight * b_dweight)[:, :, None] * (b_r - b_r * b_r), 1)
    row = (i_b * S + o_j) * H + i_h
    m_tile = m_s[:, None] & (o_a[None, :] < A_WIDTH)
    b_dk = 4.0 * b_w[None, :] * b_dk
    tl.store(DK + row[:, None] * A_WIDTH + o_a[None, :], b_dk.to(DK.dtype.element_ty), mask=m_tile)
    # All chunks have dv; the first one tells.
    m_tile = m_s[:, None] & (o_v[None, :] < tl.where(i_a == 0, V_WIDTH, 0))
    tl.store(DV + row[:, None] * V_WIDTH + o_v[None, :], b_dv.to(DV.dtype.element_ty), mask=m_tile)
