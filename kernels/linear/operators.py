"""A causal sum as a PyTorch operator: one node for autograd and `torch.compile`, with shapes for tracing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels import backend
from kernels.linear.frame import Ids

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Kept:
    """What a backward pass wants of the forward pass besides its inputs.

    Attributes:
        state: [B, H, K, V] after the last token.
        states: [n, B G, K, H / G, V] before each chunk.
        pieces: [n or 1] how each chunk was worked on, else empty: `weak.pieces`.
        others: [n, B G, C, H / G V] what is read of other tokens, where the decay wants a gradient, else empty.
    """

    state: Tensor
    states: Tensor
    pieces: Tensor
    others: Tensor


class Forward(Protocol):
    """y [B, T, H, V] and what is kept. `slopes`: the decay will want a gradient."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, gain: Tensor | None, state: Tensor,
        ids: Ids | None, strict: bool, slopes: bool,
    ) -> tuple[Tensor, Kept]: ...  # fmt: skip


class Backward(Protocol):
    """Gradients of q, k, v, log_decay and gain (None where not wanted) and the state."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, gain: Tensor | None, kept: Kept,
        ids: Ids | None, strict: bool, dy: Tensor, dstate: Tensor, slopes: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor]: ...  # fmt: skip


def causal_sum(
    name: str, forward: Forward, backward: Backward, chunk: Callable[[int], int], keeps_more: bool = False
) -> Callable[..., Any]:
    """The operator `mixerlab::name`; called as `frame.CausalSum`.

    Args:
        chunk: tokens a chunk of rows of a length.
        keeps_more: it keeps `pieces` and `others`, where there is a decay.
    """

    @torch.library.custom_op(f"mixerlab::{name}", mutates_args=())
    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        gain: Tensor | None,
        state: Tensor,
        row: Tensor | None,
        before: Tensor | None,
        strict: bool,
        slopes: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        y, kept = forward(q, k, v, log_decay, gain, state, _ids(row, before), strict, slopes)
        return y, kept.state, kept.states, kept.pieces, kept.others

    @run.register_fake
    def _(
        q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, gain: Tensor | None, state: Tensor,
        row: Tensor | None, before: Tensor | None, strict: bool, slopes: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        (batch, time, groups, width), size = q.shape, chunk(q.shape[1])
        heads, chunks, wide = v.shape[2], -(-time // size), v.shape[3]
        states = state.new_empty(chunks, batch * groups, width, heads // groups, wide)
        alike = log_decay is not None and log_decay.dim() == 1 and time % size == 0
        count = 0 if log_decay is None or not keeps_more else 1 if alike else chunks
        pieces = q.new_empty(count, dtype=torch.long)
        others = state.new_empty((chunks, batch * groups, size, heads // groups * wide) if slopes and keeps_more else 0)
        return v.new_empty(v.shape, dtype=state.dtype), state.new_empty(state.shape), states, pieces, others

    @torch.library.custom_op(f"mixerlab::{name}_backward", mutates_args=())
    def back(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        gain: Tensor | None,
        state: Tensor,
        states: Tensor,
        pieces: Tensor,
        others: Tensor,
        row: Tensor | None,
        before: Tensor | None,
        strict: bool,
        dy: Tensor,
        dstate: Tensor,
        slopes: bool,
    ) -> Gradients:
        kept = Kept(state, states, pieces, others)
        found = backward(q, k, v, log_decay, gain, kept, _ids(row, before), strict, dy, dstate, slopes)
        dq, dk, dv, *more, dstate = found
        dlog_decay, dgain = (states.new_empty(0) if x is None else x for x in more)
        return dq, dk, dv, dlog_decay, dgain, dstate

    @back.register_fake
    def _(
        q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, gain: Tensor | None, state: Tensor, *options: Any
    ) -> Gradients:
        dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))
        wanted = (log_decay if options[-1] else None), gain
        dlog_decay, dgain = (state.new_empty(0) if x is None else x.new_empty(x.shape) for x in wanted)
        return dq, dk, dv, dlog_decay, dgain, state.new_empty(state.shape)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, _, row, before, ctx.strict, ctx.slopes = inputs
        ctx.save_for_backward(*tensors, *output[1:], row, before)
        # Nobody differentiates what is kept, and zeros for it would be as many.
        ctx.set_materialize_grads(False)

    def differentiate(ctx: Any, dy: Tensor | None, dstate: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        v, gain, state = saved[2], saved[4], saved[5]
        dy = state.new_zeros(v.shape) if dy is None else dy
        dstate = torch.zeros_like(state) if dstate is None else dstate
        *grads, dlog_decay, dgain, dstate = back(*saved, ctx.strict, dy, dstate, ctx.slopes)
        found = dlog_decay if ctx.slopes else None, None if gain is None else dgain
        return *grads, *found, dstate, None, None, None, None

    run.register_autograd(backend.without_autocast(differentiate), setup_context=keep)

    def call(
        q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, gain: Tensor | None, state: Tensor,
        ids: Ids | None, strict: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        row, before = (None, None) if ids is None else (ids.row, ids.before)
        slopes = log_decay is not None and log_decay.requires_grad and torch.is_grad_enabled()
        y, state, *_ = run(q, k, v, log_decay, gain, state, row, before, strict, slopes)
        return y, state

    return call


def _ids(row: Tensor | None, before: Tensor | None) -> Ids | None:
    return None if row is None or before is None else Ids(row, before)
