"""From tensors to launches, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from kernels.ssm import dispatch
from kernels.ssm.triton_backward import scan_backward_kernel, scan_reach_kernel
from kernels.ssm.triton_forward import scan_forward_kernel, scan_join_kernel
from kernels.triton_launch import empty, launch, processors

# Programs that a multiprocessor is to have; time is cut into segments where rows and channels alone give fewer.
RESIDENT = 12
_JOIN = 256


@dataclass(frozen=True)
class Call:
    """One scan, ready for the kernels: inputs with any strides but the last, options None where off.

    Attributes:
        segments: into how many time is cut; each has `span` tokens, whole pieces, the last one the rest.
    """

    x: Tensor
    dt: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    d: Tensor | None
    fresh: Tensor | None
    segments: int
    span: int

    @classmethod
    def of(
        cls, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, fresh: Tensor | None
    ) -> Call:
        """From the arguments of the operators."""
        x, dt, b, c = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, dt, b, c))
        d, fresh = (None if t is None else t.contiguous() for t in (d, fresh))
        return cls(x, dt, a.contiguous(), b, c, d, fresh, *segments(x, a.shape[1]))

    @property
    def strides(self) -> tuple[int, ...]:
        """Of x, dt, b and c in the order of the kernels."""
        return *self.x.stride()[:2], *self.dt.stride()[:2], *self.b.stride()[:2], *self.c.stride()[:2]

    @property
    def programs(self) -> int:
        """Of the kernels that go through time."""
        return self.x.shape[0] * self.segments * self.blocks

    @property
    def blocks(self) -> int:
        """Of channels."""
        return -(-self.x.shape[2] // block(self.a.shape[1]))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of time, channels and segments in the order of the kernels."""
        return *self.x.shape[1:], self.segments, self.span

    @property
    def constants(self) -> dict[str, int]:
        """What the kernels are compiled for."""
        states = self.a.shape[1]
        padded = int(triton.next_power_of_2(states))
        channels = block(states)
        return dict(N=states, N_PADDED=padded, BLOCK_D=channels, warps=min(8, max(1, channels * padded // 256)))

    def per_segment(self) -> Tensor:
        """Memory for a state of each segment, [B, segments, D, N] fp32."""
        return empty(self.a, self.x.shape[0], self.segments, *self.a.shape)


def block(states: int) -> int:
    """Channels of a program: one sector of memory in bf16, or half of it where the states leave no registers."""
    return 16 if states <= 128 else 8


def segments(x: Tensor, states: int) -> tuple[int, int]:
    """How many segments keep a GPU busy, and their tokens. They cost the decays once more: fewer than 3 do not pay."""
    batch, time, width = x.shape
    pieces = max(1, -(-time // dispatch.PIECE))
    wanted = min(pieces, processors(x) * RESIDENT // max(1, batch * -(-width // block(states))))
    if wanted < 3:
        return 1, pieces * dispatch.PIECE
    span = -(-pieces // wanted) * dispatch.PIECE
    return -(-time // span), span


def forward(call: Call, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """y [B, T, D] of x's dtype, the state after the last token [B, D, N], and before each piece [B, pieces, D, N]."""
    x, state = call.x, state.contiguous()
    starts = state
    if call.segments > 1:
        added, kept = call.per_segment(), call.per_segment()
        _scan(call, None, None, None, None, added, kept)
        starts = _join(call, state, added, kept)
    y, last = empty(x, *x.shape), empty(state, *state.shape)
    before = empty(state, x.shape[0], -(-x.shape[1] // dispatch.PIECE), *call.a.shape)
    _scan(call, starts, y, last, before, None, None)
    return y, last, before


def _scan(call: Call, starts: Tensor | None, *outputs: Tensor | None) -> None:
    y, *rest = outputs
    launch(
        scan_forward_kernel, call.programs, call.x, call.dt, call.a, call.b, call.c, call.d, starts, call.fresh, y,
        *rest, *call.strides, *call.sizes, PIECE=dispatch.PIECE, **call.constants,
    )  # fmt: skip


def _join(call: Call, first: Tensor, added: Tensor, kept: Tensor, reverse: bool = False) -> Tensor:
    """The state before each segment; reverse: the gradient of the state after each."""
    joined, size = call.per_segment(), call.a.numel()
    launch(
        scan_join_kernel, len(first) * -(-size // _JOIN), first, added, kept, joined, call.segments, size,
        REVERSE=reverse, BLOCK=_JOIN,
    )  # fmt: skip
    return joined


def backward(
    call: Call, dy: Tensor, dstate: Tensor, before: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, dt, a, b, c, d (empty where there is none) and the state before the first token."""
    x, a = call.x, call.a
    dy, after = dy.contiguous(), dstate.contiguous()
    if call.segments > 1:
        added, kept = call.per_segment(), call.per_segment()
        launch(
            scan_reach_kernel, call.programs, dy, call.dt, a, call.c, call.fresh, added, kept, *call.strides[2:4],
            *call.strides[6:], *call.sizes, **call.constants,
        )  # fmt: skip
        after = _join(call, after, added, kept, reverse=True)
    dx, ddt, dbefore = (empty(t, *t.shape) for t in (x, call.dt, dstate))
    da, (db, dc) = call.per_segment(), (empty(a, call.blocks, *t.shape) for t in (call.b, call.c))
    dd = empty(a, x.shape[0], call.segments, 0 if call.d is None else x.shape[2])
    constants = call.constants
    scratch = empty(a, call.programs, dispatch.PIECE, constants["BLOCK_D"], constants["N_PADDED"])
    launch(
        scan_backward_kernel, call.programs, dy, x, call.dt, a, call.b, call.c, call.d, call.fresh, before, after,
        scratch, dx, ddt, da, db, dc, dd, dbefore, *call.strides, x.shape[0], *call.sizes, PIECE=dispatch.PIECE,
        **constants,
    )  # fmt: skip
    da, dd = (t.sum((0, 1)) for t in (da, dd))
    db, dc = (t.sum(0).to(x.dtype) for t in (db, dc))
    return dx, ddt, da, db, dc, dd, dbefore


def examples() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Calls whose kernels `kernels.triton_aot` compiles."""
    yield "scan, bfloat16, N 16", partial(_example, torch.bfloat16, 16)
    yield "scan, bfloat16, N 16, documents", partial(_example, torch.bfloat16, 16, True)
    yield "scan, float32, N 16, documents", partial(_example, torch.float32, 16, True)
    yield "scan, bfloat16, N 256, documents", partial(_example, torch.bfloat16, 256, True)


def _example(kind: torch.dtype, states: int, every: bool = False) -> None:
    """Mamba's scan at width 2048; two rows, so that time is cut into segments."""
    x = torch.empty(2, 4096, 2048, dtype=kind, device="meta")
    dt, a, b = (x.new_empty(s, dtype=torch.float32) for s in (x.shape, (2048, states), (2, 4096, states)))
    fresh = x.new_empty(2, 4096, dtype=torch.bool) if every else None
    call = Call.of(x, dt, a, b.to(kind), b.to(kind), dt[0, 0] if every else None, fresh)
    y, last, before = forward(call, x.new_empty(2, *a.shape, dtype=torch.float32))
    backward(call, y, last, before)
