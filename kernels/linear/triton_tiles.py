"""Tile sizes of linear attention: a table, so that nothing is tuned at run time."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.triton_launch import padded

# Tokens of a chunk.
CHUNK = 64


@dataclass(frozen=True)
class Tiles:
    """Most channels of a tile, warps of a program, stages of the copy pipeline."""

    width: int
    warps: int
    stages: int


def states_tiles(wide: bool) -> Tiles:
    """A program goes through all chunks of a tile of a head's state."""
    return Tiles(16, 4, 2) if wide else Tiles(64, 4, 2)


def product_tiles(wide: bool) -> Tiles:
    """A program has a chunk and some channels of the output."""
    return Tiles(32, 8, 1) if wide else Tiles(64, 8, 1)


def decay_tiles(wide: bool) -> Tiles:
    """A program has a chunk of a head."""
    return Tiles(32, 8, 1)


def block(tiles: Tiles, width: int, most: int = 64) -> int:
    """Channels of a tile over `width` of them."""
    return min(tiles.width, most, padded(width))
