"""Selected attention over long rows, a key block at a time: the queries that chose it are gathered and attend to it.

Own blocks come first, all in one call; each further block is merged by the log-sum-exp. Time and memory are linear in
the pairs. One operator: it looks at the values of `indices`.
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
from kernels.attention import block as tile

# Queries in one call.
ROWS = 2048


@torch.library.custom_op("mixerlab::nsa_blocks", mutates_args=())
def attend(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, block: int, scale: float, offset: int
) -> tuple[Tensor, Tensor]:
    """Output [B, T, H, V] and log-sum-exp [B * G, T, H / G] in at least fp32."""
    cut = Cut.of(q, k, block, offset)
    rows_q, keys, values = cut.queries(q), cut.keys(k), cut.keys(v)
    own = slice(cut.first * block, None)
    tiles = cut.tiles(rows_q), cut.tiles(keys[:, own]), cut.tiles(values[:, own])
    y, lse = _attend(*tiles, _triangle(q, cut), scale)
    y, lse = (t.reshape(*rows_q.shape[:3], -1)[:, cut.real].to(lse.dtype) for t in (y, lse))
    y, lse, rows_q = y.contiguous(), lse[..., 0].contiguous(), rows_q[:, cut.real]
    for head, here, queries in _lists(indices, block, offset):
        mine = rows_q[head].index_select(0, queries).flatten(0, 1)
        inputs = mine[None, None], keys[head, here][None, None], values[head, here][None, None]
        part, total = _attend(*inputs, None, scale)
        _merge(y[head], lse[head], queries, part, total)
    return cut.back(y, q), lse


@attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    batch, time, heads, groups = *q.shape[:3], k.shape[2]
    lse = q.new_empty(batch * groups, time, heads // groups, dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty(*q.shape[:3], v.shape[3]), lse


@torch.library.custom_op("mixerlab::nsa_blocks_backward", mutates_args=())
def backward(
    dy: Tensor,
    y: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    block: int,
    scale: float,
    offset: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    cut = Cut.of(q, k, block, offset)
    rows, keys, values = [cut.queries(t) for t in (q, y, dy)], cut.keys(k), cut.keys(v)
    padded_lse = cut.padded(lse)
    own = slice(cut.first * block, None)
    tile_q, tile_k, tile_v, tile_y, tile_dy = map(cut.tiles, (rows[0], keys[:, own], values[:, own], *rows[1:]))
    parts = _attend_backward(
        tile_q, tile_k, tile_v, _triangle(q, cut), scale, tile_y, padded_lse.reshape(tile_q.shape[:3]), tile_dy
    )
    dq = parts[0].reshape(rows[0].shape)[:, cut.real].to(lse.dtype).contiguous()
    dk, dv = (torch.zeros_like(t, dtype=lse.dtype) for t in (keys, values))
    dk[:, own], dv[:, own] = (part.reshape(*t[:, own].shape) for part, t in zip(parts[1:], (dk, dv), strict=True))
    # One gather for all three.
    saved = torch.cat(rows, -1)[:, cut.real]
    widths = [t.shape[-1] for t in rows]
    for head, here, queries in _lists(indices, block, offset):
        mine, out, dout = saved[head].index_select(0, queries).flatten(0, 1)[None, None].split(widths, -1)
        inputs = mine, keys[head, here][None, None], values[head, here][None, None], None, scale
        total = lse[head].index_select(0, queries).view(1, 1, -1)
        part_q, part_k, part_v = _attend_backward(*inputs, out, total, dout)
        dq[head].index_add_(0, queries, part_q.reshape(len(queries), *dq.shape[2:]).to(dq.dtype))
        dk[head, here] += part_k[0, 0]
        dv[head, here] += part_v[0, 0]
    return cut.back(dq, q), cut.back_keys(dk, k), cut.back_keys(dv, v)


@backward.register_fake
def _(dy: Tensor, y: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, ...]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[:4])
    ctx.options = inputs[4:]
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, dy: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    return *backward(dy, *ctx.saved_tensors, *ctx.options), *[None] * 4


attend.register_autograd(backend.without_autocast(_differentiate), setup_context=_keep)


@dataclass(frozen=True)
class Cut:
    """Rows cut into tiles of a block: how tensors come to that shape and back.

    Attributes:
        block, group: keys of a tile, and query heads of a key head.
        first: the tile of the first query.
        real: the queries between the padding of the first and the last tile.
        whole: length of the padded queries.
    """

    block: int
    group: int
    first: int
    real: slice
    whole: int

    @classmethod
    def of(cls, q: Tensor, k: Tensor, block: int, offset: int) -> Cut:
        """For q [B, T, H, K], k [B, S, G, K]."""
        front = offset % block
        end = front + q.shape[1]
        return cls(block, q.shape[2] // k.shape[2], offset // block, slice(front, end), end + -end % block)

    def queries(self, x: Tensor) -> Tensor:
        """[B, T, H, K] as [B * G, whole, H / G, K]."""
        return self.padded(rearrange(x, "b t (g n) k -> (b g) t n k", n=self.group))

    def padded(self, x: Tensor) -> Tensor:
        """[B * G, T, ...] with zeros up to whole tiles, contiguous."""
        if x.shape[1] == self.whole:
            return x.contiguous()
        full = x.new_zeros(x.shape[0], self.whole, *x.shape[2:])
        full[:, self.real] = x
        return full

    def keys(self, x: Tensor) -> Tensor:
        """[B, S, G, K] as [B * G, tiles * block, K]."""
        missing = self.first * self.block + self.whole - x.shape[1]
        x = rearrange(x, "b s g k -> (b g) s k")
        # With nothing to add, pad would still copy.
        return (pad(x, (0, 0, 0, missing)) if missing else x).contiguous()

    def tiles(self, x: Tensor) -> Tensor:
        """[B * G, tiles * block, ..., K] as [B * G * tiles, 1, rows of a tile, K]."""
        return x.reshape(-1, 1, x[0, : self.block, ..., 0].numel(), x.shape[-1])

    def back(self, x: Tensor, like: Tensor) -> Tensor:
        """[B * G, T, H / G, K] as [B, T, H, K]."""
        return rearrange(x, "(b g) t n k -> b t (g n) k", b=like.shape[0]).to(like.dtype).contiguous()

    def back_keys(self, x: Tensor, like: Tensor) -> Tensor:
        """What `keys` did, undone."""
        x = rearrange(x[:, : like.shape[1]], "(b g) s k -> b s g k", b=like.shape[0])
        return x.to(like.dtype).contiguous()


def _lists(indices: Tensor, block: int, offset: int) -> Iterator[tuple[int, slice, Tensor]]:
    """(row of [B * G], keys of a block, at most ROWS of the queries that chose it), own blocks aside."""
    time = indices.shape[1]
    chosen = rearrange(indices, "b t g n -> (b g) t n")
    own = (torch.arange(offset, offset + time, device=indices.device) // block)[:, None]
    blocks = (offset + time - 1) // block + 1
    head, query, place = ((chosen >= 0) & (chosen != own)).nonzero(as_tuple=True)
    pair, order = (head * blocks + chosen[head, query, place]).sort(stable=True)
    query = query[order]
    first = 0
    for index, count in enumerate(torch.bincount(pair, minlength=chosen.shape[0] * blocks).tolist()):
        here = slice(index % blocks * block, (index % blocks + 1) * block)
        for start in range(first, first + count, ROWS):
            yield index // blocks, here, query[start : min(start + ROWS, first + count)]
        first += count


def _merge(y: Tensor, lse: Tensor, queries: Tensor, part: Tensor, total: Tensor) -> None:
    """Add to some rows of y [T, n, V], lse [T, n] what they get from other keys, in place."""
    part, total = part.reshape(-1, *y.shape[1:]).to(y.dtype), total.reshape(-1, *lse.shape[1:])
    before = lse.index_select(0, queries)
    share = (total - before).sigmoid_()[..., None]
    lse.index_copy_(0, queries, torch.logaddexp(before, total))
    y.index_copy_(0, queries, y.index_select(0, queries).lerp_(part, share))


def _triangle(q: Tensor, cut: Cut) -> Tensor:
    """What is added to the scores of a tile: [block * n, block]."""
    bias = q.new_full((cut.block, cut.block), float("-inf")).triu(1)
    return bias.repeat_interleave(cut.group, 0)


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    if tile.can_fuse(q, v, None, None):
        return tile.fused(q, k, v, bias, scale, False)
    return tile.dense(q, k, v, bias, scale, None)


def _attend_backward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, y: Tensor, lse: Tensor, dy: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    if tile.can_fuse(q, v, None, None):
        return tile.fused_backward(q, k, v, bias, scale, y, lse, dy)
    delta = (dy * y).sum(-1, dtype=lse.dtype)
    return tile.dense_backward(q, k, v, bias, scale, None, lse, dy, delta)[:3]
