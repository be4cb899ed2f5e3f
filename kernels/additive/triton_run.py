"""From tensors to launches, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels.additive.triton_backward import additive_dkv_kernel, additive_dq_kernel
from kernels.additive.triton_forward import additive_forward_kernel
from kernels.attention.triton_backward import delta_kernel
from kernels.attention.triton_places import FARTHEST, Side, extents
from kernels.triton_launch import dot_precision, empty, launch, padded

# Queries, keys and channels of a tile: 64 numbers a thread, of 4 warps.
_FORWARD = dict(BLOCK_T=16, BLOCK_S=32, BLOCK_A=16)
# Queries of a tile of the backward pass.
_QUERIES = 16
# Rows that the kernel without tiles of keys takes at once.
_ROWS = 8


@dataclass(frozen=True)
class Call:
    """One additive attention, ready for the kernels: inputs with any strides but the last, the weight fp32."""

    q: Tensor
    k: Tensor
    v: Tensor
    weight: Tensor
    queries: Side
    keys: Side
    causal: bool
    window: int | None
    approximate: bool
    # Of the weight that was given.
    kind: torch.dtype

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        weight: Tensor,
        q_positions: Tensor | None,
        k_positions: Tensor | None,
        q_documents: Tensor | None,
        k_documents: Tensor | None,
        causal: bool,
        window: int | None,
        approximate: bool,
    ) -> Call:
        """From the arguments of the public op."""
        queries = Side.of(q_positions, q_documents, q.shape[1], k.shape[1] - q.shape[1])
        keys = Side.of(k_positions, k_documents, k.shape[1])
        window = None if window is None else min(window, FARTHEST)
        q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
        wide = weight.to(torch.float32).contiguous()
        return cls(q, k, v, wide, queries, keys, causal, window, approximate, weight.dtype)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The inputs in the order of the kernels."""
        return self.q, self.k, self.v, self.weight

    @property
    def places(self) -> tuple[Tensor | None, ...]:
        """Positions and documents in the order of the kernels."""
        return self.queries.positions, self.keys.positions, self.queries.documents, self.keys.documents

    @property
    def numbers(self) -> tuple[int | None, ...]:
        """Strides, sizes and window in the order of the kernels."""
        strides = (*self.q.stride()[:3], *self.k.stride()[:3], *self.v.stride()[:3])
        return *strides, self.queries.length, self.keys.length, self.q.shape[2], self.window

    @property
    def constants(self) -> dict[str, Any]:
        """What the kernels are compiled for, sizes of tiles aside."""
        width, value = self.q.shape[3], self.v.shape[3]
        return dict(
            CAUSAL=self.causal, APPROXIMATE=self.approximate, A_WIDTH=width, V_WIDTH=value, A_PADDED=padded(width),
            V_PADDED=padded(value), PRECISION=dot_precision(self.q),
        )  # fmt: skip

    def extents(self, block: int, keys: bool) -> Tensor | None:
        """What each tile of queries may see (keys), or what may see each tile of keys."""
        sides = (self.queries, self.keys) if keys else (self.keys, self.queries)
        return extents(*sides, self.q, block, causal=self.causal, window=self.window, keys=keys)


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """y [B, T, H, V] of q's dtype, and [B, T, H] fp32 what the weights are relative to."""
    batch, time, heads = call.q.shape[:3]
    y = empty(call.q, batch, time, heads, call.v.shape[3])
    reference = empty(call.q, batch, time, heads, dtype=torch.float32)
    block = _FORWARD["BLOCK_T"]
    launch(
        additive_forward_kernel, -(-time // block) * batch * heads, *call.tensors, y, reference, *call.places,
        call.extents(block, keys=True), *call.numbers, **call.constants, **_FORWARD,
    )  # fmt: skip
    return y, reference


def backward(call: Call, y: Tensor, reference: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and the weight."""
    dy, delta = dy.contiguous(), empty(reference, *reference.shape)
    value, (batch, time, heads, width) = y.shape[3], call.q.shape
    launch(
        delta_kernel, -(-delta.numel() // _ROWS), y, dy, None, delta, delta.numel(),
        V_WIDTH=value, V_PADDED=padded(value), BLOCK=_ROWS,
    )  # fmt: skip
    own, keys = _backward_tile(call)
    chunks = padded(width) // own
    tiles: dict[str, Any] = dict(BLOCK_T=_QUERIES, BLOCK_S=keys, BLOCK_A=16, OWN=own, warps=8)
    dq, dk, dv = (empty(t, *t.shape) for t in (call.q, call.k, call.v))
    blocks, saved = -(-time // _QUERIES), (dy, reference, delta)
    parts = empty(reference, batch, blocks, heads, width)
    launch(
        additive_dq_kernel, chunks * blocks * batch * heads, *call.tensors, *saved, dq, parts, *call.places,
        call.extents(_QUERIES, keys=True), *call.numbers, **call.constants, **tiles,
    )  # fmt: skip
    launch(
        additive_dkv_kernel, chunks * -(-call.keys.length // keys) * batch * heads, *call.tensors, *saved, dk, dv,
        *call.places, call.extents(keys, keys=False), *call.numbers, **call.constants, **tiles,
    )  # fmt: skip
    return dq, dk, dv, parts.sum((0, 1)).to(call.kind)


def _backward_tile(call: Call) -> tuple[int, int]:
    """Channels that a program of the backward pass takes, and keys of its tiles: what does not spill."""
    narrow, width = call.q.element_size() == 2, padded(call.q.shape[3])
    own = min(64 if narrow else 32, width)
    return own, 32 if narrow and own < 64 else 16


def examples() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Calls whose kernels `kernels.triton_aot` compiles."""
    for kind, width in ((torch.bfloat16, 32), (torch.bfloat16, 64), (torch.bfloat16, 128), (torch.float32, 64)):
        yield _label(kind, width), partial(_example, kind, width)
    yield f"{_label(torch.bfloat16, 64)}, approximate tanh", partial(_example, torch.bfloat16, 64, approximate=True)
    every: dict[str, Any] = dict(window=1024, placed=True)
    yield f"{_label(torch.bfloat16, 64)}, all options", partial(_example, torch.bfloat16, 64, **every)


def _label(kind: torch.dtype, width: int) -> str:
    return f"additive {str(kind).removeprefix('torch.')}, A {width}"


def _example(
    kind: torch.dtype, width: int, *, window: int | None = None, placed: bool = False, approximate: bool = False
) -> None:
    """A layer of 8 heads."""
    x = torch.empty(2, 4096, 8, width, dtype=kind, device="meta")
    ids = x.new_empty(2, 4096, dtype=torch.int32) if placed else None
    call = Call.of(x, x, x, x[0, 0], ids, ids, ids, ids, True, window, approximate)
    y, reference = forward(call)
    backward(call, y, reference, y)
