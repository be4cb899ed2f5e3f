"""The choice of blocks without a sort over all of them."""

from __future__ import annotations

import torch
from torch import Tensor


def select_blocks(scores: Tensor, own: Tensor, n: int) -> Tensor:
    """As `reference.select_blocks`: what is above the n-th best score, and of those equal to it the first."""
    blocks = scores.shape[3]
    if blocks <= n:
        return first_blocks(own, n).expand(*scores.shape[:3], n)
    index = torch.arange(blocks, device=scores.device, dtype=torch.int32)
    own = own[..., None, None]
    top = torch.finfo(scores.dtype).max
    ranks = scores.masked_fill(index == own - 1, top / 2)
    ranks[..., 0] = top
    ranks.masked_fill_(index == own, float("inf")).masked_fill_(index > own, -1)
    best = ranks.topk(n, -1)
    least = best.values[..., -1:]
    # Looking at values, for speed, is for where nothing waits for it.
    if scores.device.type == "cpu" and not ((ranks >= least).sum(-1) > n).any():
        found = best.indices.sort(-1).values
        return found.masked_fill_(found > own, -1).to(torch.int32)
    above, equal = ranks > least, ranks == least
    wanted = n - above.sum(-1, keepdim=True, dtype=torch.int32)
    chosen = above | (equal & (equal.cumsum(-1, dtype=torch.int32) <= wanted))
    chosen &= index <= own
    # Each chosen block to its place among them, all others to one place more.
    place = torch.where(chosen, chosen.cumsum(-1) - 1, n)
    found = torch.full((*scores.shape[:3], n + 1), -1, dtype=torch.int32, device=scores.device)
    return found.scatter_(-1, place, index.expand_as(place))[..., :n]


def first_blocks(own: Tensor, n: int) -> Tensor:
    """All blocks up to the own one, where that are no more than n: [1 or B, T, 1, n] int32."""
    index = torch.arange(n, device=own.device, dtype=torch.int32)
    return torch.where(index <= own[..., None, None], index, -1)
