"""Flash attention, forward, and flash decode: the same kernel with the keys split between programs.

A tile of queries is kept while tiles of keys pass by; softmax is rescaled as its maximum grows (Dao et al. 2022,
arXiv:2205.14135; Dao 2023, arXiv:2307.08691). For few queries the GROUP heads that share a key head become rows of one
tile, row r being query r // GROUP, and the keys are split (flash decode); `combine_kernel` joins the parts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.attention.triton_tile import (
    LN2,
    LOG2E,
    common_range,
    document,
    key_range,
    load_tile,
    position,
    score,
    tile_pointers,
    visible,
)


@triton.jit(do_not_specialize=["B", "T", "S", "H", "heads", "share", "splits", "window"])
def forward_kernel(
    Q, K, V, Y, Lse, Slopes, Sinks, QPositions, KPositions, QDocuments, KDocuments, Extents, stride_qb, stride_qt,
    stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh, B, T, S, H, heads, share, splits,
    window, inner, outer,
    CAUSAL: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr, K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    K_PADDED: tl.constexpr, V_PADDED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of queries against its keys.

    Q [B, T, H, K_WIDTH], K and V [B, S, G, .] strided; Y [B, T, H, V_WIDTH] and Lse [B, T, H] contiguous, with SPLIT
    fp32 and [splits, B, ...]. `heads` is H // GROUP, of which `share` have one key head. Sinks join in the combination.
    """
    program = tl.program_id(0)
    i_split = program % splits
    program = program // splits
    blocks = tl.cdiv(T * GROUP, BLOCK_T)
    # Late tiles see the most keys when causal: they start first.
    i_block = blocks - 1 - program % blocks
    i_b = (program // blocks // heads).to(tl.int64)
    i_h = program // blocks % heads
    i_g = (i_h // share).to(tl.int64)

    o_r = i_block * BLOCK_T + tl.arange(0, BLOCK_T)
    o_t = o_r // GROUP
    o_h = i_h * GROUP + o_r % GROUP
    m_t = o_t < T
    o_k = tl.arange(0, K_PADDED)
    o_v = tl.arange(0, V_PADDED)
    p_q = Q + i_b * stride_qb + (o_t.to(tl.int64) * stride_qt + o_h.to(tl.int64) * stride_qh)[:, None] + o_k[None, :]
    # [BLOCK_T, K_PADDED]
    b_q = load_tile(p_q, m_t, o_k, K_WIDTH, K_PADDED, True)
    b_slope = 0.0
    if Slopes is not None:
        b_slope = tl.load(Slopes + o_h, mask=m_t, other=0.0)[:, None]
    q_position = position(QPositions, i_b * T, o_t, m_t, S - T)[:, None]
    q_document = document(QDocuments, i_b * T, o_t, m_t)[:, None]

    first = i_block * BLOCK_T // GROUP + S - T
    last = (tl.minimum((i_block + 1) * BLOCK_T, T * GROUP) - 1) // GROUP + S - T
    if Extents is None:
        low, high = key_range(first, last, S, window, CAUSAL)
    else:
        p_extent = Extents + (i_b * blocks + i_block) * 2
        low = tl.load(p_extent)
        high = tl.load(p_extent + 1)
    low = low // BLOCK_S * BLOCK_S
    if SPLIT:
        part = tl.cdiv(tl.cdiv(high - low, BLOCK_S), splits) * BLOCK_S
        low = low + i_split * part
        high = tl.maximum(low, tl.minimum(high, low + part))

    b_y = tl.zeros([BLOCK_T, V_PADDED], tl.float32)
    total = tl.zeros([BLOCK_T], tl.float32)
    top = tl.full([BLOCK_T], float("-inf"), tl.float32)
    p_k = K + i_b * stride_kb + i_g * stride_kh
    p_v = V + i_b * stride_vb + i_g * stride_vh
    # Keys [full_low, full_high) are seen by all rows and need no mask: none where the data decides.
    full_low = low
    full_high = low
    if Extents is None:
        common_low, common_high = common_range(first, last, S, window, CAUSAL)
        full_low = tl.maximum(low, tl.cdiv(common_low, BLOCK_S) * BLOCK_S)
        full_high = tl.minimum(high, common_high) // BLOCK_S * BLOCK_S
        some = full_low < full_high
        full_low = tl.where(some, full_low, low)
        full_high = tl.where(some, full_high, low)
    for part_of_range in tl.static_range(3):
        # Before the full blocks there is something to mask under a window alone; a range the data decides has one part.
        if part_of_range == 0:
            start = low
            stop = full_low
        elif part_of_range == 1:
            start = full_low
            stop = full_high
        else:
            start = full_high
            stop = high
        if (part_of_range == 2) or (Extents is None and (part_of_range == 1 or window is not None)):
            b_y, total, top = _accumulate(
                b_y, total, top, b_q, p_k, p_v, stride_kt, stride_vt, start, stop, S, q_position, q_document,
                b_slope, KPositions, KDocuments, i_b * S, window, inner, outer, CAUSAL, part_of_range != 1,
                Slopes is not None, QDocuments is not None, K_WIDTH, V_WIDTH, K_PADDED, V_PADDED, BLOCK_S, PRECISION,
            )  # fmt: skip

    b_sink = tl.full([BLOCK_T], float("-inf"), tl.float32)
    if Sinks is not None and not SPLIT:
        b_sink = tl.load(Sinks + o_h, mask=m_t, other=0.0).to(tl.float32) * LOG2E
    b_y, b_lse = _finish(b_y, total, top, b_sink)
    row = i_b
    if SPLIT:
        row = i_split.to(tl.int64) * B + i_b
    row = (row * T + o_t) * H + o_h
    p_y = Y + row[:, None] * V_WIDTH + o_v[None, :]
    tl.store(p_y, b_y.to(Y.dtype.element_ty), mask=m_t[:, None] & (o_v[None, :] < V_WIDTH))
    tl.store(Lse + row, b_lse, mask=m_t)


@triton.jit
def _accumulate(
    b_y, total, top, b_q, p_k, p_v, stride_kt, stride_vt, low, high, S, q_position, q_document, b_slope, KPositions,
    KDocuments, base, window, inner, outer,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, ALIBI: tl.constexpr, Q_DOCUMENTS: tl.constexpr,
    K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, K_PADDED: tl.constexpr, V_PADDED: tl.constexpr,
    BLOCK_S: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Let the keys [low, high) pass by: sums, their total weight and the maximum are rescaled as it grows."""
    o_s = tl.arange(0, BLOCK_S)
    o_k = tl.arange(0, K_PADDED)
    o_v = tl.arange(0, V_PADDED)
    p_k = tile_pointers(p_k, o_s, stride_kt, o_k)
    p_v = tile_pointers(p_v, o_s, stride_vt, o_v)
    for start in range(low, high, BLOCK_S):
        o_j = start + o_s
        m_s = o_j < S
        far = tl.cast(start, tl.int64)
        # [BLOCK_S, K_PADDED], [BLOCK_S, V_PADDED]
        b_k = load_tile(p_k + far * stride_kt, m_s, o_k, K_WIDTH, K_PADDED, MASKED)
        b_v = load_tile(p_v + far * stride_vt, m_s, o_v, V_WIDTH, V_PADDED, MASKED)
        distance = q_position - position(KPositions, base, o_j, m_s, 0)[None, :]
        b_dots = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        b_score, _ = score(b_dots, distance, b_slope, inner, outer, ALIBI)
        if MASKED:
            k_document = document(KDocuments, base, o_j, m_s)[None, :]
            m_seen = visible(
                distance, m_s[None, :], q_document, k_document, window, CAUSAL, Q_DOCUMENTS, KDocuments is not None
            )
            b_score = tl.where(m_seen, b_score, float("-inf"))
        new_top = tl.maximum(top, tl.max(b_score, 1))
        # A row that saw nothing yet has no maximum; 0 keeps inf - inf away.
        zero = new_top
        if MASKED:
            zero = tl.where(new_top == float("-inf"), 0.0, new_top)
        b_weight = tl.exp2(b_score - zero[:, None])
        shrink = tl.exp2(top - zero)
        total = total * shrink + tl.sum(b_weight, 1)
        b_y = tl.dot(b_weight.to(b_v.dtype), b_v, b_y * shrink[:, None], input_precision=PRECISION)
        top = new_top
    return b_y, total, top


@triton.jit
def _finish(b_y, total, top, b_sink):
    """Rows divided by their total weight, and its logarithm; a row that saw nothing is 0 and -inf."""
    new_top = tl.maximum(top, b_sink)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.exp2(b_sink - base)
    divisor = tl.where(total == 0.0, 1.0, total)
    b_lse = tl.where(total == 0.0, float("-inf"), (base + tl.log2(divisor)) * LN2)
    return b_y * (shrink / divisor)[:, None], b_lse


@triton.jit(do_not_specialize=["rows", "H", "splits"])
def combine_kernel(
    YParts, LseParts, Y, Lse, Sinks, rows, H, splits,
    V_WIDTH: tl.constexpr, V_PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Join the parts of split keys, [splits, rows, V_WIDTH] and [splits, rows] fp32, weighted by their log-sum-exp."""
    o_r = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    o_v = tl.arange(0, V_PADDED)
    m_r = o_r < rows
    m_tile = m_r[:, None] & (o_v[None, :] < V_WIDTH)
    b_y = tl.zeros([BLOCK, V_PADDED], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    for i_split in range(0, splits):
        row = tl.cast(i_split, tl.int64) * rows + o_r
        b_part = tl.load(LseParts + row, mask=m_r, other=float("-inf")) * LOG2E
        new_top = tl.maximum(top, b_part)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(b_part - base)
        shrink = tl.exp2(top - base)
        total = total * shrink + weight
        b_part = tl.load(YParts + row[:, None] * V_WIDTH + o_v[None, :], mask=m_tile, other=0.0)
        b_y = b_y * shrink[:, None] + b_part * weight[:, None]
        top = new_top
    b_sink = tl.full([BLOCK], float("-inf"), tl.float32)
    if Sinks is not None:
        b_sink = tl.load(Sinks + o_r % H, mask=m_r, other=0.0).to(tl.float32) * LOG2E
    b_y, b_lse = _finish(b_y, total, top, b_sink)
    tl.store(Y + o_r[:, None] * V_WIDTH + o_v[None, :], b_y.to(Y.dtype.element_ty), mask=m_tile)
    tl.store(Lse + o_r, b_lse, mask=m_r)
