"""The branches of native sparse attention (NSA): public ops, checks and FLOP formulas.

Blocks belong to documents. A query knows the slot of its document's first key (`starts`) and its own position in that
document (`positions`); the keys of a document lie in a row from there on. Without both, a row is one document whose
queries stand at offset, offset + 1, .. Query head h reads key/value head h // (H / G).

Source: Yuan et al. 2025, arXiv:2502.11089, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels import backend, flops
from kernels.sparse import dispatch, portable, portable_select, reference

COMPRESSED: dict[str, Callable] = {
    "triton": dispatch.compressed_attention,
    "portable": portable.compressed_attention,
    "reference": reference.compressed_attention,
}
# The portable choice is made of operators that a GPU has too.
SELECT = {
    "triton": portable_select.select_blocks,
    "portable": portable_select.select_blocks,
    "reference": reference.select_blocks,
}
SELECTED: dict[str, Callable] = {
    "triton": dispatch.selected_attention,
    "portable": portable.selected_attention,
    "reference": reference.selected_attention,
}


def compressed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block: int,
    stride: int,
    scale: float | None = None,
    n_selected: int = 0,
    select_block: int = 64,
    starts: Tensor | None = None,
    positions: Tensor | None = None,
    offset: int = 0,
) -> tuple[Tensor, Tensor]:
    """Attention to compressed blocks that are wholly past, and the blocks to attend to token by token.

    Block i of a document stands for its tokens i * stride .. i * stride + block - 1. The score of selection block j is
    the sum, over the query heads of a key head and over i, of the probability of i times the tokens that i and j share,
    divided by the stride: equation 9, which for block 32, stride 16 and select_block 64 weighs i = 4 j - 1 .. 4 j + 3
    by 1 2 2 2 1, and equation 10. The choice is that of `select_blocks`; no gradient passes it.

    Args:
        q: [B, T, H, K]; k: [B, C, G, K]; v: [B, C, G, V], a key and a value a block; V = 0 where only the choice is
            wanted. One floating dtype, one device.
        block, stride: tokens of a block, and from one start to the next; stride divides block.
        scale: factor of the scores, above 0; None: 1 / sqrt(K).
        n_selected: how many blocks to choose for each query; 0: none.
        select_block: tokens of a selection block, a multiple of stride.
        starts: [B, T] integers, the slot of the first block of each query's document; None: 0.
        positions: [B, T] integers, -1 at pads, which see nothing.
        offset: the position of the first query; beside `positions` a bound: positions[:, i] <= offset + i.
    Returns:
        [B, T, H, V] of q's dtype, 0 where no block is past; [B, T, G, n_selected] int32 as `select_blocks` gives them.
    Raises:
        ValueError: shapes, dtypes, devices or sizes that do not fit.
    """
    _check_blocks(block, stride, select_block, n_selected)
    _check("compressed_attention", q, k, v, scale, offset, starts=starts, positions=positions)
    if count := flops.counter():
        shapes = q.shape, k.shape, v.shape
        count.record("compressed_attention", compressed_attention_flops(*shapes, block, stride, offset))
        seen = compressed_visible(offset + q.shape[1] - 1, block, stride, k.shape[1])
        _count_bytes(count, q, k, v, seen)
        return q.new_empty(*q.shape[:3], v.shape[3]), _no_choice(q, k, n_selected)
    run = backend.implementation("compressed_attention", COMPRESSED, q, dispatch.refusal(q, k, v))
    options: dict[str, Any] = dict(
        block=block, stride=stride, scale=_scale(q, scale), n_selected=n_selected, select_block=select_block
    )
    with backend.no_autocast(q):
        return run(q, k, v, **options, starts=starts, positions=positions, offset=offset)


def select_blocks(scores: Tensor, own: Tensor, n: int) -> Tensor:
    """The blocks that each query attends to: its own, the first, the one before its own, then the best by score.

    Among equal scores the lower index comes first. Blocks after a query's own are never taken.

    Args:
        scores: [B, T, G, J] floating, at least 0.
        own: [1 or B, T] integers, the block of each query; negative at pads.
        n: how many, at least 1.
    Returns:
        [B, T, G, n] int32, ascending, then -1 where there are fewer.
    Raises:
        ValueError: shapes or n that do not fit.
    """
    if scores.dim() != 4 or own.shape[1:] != scores.shape[1:2] or own.shape[0] not in (1, scores.shape[0]):
        raise ValueError(
            f"select_blocks wants scores [B, T, G, J] and own [1 or B, T]; got {list(scores.shape)}, {list(own.shape)}"
        )
    _check_count("n", n)
    return backend.implementation("select_blocks", SELECT, scores)(scores, own, n)


def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    *,
    block: int,
    scale: float | None = None,
    starts: Tensor | None = None,
    positions: Tensor | None = None,
    offset: int = 0,
) -> Tensor:
    """Causal attention to the tokens of the chosen blocks.

    Args:
        q: [B, T, H, K]; k: [B, S, G, K]; v: [B, S, G, V]; one floating dtype, one device.
        indices: [B, T, G, n] int32, blocks of the query's document, each at most once; -1: none, behind all others.
            A query's own block must be among them.
        block: tokens of a block.
        scale: factor of the scores, above 0; None: 1 / sqrt(K).
        starts: [B, T] integers, the slot of the first key of each query's document; None: 0.
        positions: [B, T] integers, -1 at pads, which see nothing.
        offset: the position of the first query; beside `positions` a bound: positions[:, i] <= offset + i.
    Returns:
        [B, T, H, V] of q's dtype.
    Raises:
        ValueError: shapes, dtypes, devices or sizes that do not fit.
    """
    _check_count("block", block)
    _check("selected_attention", q, k, v, scale, offset, starts=starts, positions=positions)
    if indices.shape[:3] != (*q.shape[:2], k.shape[2]) or indices.dim() != 4 or indices.dtype != torch.int32:
        raise ValueError(
            f"indices must be [B, T, G, n] = [{q.shape[0]}, {q.shape[1]}, {k.shape[2]}, n] int32; "
            f"got {list(indices.shape)} of {indices.dtype}"
        )
    n = indices.shape[3]
    if count := flops.counter():
        pairs = flops.Formula.of(
            "2 * B*H*(K+V) * visible_pairs",
            B=q.shape[0], H=q.shape[2], K=q.shape[3], V=v.shape[3],
            visible_pairs=selected_pairs(q.shape[1], offset, block, n),
        )  # fmt: skip
        count.record("selected_attention", pairs)
        _count_bytes(count, q, k, v, min(k.shape[1], selected_pairs(q.shape[1], offset, block, n)))
        return q.new_empty(*q.shape[:3], v.shape[3])
    run = backend.implementation("selected_attention", SELECTED, q, dispatch.refusal(q, k, v))
    options: dict[str, Any] = dict(block=block, scale=_scale(q, scale), offset=offset)
    with backend.no_autocast(q):
        return run(q, k, v, indices, starts=starts, positions=positions, **options)


def compressed_visible(position: int, block: int, stride: int, blocks: int) -> int:
    """How many of a document's compressed blocks are wholly past for a query at `position`."""
    return min(max((position - block + 1) // stride + 1, 0), blocks)


def compressed_pairs(queries: int, offset: int, block: int, stride: int, blocks: int) -> int:
    """Pairs (query, block) that are attended to: the sum of `compressed_visible`, in closed form."""
    end = offset + queries
    at_first, at_last = (compressed_visible(p, block, stride, blocks) for p in (offset, end - 1))
    later = max(at_last - at_first, 0)
    # Block i is seen from position i * stride + block - 1 on: by all queries, or by those from there.
    since = later * (end - at_first * stride - block + 1) - stride * (later * (later - 1) // 2)
    return at_first * queries + since


def selected_pairs(queries: int, offset: int, block: int, n: int) -> int:
    """Pairs (query, key) that are attended to: all of the past, or n - 1 blocks and the past of the own one."""

    def below(position: int) -> int:
        dense = min(position, n * block)
        blocks, rest = divmod(position - dense, block)
        ramp = block * (block + 1) // 2
        far = (position - dense) * (n - 1) * block + blocks * ramp + rest * (rest + 1) // 2
        return dense * (dense + 1) // 2 + far

    return below(offset + queries) - below(offset)


def compressed_attention_flops(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], block: int, stride: int, offset: int
) -> flops.Formula:
    """Scores and sums of the visible pairs, one document a row; the scores of selection are additions beside them."""
    batch, queries, heads, width = q
    pairs = compressed_pairs(queries, offset, block, stride, k[1])
    return flops.Formula.of(
        "2 * B*H*(K+V) * visible_pairs", B=batch, H=heads, K=width, V=v[3], visible_pairs=pairs
    )


def _count_bytes(count: flops.FlopCounter, q: Tensor, k: Tensor, v: Tensor, keys: int) -> None:
    """The least traffic: q, and as many keys and values as any query sees, read once, the output written."""
    moved = math.prod(q.shape[:3]) * (q.shape[3] + v.shape[3])
    moved += k.shape[0] * keys * k.shape[2] * (k.shape[3] + v.shape[3])
    count.attention_bytes += q.element_size() * moved
    count.score_bytes += q.element_size() * math.prod(q.shape[:3]) * k.shape[1]


def _no_choice(q: Tensor, k: Tensor, n: int) -> Tensor:
    return torch.empty(*q.shape[:2], k.shape[2], n, dtype=torch.int32, device=q.device)


def _scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def _check(
    op: str, q: Tensor, k: Tensor, v: Tensor, scale: float | None, offset: int, **places: Tensor | None
) -> None:
    if (
        not q.dim() == k.dim() == v.dim() == 4
        or q.shape[0] != k.shape[0]
        or k.shape[:3] != v.shape[:3]
        or q.shape[3] != k.shape[3]
    ):
        raise ValueError(
            f"{op} wants q [B, T, H, K], k [B, S, G, K], v [B, S, G, V]; got "
            f"{list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        )
    if not k.shape[2] or q.shape[2] % k.shape[2]:
        raise ValueError(f"H={q.shape[2]} query heads must be a multiple of G={k.shape[2]} key/value heads")
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise ValueError(f"q, k, v must have one floating dtype; got {q.dtype}, {k.dtype}, {v.dtype}")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k, v must be on one device; got {q.device}, {k.device}, {v.device}")
    if not q.shape[3]:
        raise ValueError("q and k have K=0 channels; K must be at least 1")
    if scale is not None and not 0 < scale < math.inf:
        raise ValueError(f"scale={scale} must be above 0 and finite")
    if offset < 0:
        raise ValueError(f"offset={offset} must be at least 0")
    if places["starts"] is not None and places["positions"] is None:
        raise ValueError("starts need positions")
    for name, tensor in places.items():
        if tensor is not None and (tensor.shape != q.shape[:2] or tensor.is_floating_point()):
            raise ValueError(
                f"{name} must be integers [B, T] = {list(q.shape[:2])}; got {list(tensor.shape)} of {tensor.dtype}"
            )


def _check_blocks(block: int, stride: int, select_block: int, n_selected: int) -> None:
    _check_count("block", block)
    _check_count("stride", stride)
    if block % stride:
        raise ValueError(f"block={block} must be a multiple of stride={stride}")
    if n_selected:
        _check_count("n_selected", n_selected)
        _check_count("select_block", select_block)
        if select_block % stride:
            raise ValueError(f"select_block={select_block} must be a multiple of stride={stride}")


def _check_count(name: str, value: int) -> None:
    if isinstance(value, (bool, float)) or value < 1:
        raise ValueError(f"{name}={value} must be a whole number of at least 1")
