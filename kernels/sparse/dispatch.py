"""The Triton kernels of the sparse branches as PyTorch operators, and reasons why they cannot run.

Compressed attention is attention with positions: a query stands at the last block that it sees. So it runs on the
kernels of `kernels.attention`; only the choice of blocks has a kernel of its own, which reads the log-sum-exp.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels import backend
from kernels.attention import dispatch as attention
from kernels.sparse import portable_select

# Query heads of a key head: the rows of one tile.
MAX_GROUP = 64
# Numbers in the scores of selection that are there at once.
_SCORES = 2**24


def refusal(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """What of this call the kernels do not have; None: nothing."""
    if q.shape[2] > MAX_GROUP * k.shape[2]:
        return f"H={q.shape[2]} query heads must be at most {MAX_GROUP} for each of G={k.shape[2]} key heads"
    return attention.refusal(q, v, dropout=0.0)


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
    """As `reference.compressed_attention`, on the GPU's kernels."""
    start, position = placed(q, starts, positions, offset)
    # The slot of the last block that is wholly past; before the start: none.
    last = start + torch.div(position - block + 1, stride, rounding_mode="floor")
    slots = torch.arange(k.shape[1], device=q.device, dtype=torch.int32).expand(k.shape[0], -1)
    ids = (None, None) if starts is None else _documents(start, k.shape[1])
    # No width of values: only the choice is wanted, which is made from the log-sum-exp.
    values = v if v.shape[3] else k
    y, lse = attention.forward(q, k, values, None, None, last, slots, *ids, True, None, scale, None)
    y = y[..., : v.shape[3]]
    if not n_selected:
        return y, torch.zeros(*q.shape[:2], k.shape[2], 0, dtype=torch.int32, device=q.device)
    blocks = (offset + q.shape[1] - 1) // select_block + 1
    own = torch.div(position, select_block, rounding_mode="floor")
    units = block // stride, select_block // stride
    return y, choice(q.detach(), k.detach(), lse.detach(), start, last, own, *units, blocks, n_selected, scale)


def placed(q: Tensor, starts: Tensor | None, positions: Tensor | None, offset: int) -> tuple[Tensor, Tensor]:
    """As `reference.places`, contiguous [B, T] int32."""
    if positions is None:
        positions = torch.arange(offset, offset + q.shape[1], device=q.device).expand(q.shape[0], -1)
    starts = torch.zeros_like(positions) if starts is None else starts
    return starts.to(torch.int32).contiguous(), positions.to(torch.int32).contiguous()


def _documents(start: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    """Ids of the documents of queries [B, T] and of slots [B, slots]: how many documents start up to there, and 1."""
    marks = torch.zeros(start.shape[0], slots + 1, dtype=torch.int32, device=start.device)
    where = start.to(torch.int64).clamp(0, slots)
    ids = marks.scatter_(1, where, 1).cumsum(1, dtype=torch.int32) + 1
    return ids.gather(1, where), ids[:, :slots]


@torch.library.custom_op("mixerlab::sparse_choice", mutates_args=())
def choice(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    start: Tensor,
    last: Tensor,
    own: Tensor,
    units: int,
    select_units: int,
    blocks: int,
    n: int,
    scale: float,
) -> Tensor:
    """The chosen ones [B, T, G, n] of so many selection blocks; units: strides of a block and of a selection block."""
    from kernels.sparse import triton_run as run

    batch, time, groups = q.shape[0], q.shape[1], k.shape[2]
    if blocks <= n:
        return portable_select.first_blocks(own, n).expand(batch, time, groups, n).contiguous()
    found = torch.empty(batch, time, groups, n, dtype=torch.int32, device=q.device)
    rows = max(64, _SCORES // max(1, batch * groups * blocks))
    for first in range(0, time, rows):
        part = slice(first, min(first + rows, time))
        scores = run.block_scores(q, k, lse, start, last, part, units, select_units, blocks, scale)
        found[:, part] = portable_select.select_blocks(scores, own[:, part], n)
    return found


@choice.register_fake
def _(
    q: Tensor, k: Tensor, lse: Tensor, start: Tensor, last: Tensor, own: Tensor, units: int, select_units: int,
    blocks: int, n: int, scale: float,
) -> Tensor:  # fmt: skip
    return q.new_empty(*q.shape[:2], k.shape[2], n, dtype=torch.int32)


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
    """As `reference.selected_attention`, on the GPU's kernels."""
    y, _ = forward(q, k, v, indices, starts, positions, block, scale, offset)
    return y


@torch.library.custom_op("mixerlab::selected_attention", mutates_args=())
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    starts: Tensor | None,
    positions: Tensor | None,
    block: int,
    scale: float,
    offset: int,
) -> tuple[Tensor, Tensor]:
    """y [B, T, H, V], and [B, T, H] fp32 what the weights are relative to."""
    from kernels.sparse import triton_run as run

    return run.forward(run.Call.of(q, k, v, indices, starts, positions, block, scale, offset))


@forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("mixerlab::selected_attention_backward", mutates_args=())
def backward(
    y: Tensor,
    reference: Tensor,
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    starts: Tensor | None,
    positions: Tensor | None,
    block: int,
    scale: float,
    offset: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    from kernels.sparse import triton_run as run

    return run.backward(run.Call.of(q, k, v, indices, starts, positions, block, scale, offset), y, reference, dy)


@backward.register_fake
def _(y: Tensor, reference: Tensor, dy: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(t.new_empty(t.shape) for t in inputs[:3])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[:6])
    ctx.options = inputs[6:]
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dy: Tensor | None, dreference: Tensor | None) -> tuple[Tensor | None, ...]:
    y, reference, *inputs = ctx.saved_tensors
    dy = torch.zeros_like(y) if dy is None else dy
    return *backward(y, reference, dy, *inputs, *ctx.options), *[None] * 6


forward.register_autograd(backend.without_autocast(_differentiate), setup_context=_keep)
