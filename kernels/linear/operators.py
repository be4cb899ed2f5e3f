"""A causal sum as a PyTorch operator: one node for autograd and `torch.compile`, with shapes for tracing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels import backend
from kernels.linear.frame import Ids

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


class Forward(Protocol):
    """y [B, T, H, V], the state after the last token [B, H, K, V] and those before each chunk [n, B G, K, H / G, V]."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, gain: Tensor | None, state: Tensor,
        ids: Ids | None, strict: bool,
    ) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip


class Backward(Protocol):
    """Gradients of q, k, v, log_decay and gain (None where not wanted) and the state; from what `Forward` gave."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, gain: Tensor | None, states: Tensor,
        state: Tensor, ids: Ids | None, strict: bool, y: Tensor | None, dy: Tensor, dstate: Tensor, decay: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor]: ...  # fmt: skip


def causal_sum(
    name: str, forward: Forward, backward: Backward, chunk: Callable[[int], int], reads_output: bool = False
) -> Callable[..., Any]:
    """The operator `mixerlab::name`; called as `frame.CausalSum`.

    Args:
        chunk: tokens a chunk of rows of a length.
        reads_output: for the gradient of log_decay, backward wants y, which is None otherwise.
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
    ) -> tuple[Tensor, Tensor, Tensor]:
        return forward(q, k, v, log_decay, gain, state, _ids(row, before), strict)

    @run.register_fake
    def _(
        q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, gain: Tensor | None, state: Tensor, *options: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        batch, time, groups, width = q.shape
        share, chunks = v.shape[2] // groups, -(-time // chunk(time))
        states = state.new_empty(chunks, batch * groups, width, share, v.shape[3])
        return v.new_empty(v.shape, dtype=state.dtype), state.new_empty(state.shape), states

    @torch.library.custom_op(f"mixerlab::{name}_backward", mutates_args=())
    def back(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        gain: Tensor | None,
        states: Tensor,
        state: Tensor,
        row: Tensor | None,
        before: Tensor | None,
        strict: bool,
        y: Tensor | None,
        dy: Tensor,
        dstate: Tensor,
        decay: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        found = backward(q, k, v, log_decay, gain, states, state, _ids(row, before), strict, y, dy, dstate, decay)
        dq, dk, dv, *more, dstate = found
        dlog_decay, dgain = (states.new_empty(0) if x is None else x for x in more)
        return dq, dk, dv, dlog_decay, dgain, dstate

    @back.register_fake
    def _(
        q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, gain: Tensor | None, states: Tensor, *options: Any
    ) -> Gradients:
        dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))
        dstate, decay = options[-2:]
        wanted = (log_decay if decay else None), gain
        dlog_decay, dgain = (states.new_empty(0) if x is None else x.new_empty(x.shape) for x in wanted)
        return dq, dk, dv, dlog_decay, dgain, dstate.new_empty(dstate.shape)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        q, k, v, log_decay, gain, _, row, before, ctx.strict = inputs
        y, state, states = output
        wanted = reads_output and ctx.needs_input_grad[3]
        ctx.save_for_backward(q, k, v, log_decay, gain, states, state, row, before, y if wanted else None)
        # Nobody differentiates the states, and zeros for them would be as many.
        ctx.set_materialize_grads(False)

    def differentiate(ctx: Any, dy: Tensor | None, dstate: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        decay = ctx.needs_input_grad[3]
        *inputs, y = ctx.saved_tensors
        v, gain, states, state = (inputs[i] for i in (2, 4, 5, 6))
        dy = states.new_zeros(v.shape) if dy is None else dy
        dstate = torch.zeros_like(state) if dstate is None else dstate
        *grads, dlog_decay, dgain, dstate = back(*inputs, ctx.strict, y, dy, dstate, decay)
        return *grads, dlog_decay if decay else None, None if gain is None else dgain, dstate, None, None, None

    run.register_autograd(backend.without_autocast(differentiate), setup_context=keep)

    def call(
        q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, gain: Tensor | None, state: Tensor,
        ids: Ids | None, strict: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        row, before = (None, None) if ids is None else (ids.row, ids.before)
        y, state, _ = run(q, k, v, log_decay, gain, state, row, before, strict)
        return y, state

    return call


def _ids(row: Tensor | None, before: Tensor | None) -> Ids | None:
    return None if row is None or before is None else Ids(row, before)
