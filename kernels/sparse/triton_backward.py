"""Selected attention, backward: weights are made again from their reference; nothing is added atomically.

dq keeps one query as the forward pass does. For dk and dv the choice is inverted beforehand into a list of queries for
each block, in their order, and a program keeps the keys of one block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.attention.triton_tile import LOG2E, load_tile
from kernels.sparse.triton_forward import chosen_keys


@triton.jit(do_not_specialize=["T", "S", "G", "n"])
def selected_dq_kernel(
    Q, K, V, Indices, Starts, Positions, DY, Reference, Delta, DQ, stride_qb, stride_qt, stride_qh, stride_kb,
    stride_kt, stride_kh, stride_vb, stride_vt, stride_vh, T, S, G, n, scale,
    GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr,
    K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, K_PADDED: tl.constexpr, V_PADDED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dq [B, T, H, K_WIDTH]."""
    i_t = tl.program_id(0) % T
    i_bg = tl.program_id(0) // T
    i_b = (i_bg // G).to(tl.int64)
    i_g = (i_bg % G).to(tl.int64)
    row = i_b * T + i_t
    start = tl.load(Starts + row)
    position = tl.load(Positions + row)
    p_indices = Indices + (row * G + i_g) * n

    o_r = tl.arange(0, ROWS)
    o_h = i_g * GROUP + o_r
    m_r = o_r < GROUP
    o_k = tl.arange(0, K_PADDED)
    o_v = tl.arange(0, V_PADDED)
    rows = row * G * GROUP + o_h
    # [ROWS, K_PADDED], [ROWS, V_PADDED]
    p_q = Q + i_b * stride_qb + tl.cast(i_t, tl.int64) * stride_qt + (o_h * stride_qh)[:, None] + o_k[None, :]
    b_q = load_tile(p_q, m_r, o_k, K_WIDTH, K_PADDED, True)
    b_dy = load_tile(DY + rows[:, None] * V_WIDTH + o_v[None, :], m_r, o_v, V_WIDTH, V_PADDED, True)
    reference = tl.load(Reference + rows, mask=m_r, other=float("inf"))[:, None]
    b_delta = tl.load(Delta + rows, mask=m_r, other=0.0)[:, None]
    p_k = K + i_b * stride_kb + i_g * stride_kh + o_k[None, :]
    p_v = V + i_b * stride_vb + i_g * stride_vh + o_v[None, :]
    b_dq = tl.zeros([ROWS, K_PADDED], tl.float32)
    for i_tile in range(0, tl.minimum(n, position // BLOCK + 1) * PARTS):
        slot, m_s = chosen_keys(p_indices, i_tile, start, position, S, BLOCK, PARTS, TILE)
        far = slot[:, None].to(tl.int64)
        # [TILE, K_PADDED], [TILE, V_PADDED]
        b_k = load_tile(p_k + far * stride_kt, m_s, o_k, K_WIDTH, K_PADDED, True)
        b_v = load_tile(p_v + far * stride_vt, m_s, o_v, V_WIDTH, V_PADDED, True)
        b_score = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * (scale * LOG2E)
        b_weight = tl.exp2(tl.where(m_s[None, :], b_score - reference, float("-inf")))
        b_ds = b_weight * (tl.dot(b_dy, tl.trans(b_v), input_precision=PRECISION) - b_delta)
        b_dq = tl.dot(b_ds.to(b_k.dtype), b_k, b_dq, input_precision=PRECISION)
    p_dq = DQ + rows[:, None] * K_WIDTH + o_k[None, :]
    tl.store(p_dq, (b_dq * scale).to(DQ.dtype.element_ty), mask=m_r[:, None] & (o_k[None, :] < K_WIDTH))


@triton.jit(do_not_specialize=["T", "S", "G", "pairs", "places", "step"])
def selected_dkv_kernel(
    Q, K, V, Lists, Bounds, Starts, Positions, DY, Reference, Delta, DK, DV, stride_qb, stride_qt, stride_qh, stride_kb,
    stride_kt, stride_kh, stride_vb, stride_vt, stride_vh, T, S, G, pairs, places, step, scale,
    GROUP: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr,
    BLOCK_T: tl.constexpr, K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, K_PADDED: tl.constexpr,
    V_PADDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk [B, S, G, K_WIDTH] and dv [B, S, G, V_WIDTH], which hold zeros before.

    Lists [B, G, pairs] int32: queries by the block they chose; those of the block whose first key is in slot
    i * step stand from Bounds[.., i] to Bounds[.., i + 1], of places + 1. Row r of a tile is head r % HEADS of its
    query r // HEADS, HEADS being GROUP padded.
    """
    i_part = tl.program_id(0) % PARTS
    i_place = tl.program_id(0) // PARTS % places
    i_bg = (tl.program_id(0) // PARTS // places).to(tl.int64)
    i_b = i_bg // G
    i_g = i_bg % G
    low = tl.load(Bounds + i_bg * (places + 1) + i_place)
    high = tl.load(Bounds + i_bg * (places + 1) + i_place + 1)

    inside = i_part * TILE + tl.arange(0, TILE)
    first = i_place * step
    slot = first + inside
    m_s = (inside < tl.where(low < high, BLOCK, 0)) & (slot < S)
    o_r = tl.arange(0, BLOCK_T * HEADS)
    o_k = tl.arange(0, K_PADDED)
    o_v = tl.arange(0, V_PADDED)
    far = slot[:, None].to(tl.int64)
    # [TILE, K_PADDED], [TILE, V_PADDED]
    p_k = K + i_b * stride_kb + i_g * stride_kh + far * stride_kt + o_k[None, :]
    p_v = V + i_b * stride_vb + i_g * stride_vh + far * stride_vt + o_v[None, :]
    b_k = load_tile(p_k, m_s, o_k, K_WIDTH, K_PADDED, True)
    b_v = load_tile(p_v, m_s, o_v, V_WIDTH, V_PADDED, True)
    b_dk = tl.zeros([TILE, K_PADDED], tl.float32)
    b_dv = tl.zeros([TILE, V_PADDED], tl.float32)
    # The last slot that any of the queries sees: the rest of the block may be another document's.
    reach = first - 1
    r_h = i_g * GROUP + o_r % HEADS
    for entry in range(low, high, BLOCK_T):
        o_e = entry + o_r // HEADS
        m_r = (o_e < high) & (o_r % HEADS < GROUP)
        r_t = tl.load(Lists + i_bg * pairs + o_e, mask=m_r, other=0)
        row = i_b * T + r_t
        # Slots up to this one are seen.
        r_last = tl.load(Starts + row, mask=m_r, other=0) + tl.load(Positions + row, mask=m_r, other=-1)
        reach = tl.maximum(reach, tl.max(r_last, 0))
        rows = row * G * GROUP + r_h
        # [BLOCK_T * HEADS, K_PADDED], [BLOCK_T * HEADS, V_PADDED]
        p_q = Q + i_b * stride_qb + (r_t.to(tl.int64) * stride_qt + r_h * stride_qh)[:, None] + o_k[None, :]
        b_q = load_tile(p_q, m_r, o_k, K_WIDTH, K_PADDED, True)
        b_dy = load_tile(DY + rows[:, None] * V_WIDTH + o_v[None, :], m_r, o_v, V_WIDTH, V_PADDED, True)
        reference = tl.load(Reference + rows, mask=m_r, other=float("inf"))[None, :]
        b_delta = tl.load(Delta + rows, mask=m_r, other=0.0)[None, :]
        m_seen = m_s[:, None] & m_r[None, :] & (slot[:, None] <= r_last[None, :])
        b_score = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION) * (scale * LOG2E)
        b_weight = tl.exp2(tl.where(m_seen, b_score - reference, float("-inf")))
        b_dv = tl.dot(b_weight.to(b_dy.dtype), b_dy, b_dv, input_precision=PRECISION)
        b_ds = b_weight * (tl.dot(b_v, tl.trans(b_dy), input_precision=PRECISION) - b_delta)
        b_dk = tl.dot(b_ds.to(b_q.dtype), b_q, b_dk, input_precision=PRECISION)
    rows = (i_b * S + slot) * G + i_g
    m_s = m_s & (slot <= reach)
    p_dk = DK + rows[:, None] * K_WIDTH + o_k[None, :]
    tl.store(p_dk, (b_dk * scale).to(DK.dtype.element_ty), mask=m_s[:, None] & (o_k[None, :] < K_WIDTH))
    p_dv = DV + rows[:, None] * V_WIDTH + o_v[None, :]
    tl.store(p_dv, b_dv.to(DV.dtype.element_ty), mask=m_s[:, None] & (o_v[None, :] < V_WIDTH))
