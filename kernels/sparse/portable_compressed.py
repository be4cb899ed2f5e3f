"""Compressed attention and the choice of blocks, 256 queries at a time: the T x C probabilities never exist at once.

Heads of a group are rows of one product; columns that no query of a chunk sees are not computed. The backward pass
computes the probabilities again. One operator, so that torch.compile keeps it whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import pad

from kernels import backend
from kernels.sparse import reference
from kernels.sparse.portable_select import first_blocks, select_blocks

CHUNK = 256


@dataclass(frozen=True)
class Chunk:
    """What some queries see.

    Attributes:
        rows, columns: the queries, and the compressed blocks from the first on that any of them may see.
        common: so many of them all the queries see.
        hidden: [1 or B, rows, columns - common] which of the others they do not see.
        start, position: [1 or B, rows, 1], see `op`.
        reach: no position is beyond it.
    """

    rows: slice
    columns: int
    common: int
    hidden: Tensor
    start: Tensor | None
    position: Tensor
    reach: int


@torch.library.custom_op("mixerlab::nsa_compressed", mutates_args=())
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor | None,
    positions: Tensor | None,
    block: int,
    stride: int,
    scale: float,
    n_selected: int,
    select_block: int,
    offset: int,
) -> tuple[Tensor, Tensor]:
    """As `reference.compressed_attention`."""
    groups, heads_k, heads_v = k.shape[2], _heads(k), _heads(v)
    y = q.new_empty(*q.shape[:3], v.shape[3])
    indices = torch.empty(*q.shape[:2], groups, n_selected, dtype=torch.int32, device=q.device)
    for chunk in _chunks(q, k, starts, positions, block, stride, offset):
        own = chunk.position[..., 0] // select_block
        weights = _weights(q, heads_k, chunk, groups, scale)
        if chunk.columns:
            part = weights.flatten(1, 2) @ heads_v[:, : chunk.columns]
            y[:, chunk.rows] = _back(part, y[:, chunk.rows], groups).to(y.dtype)
        else:
            y[:, chunk.rows] = 0
        if n_selected and chunk.reach // select_block < n_selected:
            indices[:, chunk.rows] = first_blocks(own, n_selected)
        elif n_selected:
            shared = _of_document(weights.sum(2).unflatten(0, (-1, groups)), chunk.start)
            scores = block_scores(shared, chunk.reach // select_block + 1, block // stride, select_block // stride)
            indices[:, chunk.rows] = select_blocks(scores.transpose(1, 2), own, n_selected)
    return y, indices


@attend.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, starts: Any, positions: Any, block: int, stride: int, scale: float, n: int, *_: int
) -> tuple[Tensor, Tensor]:
    indices = torch.empty(*q.shape[:2], k.shape[2], n, dtype=torch.int32, device=q.device)
    return q.new_empty(*q.shape[:3], v.shape[3]), indices


@torch.library.custom_op("mixerlab::nsa_compressed_backward", mutates_args=())
def backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor | None,
    positions: Tensor | None,
    block: int,
    stride: int,
    scale: float,
    offset: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    groups, heads_k, heads_v = k.shape[2], _heads(k), _heads(v)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(heads_k), torch.zeros_like(heads_v)
    for chunk in _chunks(q, k, starts, positions, block, stride, offset):
        if not chunk.columns:
            continue
        seen = slice(chunk.columns)
        weights = _weights(q, heads_k, chunk, groups, scale).flatten(1, 2)
        rows_q, rows_dy = (_rows(t[:, chunk.rows], groups, weights.dtype) for t in (q, dy))
        dweights = rows_dy @ heads_v[:, seen].transpose(1, 2)
        dscores = torch.ops.aten._softmax_backward_data(dweights, weights, -1, weights.dtype)
        dq[:, chunk.rows] = _back(dscores @ heads_k[:, seen] * scale, dq[:, chunk.rows], groups).to(q.dtype)
        dk[:, seen].baddbmm_(dscores.transpose(1, 2), rows_q, alpha=scale)
        dv[:, seen].baddbmm_(weights.transpose(1, 2), rows_dy)
    dk, dv = (rearrange(t, "(b g) s k -> b s g k", g=groups).to(q.dtype).contiguous() for t in (dk, dv))
    return dq, dk, dv


@backward.register_fake
def _(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:5])
    block, stride, scale, _, _, offset = inputs[5:]
    ctx.options = block, stride, scale, offset
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, dy: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    return *backward(dy, *ctx.saved_tensors, *ctx.options), *[None] * 8


attend.register_autograd(backend.without_autocast(_differentiate), setup_context=_keep)


def block_scores(shared: Tensor, blocks: int, wide: int, far: int) -> Tensor:
    """Sums of probabilities by selection block: [B, G, T, C] -> [B, G, T, blocks].

    Args:
        wide, far: strides in a compression block and in a selection block. With both starting at the same stride, they
            share min(wide, far) of them.
    """
    # Selection block j meets the compression blocks far * j - (wide - 1) and the next wide + far - 2.
    padded = pad(shared, (wide - 1, far * blocks - shared.shape[3]))
    scores = shared.new_zeros(*shared.shape[:3], blocks)
    for i in range(wide + far - 1):
        both = min(i + 1, far) - max(i - wide + 1, 0)
        scores.add_(padded[..., i : i + far * (blocks - 1) + 1 : far], alpha=both)
    return scores


def _chunks(
    q: Tensor, k: Tensor, starts: Tensor | None, positions: Tensor | None, block: int, stride: int, offset: int
) -> Iterator[Chunk]:
    for first in range(0, q.shape[1], CHUNK):
        rows = slice(first, min(first + CHUNK, q.shape[1]))
        reach = offset + rows.stop - 1
        common, columns = 0, k.shape[1]
        if starts is None:
            columns = min(max((reach - block + 1) // stride + 1, 0), columns)
        if positions is None:
            common = min(max((offset + first - block + 1) // stride + 1, 0), columns)
        starts_here, here = (None if t is None else t[:, rows] for t in (starts, positions))
        start, position = reference.places(q[:, rows], starts_here, here, offset + first)
        index = torch.arange(common, columns, device=q.device) - start
        hidden = (index * stride + block - 1 > position) | (index < 0)
        yield Chunk(rows, columns, common, hidden, None if starts is None else start, position, reach)


def _weights(q: Tensor, k: Tensor, chunk: Chunk, groups: int, scale: float) -> Tensor:
    """Softmax over the blocks seen, [B * G, rows, H / G, columns]; 0 where nothing is."""
    rows = q[:, chunk.rows]
    scores = _rows(rows, groups, k.dtype) @ k[:, : chunk.columns].transpose(1, 2)
    scores = scores.mul_(scale).view(q.shape[0], groups, rows.shape[1], q.shape[2] // groups, chunk.columns)
    hidden = chunk.hidden[:, None, :, None]
    scores[..., chunk.common :].masked_fill_(hidden, float("-inf"))
    weights = scores.softmax(-1)
    if not chunk.common:
        weights.masked_fill_(hidden.all(-1, keepdim=True), 0)
    return weights.flatten(0, 1)


def _of_document(shared: Tensor, start: Tensor | None) -> Tensor:
    """Columns [B, G, T, C] counted from the first block of each query's own document; those behind the last are 0."""
    if start is None:
        return shared
    blocks = shared.shape[3]
    index = (start + torch.arange(blocks, device=shared.device)).clamp(max=blocks)
    return pad(shared, (0, 1)).gather(3, index[:, None].expand(*shared.shape))


def _heads(x: Tensor) -> Tensor:
    """[B, S, G, K] as [B * G, S, K] in at least fp32."""
    return rearrange(x, "b s g k -> (b g) s k").to(torch.promote_types(x.dtype, torch.float32))


def _rows(x: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """[B, T, H, K] as [B * G, T * H / G, K]."""
    return rearrange(x, "b t (g n) k -> (b g) (t n) k", g=groups).to(dtype)


def _back(x: Tensor, like: Tensor, groups: int) -> Tensor:
    """What `_rows` did, undone."""
    return rearrange(x, "(b g) (t n) k -> b t (g n) k", b=like.shape[0], t=like.shape[1])
