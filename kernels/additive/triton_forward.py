"""Additive attention, forward: a tile of queries is kept while tiles of keys pass by, channels a few at a time.

With r = (1 - tanh(q + k)) / 2 a score is the sum of w less twice that of w r; the sum of w is the same for all keys of
a head and is left out. Softmax is rescaled as its maximum grows (as in `kernels.attention.triton_forward`).
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
    tile_pointers,
    visible,
)

# From the sum of w r to a score in units of log 2.
SCORE = tl.constexpr(-2.0 * 1.4426950408889634)


@triton.jit
def remainder(x, APPROXIMATE: tl.constexpr):
    """(1 - tanh(x)) / 2, which is 1 less the sigmoid of 2 x."""
    if APPROXIMATE:
        b_tanh = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
        b_r = 0.5 - 0.5 * b_tanh
    else:
        # Of larger x the remainder is 0 all the same; exp2 stays finite.
        b_r = 1.0 / (1.0 + tl.exp2(tl.minimum(x * (2.0 * LOG2E), 126.0)))
    return b_r


@triton.jit
def weighted_remainders(
    p_q, p_k, p_w, m_t, m_s, o_a, A_WIDTH: tl.constexpr, A_PADDED: tl.constexpr, BLOCK_A: tl.constexpr,
    APPROXIMATE: tl.constexpr,
):  # fmt: skip
    """Sums of w r over all channels, [rows of q, rows of k], BLOCK_A channels at a time."""
    b_sum = tl.zeros([m_t.shape[0], m_s.shape[0]], tl.float32)
    for a in range(0, A_PADDED, BLOCK_A):
        m_a = a + o_a < A_WIDTH
        b_w = tl.load(p_w + a + o_a, mask=m_a, other=0.0)
        # [rows of q, BLOCK_A], [rows of k, BLOCK_A]
        b_q = tl.load(p_q + a, mask=m_t[:, None] & m_a[None, :], other=0.0).to(tl.float32)
        b_k = tl.load(p_k + a, mask=m_s[:, None] & m_a[None, :], other=0.0).to(tl.float32)
        b_sum += tl.sum(remainder(b_q[:, None, :] + b_k[None, :, :], APPROXIMATE) * b_w[None, None, :], 2)
    return b_sum


@triton.jit(do_not_specialize=["T", "S", "H", "window"])
def additive_forward_kernel(
    Q, K, V, W, Y, Reference, QPositions, KPositions, QDocuments, KDocuments, Extents, stride_qb, stride_qt,
    stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh, T, S, H, window,
    CAUSAL: tl.constexpr, APPROXIMATE: tl.constexpr, A_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    A_PADDED: tl.constexpr, V_PADDED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_A: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Y [B, T, H, V_WIDTH], and in Reference [B, T, H] fp32 log2 of the sum of exp2(score); +inf: nothing is visible.

    Q [B, T, H, A_WIDTH], K [B, S, H, A_WIDTH], V [B, S, H, V_WIDTH] strided; W [H, A_WIDTH] fp32 contiguous.
    """
    blocks = tl.cdiv(T, BLOCK_T)
    # Late tiles see the most keys when causal: they start first.
    i_block = blocks - 1 - tl.program_id(0) % blocks
    i_bh = tl.program_id(0) // blocks
    i_b = (i_bh // H).to(tl.int64)
    i_h = (i_bh % H).to(tl.int64)

    o_t = i_block * BLOCK_T + tl.arange(0, BLOCK_T)
    m_t = o_t < T
    o_s = tl.arange(0, BLOCK_S)
    o_a = tl.arange(0, BLOCK_A)
    o_v = tl.arange(0, V_PADDED)
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

    p_q = tile_pointers(Q + i_b * stride_qb + i_h * stride_qh, o_t, stride_qt, o_a)
    p_v = tile_pointers(V + i_b * stride_vb + i_h * stride_vh, o_s, stride_vt, o_v)
    b_y = tl.zeros([BLOCK_T, V_PADDED], tl.float32)
    total = tl.zeros([BLOCK_T], tl.float32)
    top = tl.full([BLOCK_T], float("-inf"), tl.float32)
    for start in range(low, high, BLOCK_S):
        o_j = start + o_s
        m_s = o_j < S
        p_k = tile_pointers(K + i_b * stride_kb + i_h * stride_kh, o_j, stride_kt, o_a)
        b_sum = weighted_remainders(
            p_q, p_k, W + i_h * A_WIDTH, m_t, m_s, o_a, A_WIDTH, A_PADDED, BLOCK_A, APPROXIMATE
        )
        k_position = position(KPositions, i_b * S, o_j, m_s, 0)[None, :]
        k_document = document(KDocuments, i_b * S, o_j, m_s)[None, :]
        m_seen = visible(
            q_position - k_position, m_s[None, :], q_document, k_document, window, CAUSAL,
            QDocuments is not None, KDocuments is not None,
        )  # fmt: skip
        b_score = tl.where(m_seen, b_sum * SCORE, float("-inf"))
        new_top = tl.maximum(top, tl.max(b_score, 1))
        # A row that saw nothing yet has no maximum; 0 keeps inf - inf away.
        zero = tl.where(new_top == float("-inf"), 0.0, new_top)
        b_weight = tl.exp2(b_score - zero[:, None])
        shrink = tl.exp2(top - zero)
        total = total * shrink + tl.sum(b_weight, 1)
        # [BLOCK_S, V_PADDED]
        b_v = load_tile(p_v + tl.cast(start, tl.int64) * stride_vt, m_s, o_v, V_WIDTH, V_PADDED, True)
        b_y = tl.dot(b_weight.to(b_v.dtype), b_v, b_y * shrink[:, None], input_precision=PRECISION)
        top = new_top
    empty = total == 0.0
    divisor = tl.where(empty, 1.0, total)
    b_y = b_y / divisor[:, None]
    row = (i_b * T + o_t) * H + i_h
    p_y = Y + row[:, None] * V_WIDTH + o_v[None, :]
    tl.store(p_y, b_y.to(Y.dtype.element_ty), mask=m_t[:, None] & (o_v[None, :] < V_WIDTH))
    tl.store(Reference + row, tl.where(empty, float("inf"), top + tl.log2(divisor)), mask=m_t)
