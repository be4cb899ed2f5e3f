"""What the kernels of the causal convolution share: places, documents and inputs of a tile."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def place(T, D, before, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    """Row, time offsets from -before on and channel offsets of this program, and its place among those of a channel."""
    program = tl.program_id(0)
    columns = tl.cdiv(D, BLOCK_D)
    blocks = tl.cdiv(before + T, BLOCK_T)
    o_d = program % columns * BLOCK_D + tl.arange(0, BLOCK_D)
    i_part = (program // columns).to(tl.int64)
    o_t = i_part % blocks * BLOCK_T + tl.arange(0, BLOCK_T) - before
    return i_part // blocks, o_t, o_d, i_part


@triton.jit
def document(Documents, TailDocuments, i_b, o_t, T, P):
    """Document ids of times from -P on, those of the tail below 0."""
    ids = tl.load(Documents + i_b * T + o_t, mask=(o_t >= 0) & (o_t < T), other=0)
    if TailDocuments is not None:
        ids += tl.load(TailDocuments + i_b * P + P + o_t, mask=(o_t < 0) & (o_t >= -P), other=0)
    return ids


@triton.jit
def inputs(X, Tail, i_b, o_t, o_d, stride_b, stride_t, T, D, P):
    """[times, channels] fp32: x, the tail below time 0, and 0 outside of both."""
    m_d = (o_d < D)[None, :]
    p_x = X + i_b * stride_b + (o_t * stride_t)[:, None] + o_d[None, :]
    b_x = tl.load(p_x, mask=((o_t >= 0) & (o_t < T))[:, None] & m_d, other=0.0).to(tl.float32)
    if Tail is not None:
        p_tail = Tail + ((i_b * P + P + o_t) * D)[:, None] + o_d[None, :]
        b_x += tl.load(p_tail, mask=((o_t < 0) & (o_t >= -P))[:, None] & m_d, other=0.0).to(tl.float32)
    return b_x
