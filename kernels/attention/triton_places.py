"""Who stands where: positions and documents made ready for the kernels, and the blocks that they rule out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention.triton_tile import extent_kernel
from kernels.triton_launch import empty, launch, padded

# Beyond it a position counts as this one, so that differences fit into 32 bits.
FARTHEST = 2**30 - 1
_SCAN = 4096


@dataclass(frozen=True)
class Side:
    """Positions and documents of queries or of keys, each contiguous int32 [B, length] or None.

    Without positions row i stands at i + shift.
    """

    positions: Tensor | None
    documents: Tensor | None
    length: int
    shift: int = 0

    @classmethod
    def of(cls, positions: Tensor | None, documents: Tensor | None, length: int, shift: int = 0) -> Side:
        """From any integers with any strides."""
        if positions is not None:
            positions = positions.to(torch.int64).clamp(-FARTHEST, FARTHEST).to(torch.int32).contiguous()
        return cls(positions, None if documents is None else documents.to(torch.int32).contiguous(), length, shift)

    @property
    def given(self) -> bool:
        """Does the data decide anything?"""
        return self.positions is not None or self.documents is not None


def extents(
    rows: Side, cols: Side, like: Tensor, block: int, *, group: int = 1, causal: bool, window: int | None, keys: bool
) -> Tensor | None:
    """For each tile of `block` rows the columns that it may see, [B, tiles, 2]; None where that is plain arithmetic.

    keys: the columns are keys. group: rows of a tile that are one row here.
    """
    if not (rows.given or cols.given):
        return None
    batch, blocks = like.shape[0], -(-rows.length * group // block)
    found = empty(like, batch, blocks, 2, dtype=torch.int32)
    launch(
        extent_kernel, batch * blocks, rows.positions, rows.documents, cols.positions, cols.documents, found,
        rows.length, cols.length, rows.shift, cols.shift, window, blocks,
        CAUSAL=causal, ROWS_ARE_QUERIES=keys, GROUP=group, BLOCK=block, SCAN=min(_SCAN, padded(cols.length)), warps=8,
    )  # fmt: skip
    return found
