"""The scan's Triton kernels as PyTorch operators: with shapes for tracing, a gradient, and reasons for a refusal."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels import backend

MAX_STATE = 256
# Tokens between two states that are kept for the backward pass.
PIECE = 32
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def refusal(x: Tensor, wide: torch.dtype, states: int) -> str | None:
    """What of this call the kernels do not have; None: nothing. `wide`: the dtype of dt, a, d and the state."""
    if not 1 <= states <= MAX_STATE:
        return f"N={states} must be between 1 and {MAX_STATE}"
    if x.dtype not in DTYPES:
        return f"dtype {x.dtype} must be one of {', '.join(map(str, DTYPES))}"
    if wide != torch.float32:
        return f"dt of {wide} must be float32"
    return None


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
    """As `scan_reference.selective_scan`, on the GPU's kernels."""
    y, state, _ = forward(x, dt, a, b, c, d, state, fresh)
    return y, state


@torch.library.custom_op("mixerlab::selective_scan", mutates_args=())
def forward(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    state: Tensor,
    fresh: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, the state after the last token, and the state before each piece [B, pieces, D, N]."""
    from kernels.ssm import triton_run as run

    return run.forward(run.Call.of(x, dt, a, b, c, d, fresh), state)


@forward.register_fake
def _(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Any, state: Tensor, fresh: Any) -> tuple[Tensor, ...]:
    before = state.new_empty(x.shape[0], -(-x.shape[1] // PIECE), *a.shape)
    return x.new_empty(x.shape), state.new_empty(state.shape), before


@torch.library.custom_op("mixerlab::selective_scan_backward", mutates_args=())
def backward(
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
    from kernels.ssm import triton_run as run

    return run.backward(run.Call.of(x, dt, a, b, c, d, fresh), dy, dstate, before)


@backward.register_fake
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
) -> tuple[Tensor, ...]:
    dx, ddt, da, db, dc, dbefore = (t.new_empty(t.shape) for t in (x, dt, a, b, c, dstate))
    return dx, ddt, da, db, dc, a.new_empty(0 if d is None else len(a)), dbefore


def _keep(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    *rest, _state, fresh = inputs
    ctx.save_for_backward(output[2], *rest, fresh)


def _differentiate(ctx: Any, dy: Tensor, dstate: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    before, *rest = ctx.saved_tensors
    dx, ddt, da, db, dc, dd, dstate = backward(dy, dstate, before, *rest)
    return dx, ddt, da, db, dc, None if rest[5] is None else dd, dstate, None


forward.register_autograd(backend.without_autocast(_differentiate), setup_context=_keep)
