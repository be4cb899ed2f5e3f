"""What the kernels of linear attention share: tiles, and what is left of one token at another."""

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
