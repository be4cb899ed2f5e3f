"""Mamba's selective scan in pieces of time: one fused multiply-add a token, nothing else in the loop.

Everything around the recurrence runs for a whole piece at once. Only the state before each piece is kept; the backward
pass runs each piece again. A PyTorch operator, so that torch.compile keeps it as one node instead of a loop over time.
No sums of logarithms: they overflow where steps are large.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels import backend
from kernels.ssm import scan_reference

PIECE = 32


def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    state: Tensor,
    fresh: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """As `scan_reference.selective_scan`."""
    if x.shape[1] <= 1:
        return scan_reference.selective_scan(x, dt, a, b, c, d, state, fresh)
    y, state, _ = _forward(x, dt, a, b, c, d, state, fresh)
    return y, state


@torch.library.custom_op("mixerlab::selective_scan_portable", mutates_args=())
def _forward(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    state: Tensor,
    fresh: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, the state after the last token, and the state before each piece [pieces, B, D, N]."""
    y, before = torch.empty_like(x, memory_format=torch.contiguous_format), []
    state = state.clone()
    for start in range(0, x.shape[1], PIECE):
        piece = _Piece(start, x, dt, a, b, c, fresh)
        before.append(state)
        states = piece.states(state)
        y_piece = _over_states(states, piece.c[:, :, None])
        y[:, start : start + PIECE] = (y_piece if d is None else y_piece.addcmul_(piece.x, d)).transpose(0, 1)
        state = states[-1].clone()
    return y, state, torch.stack(before)


@_forward.register_fake
def _(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    state: Tensor,
    fresh: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    pieces = -(-x.shape[1] // PIECE)
    return x.new_empty(x.shape), state.new_empty(state.shape), state.new_empty(pieces, *state.shape)


@torch.library.custom_op("mixerlab::selective_scan_portable_backward", mutates_args=())
def _backward(
    dy: Tensor,
    dstate: Tensor,
    before: Tensor,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    fresh: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of x, dt, a, b, c, d (empty where there is none) and the state before the first token."""
    dx, ddt, db, dc = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, dt, b, c))
    da, dd = torch.zeros_like(a), a.new_zeros(0 if d is None else len(a))
    for number in reversed(range(len(before))):
        start = number * PIECE
        now = slice(start, start + PIECE)
        piece = _Piece(start, x, dt, a, b, c, fresh)
        dy_piece = dy[:, now].transpose(0, 1).to(a.dtype)
        states = piece.states(before[number])
        dc[:, now] = (dy_piece[:, :, None] @ states)[:, :, 0].transpose(0, 1)
        # Gradient of the state after each token: what its own output asks for, and what the next state hands back.
        grads = piece.back(dy_piece, dstate)
        db[:, now] = (piece.taken[:, :, None] @ grads)[:, :, 0].transpose(0, 1)
        dtaken = _over_states(grads, piece.b[:, :, None])
        dx_piece = dtaken * piece.dt
        if d is not None:
            dx_piece.addcmul_(dy_piece, d)
            dd += (dy_piece * piece.x).sum((0, 1))
        dx[:, now] = dx_piece.transpose(0, 1)
        dstate = grads[0] * piece.decay[0]
        # Of dt a, the logarithm of each decay: gradient x decay x state before the token.
        grads.mul_(piece.decay)
        grads[1:].mul_(states[:-1])
        grads[0].mul_(before[number])
        ddt[:, now] = _over_states(grads, a).addcmul_(dtaken, piece.x).transpose(0, 1)
        da += grads.mul_(piece.dt[..., None]).sum((0, 1))
    return dx, ddt, da, db, dc, dd, dstate


@_backward.register_fake
def _(
    dy: Tensor,
    dstate: Tensor,
    before: Tensor,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    fresh: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dd = a.new_empty(0 if d is None else len(a))
    dx, ddt, da, db, dc = (t.new_empty(t.shape) for t in (x, dt, a, b, c))
    return dx, ddt, da, db, dc, dd, before.new_empty(before.shape[1:])


def _keep(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    *rest, _state, fresh = inputs
    ctx.save_for_backward(output[2], *rest, fresh)


def _differentiate(ctx: Any, dy: Tensor, dstate: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    before, *rest = ctx.saved_tensors
    dx, ddt, da, db, dc, dd, dstate = _backward(dy, dstate, before, *rest)
    return dx, ddt, da, db, dc, None if rest[5] is None else dd, dstate, None


_forward.register_autograd(backend.without_autocast(_differentiate), setup_context=_keep)


def _over_states(x: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum over the last dimension: x [t, B, D, N], weights broadcast to it -> [t, B, D].

    A product and one matrix times ones: a batch of small products, or `sum`, takes two to four times as long.
    """
    return (x * weights) @ x.new_ones(x.shape[-1])


class _Piece:
    """The tokens from `start` on, time first: what can be computed for all of them at once.

    Attributes:
        decay: [t, B, D, N], 0 where the past is forgotten.
        taken: dt x, [t, B, D].
    """

    def __init__(self, start: int, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, fresh: Tensor | None):
        now = slice(start, start + PIECE)
        self.x, self.dt, self.b, self.c = (t[:, now].transpose(0, 1).to(a.dtype) for t in (x, dt, b, c))
        self.taken = self.x * self.dt
        self.decay = (self.dt[..., None] * a).exp_()
        if fresh is not None:
            self.decay.masked_fill_(fresh[:, now].t()[..., None, None], 0)

    def states(self, before: Tensor) -> Tensor:
        """After each token, [t, B, D, N]."""
        states = self.taken[..., None] * self.b[:, :, None]
        # unbind, not indexing: views made once.
        for state, decay in zip(states.unbind(), self.decay.unbind(), strict=True):
            before = state.addcmul_(decay, before)
        return states

    def back(self, dy: Tensor, after: Tensor) -> Tensor:
        """Gradients of the states after each token [t, B, D, N], from those of the outputs and of the last one."""
        grads = dy[..., None] * self.c[:, :, None]
        steps = list(zip(grads.unbind(), self.decay.unbind(), strict=True))
        grad, decay = steps.pop()
        after = grad.add_(after)
        for grad, earlier in reversed(steps):
            after = grad.addcmul_(decay, after)
            decay = earlier
        return grads
