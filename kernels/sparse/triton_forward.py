"""Selected attention, forward: a program keeps one query of one key head, the heads of the group being its rows.

Loads are masked and never branched around, so that they can be asynchronous copies.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.attention.triton_tile import LOG2E, load_tile


@triton.jit
def chosen_keys(p_indices, i_tile, start, position, S, BLOCK: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr):
    """Slots of the keys of a tile of a chosen block, and which of them the query sees; PARTS tiles make a block."""
    i_block = tl.load(p_indices + i_tile // PARTS)
    inside = i_tile % PARTS * TILE + tl.arange(0, TILE)
    token = i_block * BLOCK + inside
    slot = start + token
    # No block is -1, whose tokens are below 0.
    return slot, (token >= 0) & (inside < BLOCK) & (token <= position) & (slot < S)


@triton.jit(do_not_specialize=["T", "S", "G", "n"])
def selected_forward_kernel(
    Q, K, V, Indices, Starts, Positions, Y, Reference, stride_qb, stride_qt, stride_qh, stride_kb, stride_kt,
    stride_kh, stride_vb, stride_vt, stride_vh, T, S, G, n, scale,
    GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr,
    K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, K_PADDED: tl.constexpr, V_PADDED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Y [B, T, H, V_WIDTH], and in Reference [B, T, H] fp32 log2 of the sum of exp2(score); +inf: nothing is visible.

    Q [B, T, H, K_WIDTH], K [B, S, G, K_WIDTH], V [B, S, G, V_WIDTH] strided; Indices [B, T, G, n]; Starts, Positions
    [B, T] int32.
    """
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
    # [ROWS, K_PADDED]
    p_q = Q + i_b * stride_qb + tl.cast(i_t, tl.int64) * stride_qt + (o_h * stride_qh)[:, None] + o_k[None, :]
    b_q = load_tile(p_q, m_r, o_k, K_WIDTH, K_PADDED, True)
    p_k = K + i_b * stride_kb + i_g * stride_kh + o_k[None, :]
    p_v = V + i_b * stride_vb + i_g * stride_vh + o_v[None, :]
    b_y = tl.zeros([ROWS, V_PADDED], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    # No more than the blocks up to the query's own can be chosen.
    for i_tile in range(0, tl.minimum(n, position // BLOCK + 1) * PARTS):
        slot, m_s = chosen_keys(p_indices, i_tile, start, position, S, BLOCK, PARTS, TILE)
        far = slot[:, None].to(tl.int64)
        # [TILE, K_PADDED], [TILE, V_PADDED]
        b_k = load_tile(p_k + far * stride_kt, m_s, o_k, K_WIDTH, K_PADDED, True)
        b_v = load_tile(p_v + far * stride_vt, m_s, o_v, V_WIDTH, V_PADDED, True)
        b_score = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * (scale * LOG2E)
        b_score = tl.where(m_s[None, :], b_score, float("-inf"))
        new_top = tl.maximum(top, tl.max(b_score, 1))
        # A row that saw nothing yet has no maximum; 0 keeps inf - inf away.
        zero = tl.where(new_top == float("-inf"), 0.0, new_top)
        b_weight = tl.exp2(b_score - zero[:, None])
        shrink = tl.exp2(top - zero)
        total = total * shrink + tl.sum(b_weight, 1)
        b_y = tl.dot(b_weight.to(b_v.dtype), b_v, b_y * shrink[:, None], input_precision=PRECISION)
        top = new_top
    empty = total == 0.0
    divisor = tl.where(empty, 1.0, total)
    rows = row * G * GROUP + o_h
    m_tile = m_r[:, None] & (o_v[None, :] < V_WIDTH)
    p_y = Y + rows[:, None] * V_WIDTH + o_v[None, :]
    tl.store(p_y, (b_y / divisor[:, None]).to(Y.dtype.element_ty), mask=m_tile)
    tl.store(Reference + rows, tl.where(empty, float("inf"), top + tl.log2(divisor)), mask=m_r)
