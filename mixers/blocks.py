"""Blocks of tokens as one token each, for NSA's compressed branch, and the caches that decoding keeps of them."""

from __future__ import annotations

from typing import Literal

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import gelu

from mixers import cache
from mixers.base import State, take
from mixers.parts import mark

Compression = Literal["mlp", "linear", "mean"]


class Compress(nn.Module):
    """The tokens of a block, [B, C, block, G, K], as one: [B, C, G, K]; all heads alike.

    Args:
        how: "mlp" adds a learned embedding to each place of the block and reads all of them at once, with 2 K hidden
            channels; "linear" has a matrix a place, "mean" no parameters. None has a bias behind it: the same for all
            keys, it would change no score.
    """

    def __init__(self, how: Compression, block: int, width: int):
        super().__init__()
        self.how = how
        if how == "linear":
            self.weight = nn.Linear(block * width, width, bias=False)
        if how == "mlp":
            self.places = nn.Parameter(torch.randn(block, width) * 0.02)
            mark(self, "places", own_init=True, no_decay=True)
            self.hidden = nn.Linear(block * width, 2 * width, bias=False)
            self.weight = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        if self.how == "mean":
            return x.mean(2)
        if self.how == "mlp":
            x = x + self.places[:, None].to(x.dtype)
        rows = rearrange(x, "b c l g k -> b g c (l k)")
        y = self.weight(rows) if self.how == "linear" else self.weight(gelu(self.hidden(rows)))
        return y.transpose(1, 2)


class Ends:
    """Where blocks end in a piece of a sequence.

    Args:
        block, stride: tokens of a block, and from one to the next.
        time: tokens of the piece.
        past: the state before it; None: none.
        places: [B, T] of each token in its document, -1 at pads; None where nothing was packed.
    Attributes:
        before: bound of the blocks that ended before the piece, exact where nothing was packed.
        new: the same of those that end in it.
        done: [B] blocks of each row that ended so far, after the piece; None where nothing was packed.
        starts: [B, T] the slot of the first block of each token's document; None likewise.
    """

    def __init__(self, block: int, stride: int, time: int, past: State | None, places: Tensor | None):
        self.block, self.stride = block, stride
        self.length = 0 if past is None else past.length
        self.before = self._count(self.length)
        self.done = self.starts = self._at = None
        if places is None:
            self.new = self._count(self.length + time) - self.before
            return
        # In one document blocks end a stride apart, over a border further apart.
        self.new = -(-time // stride)
        known = None if past is None else past.get("compressed.blocks")
        if known is None:
            known = torch.full(places.shape[:1], self.before, dtype=torch.int32, device=places.device)
        since = places - block + 1
        ends = (since >= 0) & (since % stride == 0)
        total = known[:, None] + ends.cumsum(1)
        self.starts = total - (since // stride + 1).clamp(min=0)
        self.before_by_row, self.done = known, known + ends.sum(1, dtype=torch.int32)
        # The token at which each new block ends; what ends nowhere goes to one slot more.
        slot = torch.where(ends, total - known[:, None] - 1, self.new)
        at = slot.new_zeros(places.shape[0], self.new + 1)
        self._at = at.scatter_(1, slot, torch.arange(time, device=places.device).expand_as(slot))[:, : self.new]

    def blocks(self, before: Tensor | None, x: Tensor) -> Tensor:
        """The tokens of the blocks that end in the piece x [B, T, G, K]: [B, new, block, G, K].

        Args:
            before: the block - 1 tokens before the piece; None: there are none.
        """
        if self._at is not None:
            tokens = self._joined(before, x)
            index = self._at[..., None] + torch.arange(self.block, device=x.device)
            return take(tokens, index.flatten(1)).unflatten(1, (self.new, self.block))
        if before is None:
            first, tokens = 0, x
        else:
            # The first new block begins at token before * stride; `tokens` at length - (block - 1).
            first, tokens = self.before * self.stride - self.length + self.block - 1, self._joined(before, x)
        if not self.new:
            return tokens.new_zeros(x.shape[0], 0, self.block, *x.shape[2:])
        parts = self.block // self.stride
        # In memory a block of a head is one row, as `Compress` reads it.
        tokens = tokens[:, first : first + (self.new + parts - 1) * self.stride].transpose(1, 2)
        strides = tokens.unflatten(2, (-1, self.stride))
        blocks = torch.cat([strides[:, :, i : i + self.new] for i in range(parts)], 3)
        return rearrange(blocks, "b g c l k -> b c l g k")

    def tail(self, before: Tensor | None, x: Tensor, count: Tensor | None) -> Tensor:
        """The last block - 1 tokens [B, block - 1, G, K] after the piece, of which `count` [B] are real."""
        tokens = self._joined(before, x)
        if count is None:
            return tokens[:, x.shape[1] :].clone()
        return take(tokens, count[:, None] + torch.arange(self.block - 1, device=x.device))

    def keep(self, past: State, k: Tensor, v: Tensor) -> tuple[cache.Attended, dict[str, Tensor]]:
        """All compressed keys and values so far, [B, C, G, K], and their cache, for the new ones [B, new, G, K]."""
        kept = past.part("compressed").own
        if self.done is None:
            seen, kept = cache.growing(State(kept, self.before), k, v, None)
            return seen, kept
        ones = torch.ones(k.shape[:2], dtype=torch.int32, device=k.device)
        row = State(kept | {"filled": self.before_by_row}, self.before)
        seen, kept = cache.growing(row, k, v, ones)
        return seen, {"k": kept["k"], "v": kept["v"], "blocks": self.done}

    def _count(self, length: int) -> int:
        return max((length - self.block) // self.stride + 1, 0)

    def _joined(self, before: Tensor | None, x: Tensor) -> Tensor:
        if before is None:
            before = x.new_zeros(x.shape[0], self.block - 1, *x.shape[2:])
        return torch.cat([before.to(x.dtype), x], 1)
