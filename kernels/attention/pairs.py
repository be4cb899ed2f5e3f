"""Which keys a block of queries sees, and what is added to its scores."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.attention import reference

# Queries a block, without and with a window (one of 256 is then read 1.25 times): the fastest of 32 to 256 on a CPU.
BLOCK = 128
WINDOW_BLOCK = 64


class Pairs:
    """The visible pairs of one call, a block of rows (queries) and columns (keys) at a time.

    Args:
        q: [B, T, H, K]; k: [B, S, G, K].
        positions, documents: of the queries and of the keys; the rest as in `op.attention`.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        causal: bool,
        window: int | None,
        slopes: Tensor | None,
        positions: tuple[Tensor | None, Tensor | None],
        documents: tuple[Tensor | None, Tensor | None],
    ):
        self.queries, self.keys, self.group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
        self.causal, self.window, self.slopes = causal, window, slopes
        self.positions, self.documents = positions, documents
        # Without positions the ends are aligned.
        self.shift = self.keys - self.queries
        self._placed = any(t is not None for t in (*positions, *documents))
        self._alike: tuple[int, ...] = ()
        self._last: Tensor | None = None

    @property
    def gaps(self) -> bool:
        """May a query see nothing? With the ends aligned it sees at least itself, where there is a key for it."""
        return self._placed or self.shift < 0

    def blocks(self, size: int | None = None) -> Iterator[tuple[slice, slice]]:
        """Rows, `size` of them, and the columns in their reach; under given positions all columns are looked at."""
        if size is None:
            size = BLOCK if self.window is None else WINDOW_BLOCK
        for start in range(0, self.queries, size):
            stop = min(start + size, self.queries)
            first, last = 0, self.keys
            if self.positions[0] is None and self.window is not None:
                first = max(first, start + self.shift - self.window + 1)
                last = min(last, stop + self.shift + self.window - 1)
            if self.positions[0] is None and self.causal:
                last = min(last, stop + self.shift)
            if first < last:
                yield slice(start, stop), slice(first, last)

    def bias(self, rows: slice, columns: slice, like: Tensor) -> Tensor | None:
        """What is added to the scores: [1 or B, 1 or G, group * rows, columns] of like's dtype; None: nothing."""
        if self._placed:
            return self._bias(rows, columns, like)
        # The blocks inside of a window stand alike and share one.
        alike = rows.start - columns.start, rows.stop - rows.start, columns.stop - columns.start
        if alike != self._alike:
            self._alike, self._last = alike, self._bias(rows, columns, like)
        return self._last

    def distance(self, rows: slice, columns: slice, like: Tensor) -> Tensor:
        """How far apart, whichever comes first: [1 or B, 1, 1, rows, columns]."""
        q_positions, k_positions = self._positions(rows, columns, like.device)
        return (q_positions[:, :, None] - k_positions[:, None, :]).abs()[:, None, None].to(like.dtype)

    def _bias(self, rows: slice, columns: slice, like: Tensor) -> Tensor | None:
        q_positions, k_positions = self._positions(rows, columns, like.device)
        ids = (None if t is None else t[:, part] for t, part in zip(self.documents, (rows, columns), strict=True))
        seen = reference.visible(
            rows.stop - rows.start,
            columns.stop - columns.start,
            causal=self.causal,
            window=self.window,
            q_positions=q_positions,
            k_positions=k_positions,
            q_documents=next(ids),
            k_documents=next(ids),
            device=like.device,
        )
        if seen is None and self.slopes is None:
            return None
        bias = like.new_zeros(1, 1, 1, 1, 1)
        if self.slopes is not None:
            slopes = self.slopes.to(like.dtype).view(-1, self.group, 1, 1)
            bias = -slopes * self.distance(rows, columns, like)
        if seen is not None:
            bias = bias.masked_fill(~seen[:, None, None], float("-inf"))
        return bias.expand(-1, -1, self.group, -1, -1).flatten(2, 3)

    def _positions(self, rows: slice, columns: slice, device: torch.device) -> tuple[Tensor, Tensor]:
        q_positions, k_positions = self.positions
        if q_positions is not None and k_positions is not None:
            return q_positions[:, rows].to(torch.int64), k_positions[:, columns].to(torch.int64)
        return (
            torch.arange(rows.start + self.shift, rows.stop + self.shift, device=device)[None],
            torch.arange(columns.start, columns.stop, device=device)[None],
        )
