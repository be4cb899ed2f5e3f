"""NSA's two sparse branches by their definition: dense masked score matrices, right in float64.

Source: Yuan et al. 2025, arXiv:2502.11089, section 3.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor


def places(q: Tensor, starts: Tensor | None, positions: Tensor | None, offset: int) -> tuple[Tensor, Tensor]:
    """Of each query: the slot of its document's first key and its position in the document, [1 or B, T, 1] int64."""
    if positions is None:
        positions = torch.arange(offset, offset + q.shape[1], device=q.device)[None]
    starts = torch.zeros_like(positions) if starts is None else starts
    return starts.to(torch.int64)[..., None], positions.to(torch.int64)[..., None]


def compressed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block: int,
    stride: int,
    scale: float,
    n_selected: int,
    select_block: int,
    starts: Tensor | None,
    positions: Tensor | None,
    offset: int,
) -> tuple[Tensor, Tensor]:
    """Output [B, T, H, V] and chosen blocks [B, T, G, n_selected]; arguments as in `op.compressed_attention`."""
    start, position = places(q, starts, positions, offset)
    # Which block of its own document a query takes each slot for.
    index = torch.arange(k.shape[1], device=q.device) - start
    seen = (index >= 0) & (index * stride + block - 1 <= position)
    weights = _weights(q, k, seen[:, None], scale)
    y = _sums(weights, v)
    if not n_selected:
        return y, torch.zeros(*q.shape[:2], k.shape[2], 0, dtype=torch.int32, device=q.device)
    shared = rearrange(weights.detach(), "b (g n) t c -> b g n t c", g=k.shape[2]).sum(2)
    blocks = (offset + q.shape[1] - 1) // select_block + 1
    overlaps = overlap(index.clamp(min=0), blocks, block, stride, select_block).to(shared.dtype)
    scores = (shared[..., None] * overlaps[:, None]).sum(-2)
    return y, select_blocks(rearrange(scores, "b g t j -> b t g j"), position[..., 0] // select_block, n_selected)


def overlap(index: Tensor, blocks: int, block: int, stride: int, select_block: int) -> Tensor:
    """Tokens that compression blocks of these indices share with each selection block, in strides: [.., blocks]."""
    first = index[..., None] * stride
    select = torch.arange(blocks, device=index.device) * select_block
    ends = torch.minimum(first + block, select + select_block)
    return (ends - torch.maximum(first, select)).clamp(min=0) / stride


def select_blocks(scores: Tensor, own: Tensor, n: int) -> Tensor:
    """[B, T, G, n] int32; arguments as in `op.select_blocks`."""
    index = torch.arange(scores.shape[3], device=scores.device)
    own = own[..., None, None]
    ranks = scores.to(torch.float64)
    # The forced blocks, the most important one last.
    for rank, forced in enumerate((index == own - 1, index == 0, index == own)):
        ranks = ranks.masked_fill(forced, (rank + 1) * 1e300)
    ranks = ranks.masked_fill(index > own, float("-inf"))
    best = ranks.sort(dim=-1, descending=True, stable=True).indices[..., :n]
    beyond = scores.shape[3]
    chosen = torch.where(best <= own, best, beyond).sort(-1).values
    chosen = torch.nn.functional.pad(chosen, (0, n - chosen.shape[-1]), value=beyond)
    return chosen.masked_fill(chosen == beyond, -1).to(torch.int32)


def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    *,
    block: int,
    scale: float,
    starts: Tensor | None,
    positions: Tensor | None,
    offset: int,
) -> Tensor:
    """[B, T, H, V]; arguments as in `op.selected_attention`."""
    start, position = places(q, starts, positions, offset)
    index = torch.arange(k.shape[1], device=q.device) - start
    past = (index >= 0) & (index <= position)
    chosen = (indices[..., None, :] == (index // block)[:, :, None, :, None]).any(-1)
    seen = rearrange(past[:, :, None] & chosen, "b t g s -> b g t s")
    return _sums(_weights(q, k, seen.repeat_interleave(q.shape[2] // k.shape[2], 1), scale), v)


def _weights(q: Tensor, k: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Softmax over the keys seen, [B, H, T, S]; 0 where nothing is."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    scores = torch.einsum("bthk,bshk->bhts", q, k) * scale
    nothing = ~seen.any(-1, keepdim=True)
    scores = scores.masked_fill(~seen & ~nothing, float("-inf"))
    return scores.softmax(-1).masked_fill(nothing, 0)


def _sums(weights: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhts,bshv->bthv", weights, v.repeat_interleave(weights.shape[1] // v.shape[2], 2))
