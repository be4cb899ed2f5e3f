"""NSA's branches in plain PyTorch: any device, no kernel of ours.

Selected attention goes one of three ways: a few queries gather their keys, short rows are masked, and in long rows each
block gathers its queries.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import pad

from kernels.sparse import portable_blocks, portable_compressed, portable_masked, reference

# So few queries gather; rows of so many keys are masked, or of more where a block has few (measured on a CPU).
FEW = 8
SHORT = 1024
SHORT_BY_BLOCK = 16384


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
    """As `reference.compressed_attention`."""
    sizes = block, stride, scale, n_selected, select_block, offset
    y, indices = portable_compressed.attend(q, k, v, starts, positions, *sizes)
    return y, indices


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
    """As `reference.selected_attention`."""
    if q.shape[1] <= FEW:
        return _gathered(q, k, v, indices, block, scale, starts, positions, offset)
    width = v.shape[3]
    q, k, v = _level(q, k, v)
    if k.shape[1] <= max(SHORT, SHORT_BY_BLOCK // block) or positions is not None:
        y = portable_masked.attend(q, k, v, indices, starts, positions, block, scale, offset)[0]
    else:
        y = portable_blocks.attend(q, k, v, indices, block, scale, offset)[0]
    return y if y.shape[3] == width else y[..., :width]


def _gathered(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    block: int,
    scale: float,
    starts: Tensor | None,
    positions: Tensor | None,
    offset: int,
) -> Tensor:
    """Each query reads the keys of its blocks and no others."""
    start, position = reference.places(q, starts, positions, offset)
    # [B, T, G, n * block] places in the document, then slots
    index = (indices[..., None] * block + torch.arange(block, device=q.device)).flatten(3)
    seen = (index >= 0) & (index <= position[..., None])
    slots = (index + start[..., None]).clamp(0, max(k.shape[1] - 1, 0)) * seen
    rows = torch.arange(q.shape[0], device=q.device)[:, None, None, None]
    heads = torch.arange(k.shape[2], device=q.device)[:, None]
    wide = torch.promote_types(q.dtype, torch.float32)
    keys, values = (t[rows, slots, heads].to(wide) for t in (k, v))
    grouped = rearrange(q, "b t (g n) k -> b t g n k", g=k.shape[2]).to(wide)
    scores = (grouped @ keys.transpose(3, 4) * scale).masked_fill(~seen[..., None, :], float("-inf"))
    # Pads see nothing.
    nothing = ~seen.any(-1)[..., None, None]
    weights = scores.masked_fill(nothing, 0).softmax(-1).masked_fill(nothing, 0)
    return (weights @ values).flatten(2, 3).to(q.dtype)


def _level(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Zeros up to one width of queries, keys and values: the operator behind SDPA knows no other."""
    more = v.shape[3] - k.shape[3]
    if more > 0:
        q, k = pad(q, (0, more)), pad(k, (0, more))
    v = pad(v, (0, -more)) if more < 0 else v
    q, k, v = (t if t.stride(3) == 1 else t.contiguous() for t in (q, k, v))
    return q, k, v
