"""The Triton kernels as PyTorch operators: with shapes for tracing, a gradient, and reasons why they cannot run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels import backend

MAX_WIDTH = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def refusal(q: Tensor, v: Tensor) -> str | None:
    """What of this call the kernels do not have; None: nothing."""
    if max(q.shape[3], v.shape[3]) > MAX_WIDTH:
        return f"A={q.shape[3]} and V={v.shape[3]} must be at most {MAX_WIDTH}"
    if q.dtype not in DTYPES:
        return f"dtype {q.dtype} must be one of {', '.join(map(str, DTYPES))}"
    return None


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
    approximate: bool,
) -> Tensor:
    """As `reference.attention`, on the GPU's kernels; `approximate`: the hardware's own tanh."""
    places = (q_positions, k_positions, q_documents, k_documents)
    y, _ = forward(q, k, v, weight, *places, causal, window, approximate)
    return y


@torch.library.custom_op("mixerlab::additive", mutates_args=())
def forward(
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
    approximate: bool,
) -> tuple[Tensor, Tensor]:
    """y [B, T, H, V] and the log-sum-exp of the scores [B, T, H] fp32."""
    from kernels.additive import triton_run as run

    places = (q_positions, k_positions, q_documents, k_documents)
    return run.forward(run.Call.of(q, k, v, weight, *places, causal, window, approximate))


@forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("mixerlab::additive_backward", mutates_args=())
def backward(
    y: Tensor,
    lse: Tensor,
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
    approximate: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and the weight."""
    from kernels.additive import triton_run as run

    places = (q_positions, k_positions, q_documents, k_documents)
    return run.backward(run.Call.of(q, k, v, weight, *places, causal, window, approximate), y, lse, dy)


@backward.register_fake
def _(y: Tensor, lse: Tensor, dy: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(t.new_empty(t.shape) for t in inputs[:4])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[:8])
    ctx.options = inputs[8:]
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dy: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    y, lse, *inputs = ctx.saved_tensors
    dy = torch.zeros_like(y) if dy is None else dy
    return *backward(y, lse, dy, *inputs, *ctx.options), *[None] * 7


forward.register_autograd(backend.without_autocast(_differentiate), setup_context=_keep)
