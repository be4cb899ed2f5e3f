"""The Triton kernels as PyTorch operators: with shapes for tracing, a gradient, and reasons why they cannot run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels import backend

MAX_WIDTH = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def refusal(q: Tensor, v: Tensor, dropout: float) -> str | None:
    """What of this call the kernels do not have; None: nothing."""
    if dropout:
        return f"dropout={dropout} of attention weights exists on the portable path alone"
    if max(q.shape[3], v.shape[3]) > MAX_WIDTH:
        return f"K={q.shape[3]} and V={v.shape[3]} must be at most {MAX_WIDTH}"
    if q.dtype not in DTYPES:
        return f"dtype {q.dtype} must be one of {', '.join(map(str, DTYPES))}"
    return None


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    window: int | None,
    scale: float,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    q_positions: Tensor | None,
    k_positions: Tensor | None,
    q_documents: Tensor | None,
    k_documents: Tensor | None,
    dropout: float = 0.0,
    lse: bool = True,
) -> tuple[Tensor, Tensor]:
    """As `reference.attention`, on the GPU's kernels; the log-sum-exp is fp32, and always there."""
    places = (q_positions, k_positions, q_documents, k_documents)
    y, log_sum = forward(q, k, v, alibi_slopes, sinks, *places, causal, window, scale, softcap)
    return y, log_sum


@torch.library.custom_op("mixerlab::attention", mutates_args=())
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    q_positions: Tensor | None,
    k_positions: Tensor | None,
    q_documents: Tensor | None,
    k_documents: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """y [B, T, H, V] and its log-sum-exp [B, T, H] fp32."""
    from kernels.attention import triton_run as run

    places = (q_positions, k_positions, q_documents, k_documents)
    return run.forward(run.Call.of(q, k, v, alibi_slopes, sinks, *places, causal, window, scale, softcap))


@forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("mixerlab::attention_backward", mutates_args=())
def backward(
    y: Tensor,
    lse: Tensor,
    dy: Tensor,
    dlse: Tensor | None,
    slopes_gradient: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    q_positions: Tensor | None,
    k_positions: Tensor | None,
    q_documents: Tensor | None,
    k_documents: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, slopes and sinks; the last two are empty where not asked for or not given."""
    from kernels.attention import triton_run as run

    places = (q_positions, k_positions, q_documents, k_documents)
    call = run.Call.of(q, k, v, alibi_slopes, sinks, *places, causal, window, scale, softcap)
    *found, slopes, sink = run.backward(call, y, lse, dy, dlse, slopes_gradient)
    dslopes = lse.new_empty(0) if slopes is None else slopes
    dsinks = lse.new_empty(0) if sink is None else sink
    dq, dk, dv = found
    return dq, dk, dv, dslopes, dsinks


@backward.register_fake
def _(
    y: Tensor,
    lse: Tensor,
    dy: Tensor,
    dlse: Tensor | None,
    slopes_gradient: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))
    heads = q.shape[2]
    return dq, dk, dv, lse.new_empty(heads if slopes_gradient else 0), lse.new_empty(0 if sinks is None else heads)


def _keep(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[:9])
    ctx.options = inputs[9:]


def _differentiate(ctx: Any, dy: Tensor, dlse: Tensor | None) -> tuple:
    y, lse, q, k, v, slopes, sinks, *places = ctx.saved_tensors
    wanted = slopes is not None and ctx.needs_input_grad[3]
    dq, dk, dv, dslopes, dsinks = backward(
        y, lse, dy, dlse, wanted, q, k, v, slopes, sinks, *places, *ctx.options
    )
    dslopes = dslopes.to(slopes.dtype) if wanted else None
    dsinks = None if sinks is None else dsinks.to(sinks.dtype)
    return dq, dk, dv, dslopes, dsinks, *[None] * (len(places) + len(ctx.options))


forward.register_autograd(backend.without_autocast(_differentiate), setup_context=_keep)
