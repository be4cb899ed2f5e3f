"""What the kernels of the selective scan share: where a program stands, and what it reads of one token."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def place(D, segments, N: tl.constexpr, N_PADDED: tl.constexpr, BLOCK_D: tl.constexpr):
    """Row, segment, channels and states of this program, the offsets [BLOCK_D, N_PADDED] in [D, N], and masks."""
    program = tl.program_id(0)
    columns = tl.cdiv(D, BLOCK_D)
    o_d = program % columns * BLOCK_D + tl.arange(0, BLOCK_D)
    o_n = tl.arange(0, N_PADDED)
    i_s = program // columns % segments
    i_b = (program // columns // segments).to(tl.int64)
    o_h = o_d[:, None] * N + o_n[None, :]
    m_d = o_d < D
    m_n = o_n < N
    return i_b, i_s, o_d, o_n, o_h, m_d, m_n, m_d[:, None] & m_n[None, :]


@triton.jit
def vector(pointer, offsets, mask):
    """A token's channels or states, in fp32."""
    return tl.load(pointer + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def decay_of(b_dt, b_a, Fresh, place_of_token):
    """exp(dt a) [BLOCK_D, N_PADDED], from a in units of log2; 0 where the past is forgotten."""
    b_decay = tl.exp2(b_dt[:, None] * b_a)
    if Fresh is not None:
        b_decay = tl.where(tl.load(Fresh + place_of_token) != 0, 0.0, b_decay)
    return b_decay
