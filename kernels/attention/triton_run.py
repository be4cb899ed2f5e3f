"""From tensors to launches, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from kernels.attention import triton_tiles as tiling
from kernels.attention.triton_backward import delta_kernel, dkv_kernel, dq_kernel
from kernels.attention.triton_forward import combine_kernel, forward_kernel
from kernels.attention.triton_places import FARTHEST, Side, extents
from kernels.triton_launch import dot_precision, empty, launch, padded

# Rows that the kernels without tiles of keys take at once.
_ROWS = 8


@dataclass(frozen=True)
class Call:
    """One attention, ready for the kernels: inputs with any strides but the last, options None where off."""

    q: Tensor
    k: Tensor
    v: Tensor
    slopes: Tensor | None
    sinks: Tensor | None
    queries: Side
    keys: Side
    causal: bool
    window: int | None
    scale: float
    softcap: float | None

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        alibi_slopes: Tensor | None,
        sinks: Tensor | None,
        q_positions: Tensor | None,
        k_positions: Tensor | None,
        q_documents: Tensor | None,
        k_documents: Tensor | None,
        causal: bool,
        window: int | None,
        scale: float,
        softcap: float | None,
    ) -> Call:
        """From the arguments of the public op."""
        queries = Side.of(q_positions, q_documents, q.shape[1], k.shape[1] - q.shape[1])
        keys = Side.of(k_positions, k_documents, k.shape[1])
        if window is not None:
            # A window over everything hides nothing; positions may lie anywhere.
            whole = q_positions is None and window >= queries.length + keys.length
            window = None if whole else min(window, FARTHEST)
        slopes, sinks = (t if t is None else t.to(torch.float32).contiguous() for t in (alibi_slopes, sinks))
        q, k, v = (_readable(t) for t in (q, k, v))
        return cls(q, k, v, slopes, sinks, queries, keys, causal, window, scale, softcap)

    @property
    def share(self) -> int:
        """Query heads of a key head."""
        return self.q.shape[2] // self.k.shape[2]

    @property
    def width(self) -> int:
        """The larger head dim as the kernels pad it."""
        return padded(max(self.q.shape[3], self.v.shape[3]))

    @property
    def wide_type(self) -> bool:
        """Is it fp32?"""
        return self.q.dtype == torch.float32

    @property
    def busy(self) -> bool:
        """Do options take registers too?"""
        return self.queries.given or self.keys.given or self.slopes is not None or self.softcap is not None

    @property
    def places(self) -> tuple[Tensor | None, ...]:
        """Positions and documents in the order of the kernels."""
        return self.queries.positions, self.keys.positions, self.queries.documents, self.keys.documents

    @property
    def strides(self) -> tuple[int, ...]:
        """Of q, k and v in the order of the kernels."""
        return *self.q.stride()[:3], *self.k.stride()[:3], *self.v.stride()[:3]

    @property
    def shaping(self) -> tuple[float, float | None]:
        """`inner` and `outer` of `triton_tile.score`."""
        if self.softcap is None:
            return self.scale * math.log2(math.e), None
        return self.scale / self.softcap, self.softcap * math.log2(math.e)

    def constants(self, tiles: tiling.Tiles) -> dict[str, Any]:
        """What the kernels are compiled for."""
        key, value = self.q.shape[3], self.v.shape[3]
        return dict(
            CAUSAL=self.causal, K_WIDTH=key, V_WIDTH=value, K_PADDED=padded(key), V_PADDED=padded(value),
            PRECISION=dot_precision(self.q), BLOCK_T=tiles.queries, BLOCK_S=tiles.keys,
            warps=tiles.warps, stages=tiles.stages,
        )  # fmt: skip

    def key_extents(self, block: int, group: int = 1) -> Tensor | None:
        """What each tile of queries may see."""
        mask: dict[str, Any] = dict(causal=self.causal, window=self.window)
        return extents(self.queries, self.keys, self.q, block, group=group, keys=True, **mask)

    def query_extents(self, block: int) -> Tensor | None:
        """What may see each tile of keys."""
        return extents(self.keys, self.queries, self.q, block, causal=self.causal, window=self.window, keys=False)


def _readable(t: Tensor) -> Tensor:
    """Kernels want the channels of a head beside each other; the other strides are free."""
    return t if t.stride(-1) == 1 else t.contiguous()


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """y [B, T, H, V] of q's dtype and its log-sum-exp [B, T, H] fp32."""
    batch, time, heads = call.q.shape[:3]
    group, tiles, splits = _division(call)
    y = empty(call.q, batch, time, heads, call.v.shape[3])
    lse = empty(call.q, batch, time, heads, dtype=torch.float32)
    parts = (y, lse)
    if splits > 1:
        parts = (empty(lse, splits, *y.shape), empty(lse, splits, *lse.shape))
    blocks = -(-time * group // tiles.queries)
    launch(
        forward_kernel, splits * blocks * batch * heads // group, call.q, call.k, call.v, *parts, call.slopes,
        call.sinks, *call.places, call.key_extents(tiles.queries, group), *call.strides, batch, time,
        call.keys.length, heads, heads // group, call.share // group, splits, call.window, *call.shaping,
        GROUP=group, SPLIT=splits > 1, **call.constants(tiles),
    )  # fmt: skip
    if splits > 1:
        launch(
            combine_kernel, -(-lse.numel() // _ROWS), *parts, y, lse, call.sinks, lse.numel(), heads, splits,
            V_WIDTH=y.shape[3], V_PADDED=padded(y.shape[3]), BLOCK=_ROWS,
        )  # fmt: skip
    return y, lse


def _division(call: Call) -> tuple[int, tiling.Tiles, int]:
    """How work is divided: heads that share a tile (few queries only, else 1), its size, parts of the keys."""
    rows = call.queries.length * call.share
    if rows <= tiling.DECODE_ROWS:
        tiles = tiling.decode_tiles(rows, call.width, call.wide_type)
        programs = call.q.shape[0] * call.k.shape[2]
        return call.share, tiles, tiling.splits(call.q, programs, call.keys.length, tiles.keys)
    return 1, tiling.forward_tiles(call.width, call.wide_type, call.busy), 1


def backward(
    call: Call, y: Tensor, lse: Tensor, dy: Tensor, dlse: Tensor | None, slopes_gradient: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of q, k, v, slopes and sinks, the last two fp32 and None where not wanted."""
    dy, dlse = dy.contiguous(), dlse if dlse is None else dlse.to(torch.float32).contiguous()
    delta = empty(lse, *lse.shape)
    launch(
        delta_kernel, -(-lse.numel() // _ROWS), y, dy, dlse, delta, lse.numel(),
        V_WIDTH=y.shape[3], V_PADDED=padded(y.shape[3]), BLOCK=_ROWS,
    )  # fmt: skip
    slopes = empty(lse, *lse.shape) if slopes_gradient else None
    dq = _dq(call, dy, lse, delta, slopes)
    dk, dv = _dkv(call, dy, lse, delta)
    # A sink takes part with weight exp(sink - lse) and gives the value 0.
    sinks = None if call.sinks is None else -(torch.exp(call.sinks - lse) * delta).sum((0, 1))
    return dq, dk, dv, None if slopes is None else slopes.sum((0, 1)), sinks


def _dq(call: Call, dy: Tensor, lse: Tensor, delta: Tensor, slopes: Tensor | None) -> Tensor:
    dq = empty(call.q, *call.q.shape)
    batch, time, heads = call.q.shape[:3]
    tiles = tiling.dq_tiles(call.width, call.wide_type, call.busy)
    launch(
        dq_kernel, -(-time // tiles.queries) * batch * heads, call.q, call.k, call.v, dy, lse, delta, dq, slopes,
        call.slopes, *call.places, call.key_extents(tiles.queries), *call.strides, time, call.keys.length, heads,
        call.share, call.window, *call.shaping, call.scale, **call.constants(tiles),
    )  # fmt: skip
    return dq


def _dkv(call: Call, dy: Tensor, lse: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    dk, dv = (empty(t, *t.shape) for t in (call.k, call.v))
    batch, keys, groups = call.k.shape[:3]
    tiles = tiling.dkv_tiles(call.width, call.wide_type)
    launch(
        dkv_kernel, -(-keys // tiles.keys) * batch * groups, call.q, call.k, call.v, dy, lse, delta, dk, dv,
        call.slopes, *call.places, call.query_extents(tiles.keys), *call.strides, call.queries.length, keys,
        call.q.shape[2], call.share, call.window, *call.shaping, call.scale, **call.constants(tiles),
    )  # fmt: skip
    return dk, dv


def examples() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Calls whose kernels `kernels.triton_aot` compiles."""
    for kind, width in product((torch.bfloat16, torch.float16), (64, 128)):
        yield _label(kind, width), partial(_example, kind, width, 4096)
        yield f"{_label(kind, width)}, decode", partial(_example, kind, width, 1)
    every: dict[str, Any] = dict.fromkeys(("heads", "positions", "q_documents", "k_documents"), True)
    every |= dict(window=1024, softcap=20.0)
    for width in (64, 128):
        yield f"{_label(torch.bfloat16, width)}, window", partial(_example, torch.bfloat16, width, 4096, window=1024)
        yield f"{_label(torch.bfloat16, width)}, all options", partial(_example, torch.bfloat16, width, 4096, **every)
    for kind, width in ((torch.float32, 64), (torch.float32, 128), (torch.bfloat16, 256)):
        yield _label(kind, width), partial(_example, kind, width, 4096)
    both_ways = partial(_example, torch.bfloat16, 64, 4096, causal=False, window=1024)
    yield f"{_label(torch.bfloat16, 64)}, both ways, positions", partial(both_ways, positions=True)
    yield f"{_label(torch.bfloat16, 64)}, both ways, padded keys", partial(both_ways, k_documents=True)


def _label(kind: torch.dtype, width: int) -> str:
    return f"{str(kind).removeprefix('torch.')}, D {width}"


def _example(
    kind: torch.dtype,
    width: int,
    time: int,
    *,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    heads: bool = False,
    positions: bool = False,
    q_documents: bool = False,
    k_documents: bool = False,
) -> None:
    """A layer of 16 query and 4 key heads; one query over a cache has no gradient."""
    like = torch.empty(0, dtype=kind, device="meta")
    q, k = like.new_empty(2, time, 16, width), like.new_empty(2, 4096, 4, width)
    slopes = like.new_empty(16) if heads else None
    of_q, of_k = (like.new_empty(2, t.shape[1], dtype=torch.int32) for t in (q, k))
    call = Call.of(
        q, k, k, slopes, slopes, of_q if positions else None, of_k if positions else None,
        of_q if q_documents else None, of_k if k_documents else None, causal, window, 0.1, softcap,
    )  # fmt: skip
    y, lse = forward(call)
    if time > 1:
        backward(call, y, lse, y, lse if heads else None, heads)
