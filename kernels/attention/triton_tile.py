"""What the attention kernels share, so that each option exists once: masks, scores, and which blocks are visited.

Kernels are compiled for what they are given: a pointer or number that is None switches its option off. Scores are in
units of log 2, for exp2. Positions are int32 between -2**30 and 2**30, so that differences fit.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def tile_pointers(p_base, o_rows, stride, o_cols):
    """[rows, cols] of pointers; 64-bit, for tensors of more than 2**31 elements."""
    return p_base + o_rows[:, None].to(tl.int64) * stride + o_cols[None, :]


@triton.jit
def load_tile(pointers, m_rows, o_cols, WIDTH: tl.constexpr, PADDED: tl.constexpr, MASK_ROWS: tl.constexpr):
    """A tile with zeros outside of its rows and of its WIDTH columns."""
    if WIDTH < PADDED:
        m_tile = o_cols[None, :] < WIDTH
        if MASK_ROWS:
            m_tile = m_tile & m_rows[:, None]
        b_tile = tl.load(pointers, mask=m_tile, other=0.0)
    elif MASK_ROWS:
        b_tile = tl.load(pointers, mask=m_rows[:, None], other=0.0)
    else:
        b_tile = tl.load(pointers)
    return b_tile


@triton.jit
def position(Positions, base, o_rows, m_rows, shift):
    """Positions of rows: given ones, behind `base`, or the row itself moved by `shift`."""
    return o_rows + shift if Positions is None else tl.load(Positions + base + o_rows, mask=m_rows, other=0)


@triton.jit
def document(Documents, base, o_rows, m_rows):
    """Documents of rows, behind `base`; where none are given the value is not used."""
    return o_rows if Documents is None else tl.load(Documents + base + o_rows, mask=m_rows, other=0)


@triton.jit
def visible(
    distance, m_inside, q_document, k_document, window,
    CAUSAL: tl.constexpr, Q_DOCUMENTS: tl.constexpr, K_DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Which pairs of a tile are attended to; arguments broadcast against each other in either orientation."""
    m_seen = m_inside & (distance == distance)
    if CAUSAL:
        m_seen = m_seen & (distance >= 0)
    if window is not None:
        m_seen = m_seen & (tl.abs(distance) < window)
    if Q_DOCUMENTS:
        m_seen = m_seen & (q_document > 0)
    if K_DOCUMENTS:
        m_seen = m_seen & (k_document > 0)
    if Q_DOCUMENTS and K_DOCUMENTS:
        m_seen = m_seen & (q_document == k_document)
    return m_seen


@triton.jit
def score(dots, distance, b_slope, inner, outer, ALIBI: tl.constexpr):
    """Scores of a tile of products, and how they grow with the products where a soft cap bends them.

    inner is scale * log2(e); with a cap inner is scale / cap and outer cap * log2(e).
    """
    b_score = dots * inner
    b_growth = b_score
    if outer is not None:
        b_score, b_growth = _tanh(b_score)
        b_score = b_score * outer
    if ALIBI:
        b_score -= b_slope * (tl.abs(distance).to(tl.float32) * LOG2E)
    return b_score, b_growth


@triton.jit
def _tanh(x):
    """tanh and its derivative, each to a few 1e-7 of its own value."""
    power = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    rest = 2.0 * power / (1.0 + power)
    square = x * x
    # Near 0 the exponential form loses its digits; Taylor to x**9 is off by less than 1e-8 of the value at 0.25.
    near = -0.05396825396825397 + square * 0.021869488536155203
    near = x * (1.0 + square * (-0.3333333333333333 + square * (0.13333333333333333 + square * near)))
    far = tl.where(x < 0.0, rest - 1.0, 1.0 - rest)
    return tl.where(square < 0.0625, near, far), rest * (2.0 - rest)


@triton.jit
def key_range(first, last, S, window, CAUSAL: tl.constexpr):
    """Keys [low, high) that some query at a position first..last sees, ends aligned."""
    low = 0
    high = S
    if CAUSAL:
        high = tl.minimum(S, last + 1)
    if window is not None:
        low = tl.maximum(0, first - window + 1)
        if not CAUSAL:
            high = tl.minimum(S, last + window)
    return low, tl.maximum(high, low)


@triton.jit
def common_range(first, last, S, window, CAUSAL: tl.constexpr):
    """Keys [low, high) that every query at a position first..last sees, ends aligned."""
    low = 0
    high = S
    if CAUSAL:
        high = tl.minimum(S, first + 1)
    if window is not None:
        low = tl.maximum(0, last - window + 1)
        if not CAUSAL:
            high = tl.minimum(S, first + window)
    return low, high


@triton.jit
def query_range(first, last, T, shift, window, CAUSAL: tl.constexpr):
    """Queries [low, high) that see some key first..last, ends aligned: query i stands at i + shift."""
    low = 0
    high = T
    if CAUSAL:
        low = tl.maximum(0, first - shift)
    if window is not None:
        high = tl.minimum(T, last - shift + window)
        if not CAUSAL:
            low = tl.maximum(0, first - shift - window + 1)
    return low, tl.maximum(high, low)


@triton.jit(do_not_specialize=["rows", "cols", "row_shift", "col_shift", "window", "blocks"])
def extent_kernel(
    RowPositions, RowDocuments, ColPositions, ColDocuments, Extents, rows, cols, row_shift, col_shift, window,
    blocks,
    CAUSAL: tl.constexpr, ROWS_ARE_QUERIES: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    SCAN: tl.constexpr,
):  # fmt: skip
    """For each block of rows the range [low, high) of the other side outside of which it sees nothing.

    Used where positions or documents are given, once for all heads. A block covers BLOCK rows of a tile, GROUP of which
    are one row here. The extremes of a block's positions and documents stand for it. Extents is [B, blocks, 2] int32.
    """
    i_b = (tl.program_id(0) // blocks).to(tl.int64)
    i_block = tl.program_id(0) % blocks
    BOTH: tl.constexpr = RowDocuments is not None and ColDocuments is not None
    o_rows = (i_block * BLOCK + tl.arange(0, BLOCK)) // GROUP
    m_rows = o_rows < rows
    if RowDocuments is not None:
        b_document = tl.load(RowDocuments + i_b * rows + o_rows, mask=m_rows, other=0)
        m_rows = m_rows & (b_document > 0)
        first_document = tl.min(tl.where(m_rows, b_document, 2147483647), 0)
        last_document = tl.max(tl.where(m_rows, b_document, 0), 0)
    b_position = position(RowPositions, i_b * rows, o_rows, m_rows, row_shift)
    first = tl.min(tl.where(m_rows, b_position, 1073741823), 0)
    last = tl.max(tl.where(m_rows, b_position, -1073741823), 0)
    occupied = tl.max(m_rows.to(tl.int32), 0) > 0
    low = cols
    high = cols * 0
    for start in range(0, cols, SCAN):
        o_cols = start + tl.arange(0, SCAN)
        m_seen = (o_cols < cols) & occupied
        c_position = position(ColPositions, i_b * cols, o_cols, o_cols < cols, col_shift)
        if ROWS_ARE_QUERIES:
            nearest = first - c_position
            farthest = last - c_position
        else:
            nearest = c_position - last
            farthest = c_position - first
        if CAUSAL:
            m_seen = m_seen & (farthest >= 0)
        if window is not None:
            m_seen = m_seen & (nearest < window) & (farthest > -window)
        if ColDocuments is not None:
            c_document = tl.load(ColDocuments + i_b * cols + o_cols, mask=o_cols < cols, other=0)
            m_seen = m_seen & (c_document > 0)
            if BOTH:
                m_seen = m_seen & (c_document >= first_document) & (c_document <= last_document)
        low = tl.minimum(low, tl.min(tl.where(m_seen, o_cols, cols), 0))
        high = tl.maximum(high, tl.max(tl.where(m_seen, o_cols + 1, 0), 0))
    p_extent = Extents + (i_b * blocks + i_block) * 2
    tl.store(p_extent, low)
    tl.store(p_extent + 1, tl.maximum(high, low))
