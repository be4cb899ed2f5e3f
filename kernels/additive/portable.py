"""Additive attention in plain PyTorch, a tile of pairs at a time: never more than a block of T S A numbers.

A tile holds r = (1 - tanh(q_i + k_j)) / 2 for some heads, queries and keys, in the processor's cache. While
exp(2 q) and exp(2 k) are in range, r = 1 / (1 + exp(2 q_i) exp(2 k_j)): exponentials of T + S rows instead of one of
T S. The backward pass makes tiles again: dscore/dx = 4 w r (1 - r).

A PyTorch operator, so that torch.compile keeps it as one node instead of a loop over blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kernels import backend
from kernels.attention.pairs import Pairs

# Queries of a block, keys of a tile and numbers in it: the fastest on a CPU of 8 to 32, 128 to 512 and 2**16 to 2**20.
QUERIES = 16
KEYS = 256
TILE = 2**18


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    *,
    causal: bool,
    window: int | None,
    q_positions: Tensor | None,
    k_positions: Tensor | None,
    q_documents: Tensor | None,
    k_documents: Tensor | None,
) -> Tensor:
    """As `reference.attention`, in at least fp32."""
    return _forward(q, k, v, weight, q_positions, k_positions, q_documents, k_documents, causal, window)


class _Tiles:
    """All r of one call, [heads, queries, keys, A] at a time; the heads of all rows of the batch are one dimension."""

    def __init__(self, q: Tensor, k: Tensor):
        wide = torch.promote_types(q.dtype, torch.float32)
        self.q, self.k = (_headed(t, wide) for t in (q, k))
        reach = max((float(t.abs().max()) if t.numel() else 0.0) for t in (q, k))
        # Beyond it the product of two exponentials may be inf * 0.
        self.factored = reach < 0.49 * math.log(torch.finfo(wide).max)
        if self.factored:
            self.q, self.k = ((2 * t).exp() for t in (self.q, self.k))
        self.one = self.q.new_ones(1)

    def __call__(self, heads: slice, rows: slice, columns: slice) -> Tensor:
        q, k = self.q[heads, rows, None], self.k[heads, None, columns]
        if self.factored:
            return torch.addcmul(self.one, q, k).reciprocal_()
        return (q + k).mul_(-2).sigmoid_()

    def softmax(self, weight: Tensor, rows: slice, columns: slice, bias: Tensor | None) -> Tensor:
        """Attention weights [B * H, rows, columns] for weight [B * H, A]; 0 where a query sees nothing.

        The scores are the sums of w (1 - 2 r); the sum of w is the same for all of a head's, so it is left out.
        """
        scores = self.q.new_empty(self.q.shape[0], rows.stop - rows.start, columns.stop - columns.start)
        for heads, tile, place in self.each(rows, columns):
            r = self(heads, rows, tile)
            scores[heads, :, place] = (r.flatten(1, 2) @ weight[heads, :, None]).view(r.shape[:3])
        scores.mul_(-2)
        if bias is not None and scores.numel():
            scores.unflatten(0, (bias.shape[0], -1)).add_(bias)
        top = scores.amax(-1, keepdim=True)
        scores.sub_(top.masked_fill_(top == float("-inf"), 0)).exp_()
        total = scores.sum(-1, keepdim=True)
        return scores.div_(total.masked_fill_(total == 0, 1))

    def each(self, rows: slice, columns: slice) -> Iterator[tuple[slice, slice, slice]]:
        """Heads and keys of a tile, and where the keys stand among the columns."""
        width = min(KEYS, columns.stop - columns.start)
        count = max(1, TILE // ((rows.stop - rows.start) * width * self.q.shape[2]))
        for head in range(0, self.q.shape[0], count):
            for start in range(columns.start, columns.stop, width):
                stop = min(start + width, columns.stop)
                yield slice(head, head + count), slice(start, stop), slice(start - columns.start, stop - columns.start)


def _headed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, T, H, A] as contiguous [B * H, T, A]."""
    return x.transpose(1, 2).to(dtype).flatten(0, 1).contiguous()


def _as(x: Tensor, like: Tensor) -> Tensor:
    """What `_headed` did, undone; like [B, T, H, A]."""
    return x.unflatten(0, like.shape[:3:2]).transpose(1, 2).to(like.dtype).contiguous()


def _blocks(
    q: Tensor, k: Tensor, places: tuple[Tensor | None, ...], causal: bool, window: int | None, like: Tensor
) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Queries, the keys in their reach, and what is added to the scores."""
    q_positions, k_positions, q_documents, k_documents = places
    pairs = Pairs(q, k, causal, window, None, (q_positions, k_positions), (q_documents, k_documents))
    for rows, columns in pairs.blocks(QUERIES):
        yield rows, columns, pairs.bias(rows, columns, like)


@torch.library.custom_op("mixerlab::additive_portable", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    q_positions: Tensor | None,
    k_positions: Tensor | None,
    q_documents: Tensor | None,
    k_documents: Tensor | None,
    causal: bool,
    window: int | None,
) -> Tensor:
    tiles = _Tiles(q, k)
    values = _headed(v, tiles.q.dtype)
    y = values.new_zeros(tiles.q.shape[0], q.shape[1], v.shape[3])
    weight = weight.to(y.dtype).repeat(q.shape[0], 1)
    places = (q_positions, k_positions, q_documents, k_documents)
    for rows, columns, bias in _blocks(q, k, places, causal, window, y):
        y[:, rows] = tiles.softmax(weight, rows, columns, bias) @ values[:, columns]
    return _as(y, q)


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[3])


@torch.library.custom_op("mixerlab::additive_portable_backward", mutates_args=())
def _backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    q_positions: Tensor | None,
    k_positions: Tensor | None,
    q_documents: Tensor | None,
    k_documents: Tensor | None,
    causal: bool,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of q, k, v and the weight."""
    tiles = _Tiles(q, k)
    w = weight.to(tiles.q.dtype).repeat(q.shape[0], 1)
    dy, values = (_headed(t, w.dtype) for t in (dy, v))
    dq, dk, dv, dw = (torch.zeros_like(t) for t in (tiles.q, tiles.k, values, w))
    places = (q_positions, k_positions, q_documents, k_documents)
    for rows, columns, bias in _blocks(q, k, places, causal, window, w):
        weights = tiles.softmax(w, rows, columns, bias)
        dv[:, columns] += weights.transpose(1, 2) @ dy[:, rows]
        dweights = dy[:, rows] @ values[:, columns].transpose(1, 2)
        dscores = weights * (dweights - (weights * dweights).sum(-1, keepdim=True))
        for heads, tile, place in tiles.each(rows, columns):
            r, part = tiles(heads, rows, tile), dscores[heads, :, place]
            # dscore/dw = 1 - 2 r, and the gradients of a row's scores sum to 0.
            dw[heads] -= 2 * (part.flatten(1)[:, None] @ r.flatten(1, 2))[:, 0]
            slope = torch.addcmul(r, r, r, value=-1).mul_(part[..., None])
            dq[heads, rows] += slope.sum(2)
            dk[heads, tile] += slope.sum(1)
    for t in (dq, dk):
        t.mul_(4 * w[:, None])
    return _as(dq, q), _as(dk, k), _as(dv, v), dw.view(-1, *weight.shape).sum(0).to(weight.dtype)


@_backward.register_fake
def _(dy: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(t.new_empty(t.shape) for t in inputs[:4])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:8])
    ctx.options = inputs[8:]


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return *_backward(dy, *ctx.saved_tensors, *ctx.options), *[None] * 6


_forward.register_autograd(backend.without_autocast(_differentiate), setup_context=_keep)
