"""The Triton kernels of linear attention: as operators, and reasons why they cannot run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.linear import operators, reference
from kernels.linear.frame import Ids, attend

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def refusal(*tensors: Tensor | None) -> str | None:
    """What of this call the kernels do not have; None: nothing."""
    for t in tensors:
        if t is not None and t.dtype not in DTYPES:
            return f"dtype {t.dtype} must be one of {', '.join(map(str, DTYPES))}"
    return None


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, gain: Tensor | None = None, alone: bool = False, **options: Any
) -> tuple:
    """As `reference.linear_attention`, of v times gain [B, T, H]; for one token, or none, the recurrence itself."""
    v = v if gain is None else gain[..., None] * v
    if causal and (q.shape[1] <= 1 or not q.numel() or not v.numel()):
        return reference.linear_attention(q, k, v, causal=True, **options)
    return attend(_causal_sum, q, k, v, apart=True, **options)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, gain: Tensor | None, state: Tensor,
    ids: Ids | None, strict: bool, slopes: bool,
) -> tuple[Tensor, operators.Kept]:  # fmt: skip
    from kernels.linear import triton_run

    y, state, states = triton_run.forward(q, k, v, log_decay, state, ids, strict)
    return y, operators.Kept(state, states, q.new_empty(0, dtype=torch.long), state.new_empty(0))


def _backward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, gain: Tensor | None, kept: operators.Kept,
    ids: Ids | None, strict: bool, dy: Tensor, dstate: Tensor, slopes: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor]:  # fmt: skip
    from kernels.linear import triton_run

    dq, dk, dv, found, dstate = triton_run.backward(
        q, k, v, log_decay, kept.states, ids, strict, dy, dstate, slopes
    )
    return dq, dk, dv, found, None, dstate


def _chunk(time: int) -> int:
    from kernels.linear import triton_tiles

    return triton_tiles.CHUNK


_causal_sum = operators.causal_sum("linear_attention", _forward, _backward, _chunk)
