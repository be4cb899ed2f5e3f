"""From tensors to launches: scores of selection blocks, and selected attention forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels.attention.triton_backward import delta_kernel
from kernels.sparse.dispatch import placed
from kernels.sparse.triton_backward import selected_dkv_kernel, selected_dq_kernel
from kernels.sparse.triton_choice import block_scores_kernel
from kernels.sparse.triton_forward import selected_forward_kernel
from kernels.triton_launch import dot_precision, empty, launch, padded

# Rows (queries times heads of a group) of a tile that has several queries, and keys of a tile: at most so many.
_TILE_ROWS = 64
_TILE_KEYS = 64
# Rows that the kernel without tiles of keys takes at once.
_ROWS = 8


def _heads(group: int) -> int:
    """The heads of a group as rows: a power of two."""
    return 1 << (group - 1).bit_length()


def block_scores(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    start: Tensor,
    last: Tensor,
    part: slice,
    units: int,
    select_units: int,
    blocks: int,
    scale: float,
) -> Tensor:
    """[B, rows, G, blocks] fp32 for the queries of `part`; the rest as in `dispatch.choice`."""
    q, k = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k))
    (batch, time, heads, width), groups = q.shape, k.shape[2]
    rows, group = part.stop - part.start, heads // groups
    queries = min(16, _TILE_ROWS // _heads(group))
    scores = empty(lse, batch, rows, groups, blocks)
    tiles = -(-rows // queries) * -(-blocks // 16)
    launch(
        block_scores_kernel, tiles * batch * groups, q, k, lse, start, last, scores, *q.stride()[:3], *k.stride()[:3],
        part.start, rows, time, k.shape[1], groups, blocks, scale,
        GROUP=group, HEADS=_heads(group), UNITS=units, SELECT_UNITS=select_units, K_WIDTH=width,
        K_PADDED=padded(width), BLOCK_T=queries, BLOCK_C=32, BLOCK_J=16, PRECISION=dot_precision(q), warps=4, stages=2,
    )  # fmt: skip
    return scores


@dataclass(frozen=True)
class Call:
    """One selected attention, ready for the kernels: inputs with any strides but the last.

    Attributes:
        starts, positions: contiguous [B, T] int32.
        step: slots from one place where a block may begin to the next.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    indices: Tensor
    starts: Tensor
    positions: Tensor
    block: int
    scale: float
    step: int

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        indices: Tensor,
        starts: Tensor | None,
        positions: Tensor | None,
        block: int,
        scale: float,
        offset: int,
    ) -> Call:
        """From the arguments of the public op."""
        q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
        where = placed(q, starts, positions, offset)
        return cls(q, k, v, indices.contiguous(), *where, block, scale, block if starts is None else 1)

    @property
    def group(self) -> int:
        """Query heads of a key head."""
        return self.q.shape[2] // self.k.shape[2]

    @property
    def strides(self) -> tuple[int, ...]:
        """Of q, k and v in the order of the kernels."""
        return *self.q.stride()[:3], *self.k.stride()[:3], *self.v.stride()[:3]

    @property
    def places(self) -> int:
        """Where blocks may begin."""
        return -(-self.k.shape[1] // self.step)

    @property
    def tile(self) -> int:
        """Keys of a tile: a block, or a part of one."""
        most = _TILE_KEYS if self.q.element_size() == 2 else _TILE_KEYS // 2
        return min(most, padded(self.block))

    @property
    def constants(self) -> dict[str, Any]:
        """What the kernels are compiled for."""
        key, value = self.q.shape[3], self.v.shape[3]
        return dict(
            GROUP=self.group, BLOCK=self.block, PARTS=-(-self.block // self.tile), TILE=self.tile, K_WIDTH=key,
            V_WIDTH=value, K_PADDED=padded(key), V_PADDED=padded(value), PRECISION=dot_precision(self.q),
        )  # fmt: skip

    def lists(self) -> tuple[Tensor, Tensor]:
        """The choice by block: queries [B, G, T * n], and [B, G, places + 1] where the list of each place begins."""
        first = self.starts[:, :, None, None] + self.indices * self.block
        where = torch.where(self.indices < 0, self.places, torch.div(first, self.step, rounding_mode="floor"))
        ordered, order = where.transpose(1, 2).flatten(2).sort(dim=-1, stable=True)
        places = torch.arange(self.places + 1, dtype=ordered.dtype, device=ordered.device)
        bounds = torch.searchsorted(ordered, places.expand(*ordered.shape[:2], -1).contiguous(), out_int32=True)
        return torch.div(order, self.indices.shape[3], rounding_mode="floor").to(torch.int32), bounds


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """y [B, T, H, V] of q's dtype, and [B, T, H] fp32 what the weights are relative to."""
    batch, time, heads = call.q.shape[:3]
    y = empty(call.q, batch, time, heads, call.v.shape[3])
    reference = empty(call.q, batch, time, heads, dtype=torch.float32)
    launch(
        selected_forward_kernel, batch * time * call.k.shape[2], call.q, call.k, call.v, call.indices, call.starts,
        call.positions, y, reference, *call.strides, time, *call.k.shape[1:3], call.indices.shape[3], call.scale,
        ROWS=padded(call.group), **call.constants, warps=4, stages=2,
    )  # fmt: skip
    return y, reference


def backward(call: Call, y: Tensor, reference: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    dy, delta = dy.contiguous(), empty(reference, *reference.shape)
    launch(
        delta_kernel, -(-delta.numel() // _ROWS), y, dy, None, delta, delta.numel(),
        V_WIDTH=y.shape[3], V_PADDED=padded(y.shape[3]), BLOCK=_ROWS,
    )  # fmt: skip
    (batch, time), (keys, groups) = call.q.shape[:2], call.k.shape[1:3]
    dq, dk, dv = (empty(t, *t.shape) for t in (call.q, call.k, call.v))
    launch(
        selected_dq_kernel, batch * time * groups, call.q, call.k, call.v, call.indices, call.starts, call.positions,
        dy, reference, delta, dq, *call.strides, time, keys, groups, call.indices.shape[3], call.scale,
        ROWS=padded(call.group), **call.constants, warps=4, stages=2,
    )  # fmt: skip
    parts, heads = call.constants["PARTS"], _heads(call.group)
    lists, bounds = call.lists()
    launch(
        selected_dkv_kernel, parts * call.places * batch * groups, call.q, call.k, call.v, lists, bounds, call.starts,
        call.positions, dy, reference, delta, dk.zero_(), dv.zero_(), *call.strides, time, keys, groups,
        lists.shape[2], call.places, call.step, call.scale,
        HEADS=heads, BLOCK_T=max(32 // heads, 1), **call.constants, warps=8, stages=1,
    )  # fmt: skip
    return dq, dk, dv


def examples() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Calls whose kernels `kernels.triton_aot` compiles."""
    narrow = torch.bfloat16
    for kind, width, group in ((narrow, 64, 4), (narrow, 128, 4), (narrow, 128, 16), (torch.float32, 64, 4)):
        name = str(kind).removeprefix("torch.")
        yield f"nsa {name}, D {width}, group {group}", partial(_example, kind, width, group)


def _example(kind: torch.dtype, width: int, group: int) -> None:
    """A layer of 2 key heads with the paper's blocks."""
    q = torch.empty(2, 4096, 2 * group, width, dtype=kind, device="meta")
    k = q.new_empty(2, 4096, 2, width)
    lse, ids = q.new_empty(q.shape[:3], dtype=torch.float32), q.new_empty(2, 4096, 2, 16, dtype=torch.int32)
    where = ids[..., 0, 0].contiguous()
    block_scores(q, k[:, :255], lse, where, where, slice(0, 4096), 2, 4, 64, 0.1)
    call = Call.of(q, k, k, ids, where, where, 64, 0.1, 0)
    y, reference = forward(call)
    backward(call, y, reference, y)
