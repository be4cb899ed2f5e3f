"""Tile sizes, by the larger padded head dim: a table, so that nothing is tuned at run time.

What each choice costs in registers and shared memory is in docs/kernels_gpu.md (`python -m kernels.triton_aot`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from kernels.triton_launch import padded, processors

# Rows of queries (heads of a group folded in) up to which keys are split between programs.
DECODE_ROWS = 64
# A split has at least so many tiles of keys.
SPLIT_TILES = 4
_MAX_SPLITS = 128


@dataclass(frozen=True)
class Tiles:
    """Queries and keys of a tile, warps of a program, stages of the copy pipeline."""

    queries: int
    keys: int
    warps: int
    stages: int


# Head dim up to -> tiles, for 16-bit types and for fp32, which takes twice the memory.
_FORWARD = {64: Tiles(128, 64, 4, 3), 128: Tiles(128, 64, 8, 3), 256: Tiles(64, 32, 8, 2)}
_FORWARD_WIDE = {64: Tiles(64, 16, 4, 2), 128: Tiles(32, 16, 8, 2), 256: Tiles(16, 16, 8, 1)}
_DQ = {64: Tiles(64, 64, 4, 3), 128: Tiles(64, 64, 8, 2), 256: Tiles(32, 32, 8, 2)}
_DQ_WIDE = {64: Tiles(32, 32, 8, 2), 128: Tiles(16, 32, 8, 2), 256: Tiles(16, 16, 8, 1)}
_DKV = {64: Tiles(32, 64, 4, 2), 128: Tiles(32, 64, 8, 2), 256: Tiles(32, 32, 8, 1)}
_DKV_WIDE = {64: Tiles(32, 32, 8, 2), 128: Tiles(32, 16, 8, 2), 256: Tiles(16, 16, 8, 1)}


def forward_tiles(width: int, wide_type: bool, busy: bool) -> Tiles:
    """Of the forward kernel; `busy`: options take registers too."""
    return _for(_FORWARD_WIDE if wide_type else _FORWARD, width, busy)


def decode_tiles(rows: int, width: int, wide_type: bool) -> Tiles:
    """For `rows` rows of queries, few enough for one tile."""
    keys = (32 if wide_type else 64) if width <= 128 else 16 if wide_type else 32
    return Tiles(padded(rows), keys, 4, 3)


def dq_tiles(width: int, wide_type: bool, busy: bool) -> Tiles:
    """Of the kernel that keeps queries."""
    return _for(_DQ_WIDE if wide_type else _DQ, width, busy)


def dkv_tiles(width: int, wide_type: bool) -> Tiles:
    """Of the kernel that keeps keys."""
    return _for(_DKV_WIDE if wide_type else _DKV, width)


def _for(table: dict[int, Tiles], width: int, busy: bool = False) -> Tiles:
    tiles = next(tiles for limit, tiles in table.items() if width <= limit)
    return replace(tiles, warps=8) if busy else tiles


def splits(like: Tensor, programs: int, keys: int, block: int) -> int:
    """Parts of the keys: so many that every multiprocessor has two programs, of some tiles each."""
    most = -(-keys // (block * SPLIT_TILES))
    return max(1, min(-(-2 * processors(like) // max(1, programs)), most, _MAX_SPLITS))
