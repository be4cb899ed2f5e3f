"""Scores of selection blocks from the log-sum-exp of compressed attention, a tile of queries and blocks at a time."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.attention.triton_tile import LOG2E, load_tile


@triton.jit(do_not_specialize=["first", "rows", "T", "C", "G", "J"])
def block_scores_kernel(
    Q, K, Lse, Starts, Last, Scores, stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, first, rows, T,
    C, G, J, scale,
    GROUP: tl.constexpr, HEADS: tl.constexpr, UNITS: tl.constexpr, SELECT_UNITS: tl.constexpr, K_WIDTH: tl.constexpr,
    K_PADDED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_J: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores [B, rows, G, J] fp32 of the queries from `first` on.

    Q [B, T, G * GROUP, K_WIDTH], K [B, C, G, K_WIDTH] strided; Lse [B, T, G * GROUP] fp32; Starts and Last [B, T]: the
    slots of the first block of a query's document and of the last one that it sees. A block has UNITS strides, a
    selection block SELECT_UNITS. Row r of a tile is head r % HEADS of query r // HEADS, HEADS being GROUP padded.
    """
    i_j = tl.program_id(0) % tl.cdiv(J, BLOCK_J) * BLOCK_J
    program = tl.program_id(0) // tl.cdiv(J, BLOCK_J)
    i_t = program % tl.cdiv(rows, BLOCK_T) * BLOCK_T
    i_bg = program // tl.cdiv(rows, BLOCK_T)
    i_b = (i_bg // G).to(tl.int64)
    i_g = (i_bg % G).to(tl.int64)

    o_r = tl.arange(0, BLOCK_T * HEADS)
    r_t = i_t + o_r // HEADS
    r_h = i_g * GROUP + o_r % HEADS
    m_r = (r_t < rows) & (o_r % HEADS < GROUP)
    r_t = first + r_t
    o_k = tl.arange(0, K_PADDED)
    # [BLOCK_T * HEADS, K_PADDED]
    p_q = Q + i_b * stride_qb + (r_t.to(tl.int64) * stride_qt + r_h * stride_qh)[:, None] + o_k[None, :]
    b_q = load_tile(p_q, m_r, o_k, K_WIDTH, K_PADDED, True)
    b_lse = tl.load(Lse + (i_b * T + r_t) * G * GROUP + r_h, mask=m_r, other=float("-inf"))
    reference = tl.where(b_lse == float("-inf"), float("inf"), b_lse * LOG2E)[:, None]
    r_start = tl.load(Starts + i_b * T + r_t, mask=m_r, other=C)
    r_last = tl.load(Last + i_b * T + r_t, mask=m_r, other=-1)

    o_t = i_t + tl.arange(0, BLOCK_T)
    o_j = i_j + tl.arange(0, BLOCK_J)
    t_start = tl.load(Starts + i_b * T + first + o_t, mask=o_t < rows, other=0)
    # Blocks that share tokens with the selection blocks of this tile, and that some query sees.
    low = tl.maximum(0, tl.min(r_start, 0) + i_j * SELECT_UNITS - UNITS + 1)
    end = tl.minimum(r_last + 1, r_start + (i_j + BLOCK_J) * SELECT_UNITS)
    high = tl.minimum(C, tl.max(tl.where(m_r, end, 0), 0))
    b_scores = tl.zeros([BLOCK_T, BLOCK_J], tl.float32)
    for start in range(low, high, BLOCK_C):
        o_c = start + tl.arange(0, BLOCK_C)
        p_k = K + i_b * stride_kb + i_g * stride_kh + o_c[:, None].to(tl.int64) * stride_kt + o_k[None, :]
        # [BLOCK_C, K_PADDED]
        b_k = load_tile(p_k, o_c < C, o_k, K_WIDTH, K_PADDED, True)
        b_dots = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        m_seen = (o_c[None, :] >= r_start[:, None]) & (o_c[None, :] <= r_last[:, None]) & m_r[:, None]
        b_weight = tl.exp2(tl.where(m_seen, b_dots * (scale * LOG2E) - reference, float("-inf")))
        b_shared = tl.sum(tl.reshape(b_weight, [BLOCK_T, HEADS, BLOCK_C]), 1)
        # [BLOCK_T, BLOCK_C, BLOCK_J]: strides that block i and selection block j share.
        o_i = (o_c[None, :] - t_start[:, None])[:, :, None]
        from_unit = o_j[None, None, :] * SELECT_UNITS
        overlap = tl.minimum(o_i + UNITS, from_unit + SELECT_UNITS) - tl.maximum(o_i, from_unit)
        b_scores += tl.sum(b_shared[:, :, None] * tl.maximum(overlap, 0).to(tl.float32), 1)
    p_scores = Scores + ((i_b * rows + o_t[:, None]) * G + i_g) * J + o_j[None, :]
    tl.store(p_scores, b_scores, mask=(o_t[:, None] < rows) & (o_j[None, :] < J))
