"""The gradient of log-decays; all other gradients are products of `triton_forward`."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.linear.triton_tile import chunk_ids, first_dot, inside, left, summed, tile


@triton.jit(do_not_specialize=["T", "H", "share", "rows"])
def decay_kernel(
    Q, K, V, DY, States, Later, Decay, Ids, DDecay, stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh,
    stride_vb, stride_vt, stride_vh, stride_yb, stride_yt, stride_yh, stride_db, stride_dt, stride_dh, T, H, share,
    rows,
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
    i_row = i_c * rows.to(tl.int64) + i_b * (H // share) + i_g
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
