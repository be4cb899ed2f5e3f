"""The state space of Mamba-2 (state space duality): the public op, its checks and its FLOP formula."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kernels import backend, flops
from kernels.linear import dispatch, portable
from kernels.linear.op import check_wide
from kernels.ssm import fused, ssd_reference


def ssd(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    d: Tensor | None = None,
    state: Tensor | None = None,
    documents: Tensor | None = None,
    document: Tensor | None = None,
    return_state: bool = True,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Diagonal state space with one decay a head, which is linear attention with q = c, k = b, v = dt x.

    h_t = exp(dt_t a) h_{t-1} + dt_t x_t b_t^T and y_t = h_t c_t + d x_t.

    Args:
        x: [B, T, H, P] floating.
        dt: [B, T, H] step sizes, at least 0 (after their softplus), fp32 or wider.
        a: [H] below 0, fp32 or wider. Signs are not looked at, which would wait for the device: where dt a is above 0,
            the state grows.
        b, c: [B, T, G, N] of x's dtype; head h reads group h // (H / G).
        d: [H] or [H, P], the skip; None: none.
        state: h before the first token, [B, H, P, N], fp32 or wider; None: zero.
        documents: [B, T] integers, contiguous, trailing zeros are padding; None: each row goes on with one document.
        document: [B], the document that the state belongs to (0: none); needed with `documents` and a state.
        return_state: False saves the work of the state after the last token, which is then None.
        dtype: of y; None: x's, which in half precision may not hold what was summed in fp32.
    Returns:
        y [B, T, H, P]; h after the last token [B, H, P, N] (strides are free).
    Raises:
        ValueError: shapes or dtypes that do not fit.
    Source: Dao and Gu 2024, arXiv:2405.21060, equations 1, 2 and 16.
    """
    _check(x, dt, a, b, c, d, state, documents, document)
    wide = torch.promote_types(x.dtype, torch.float32)
    alone, dtype = state is None and not return_state, dtype or x.dtype
    if state is None:
        # As linear attention keeps it, [B, H, N, P].
        state = x.new_zeros(x.shape[0], x.shape[2], b.shape[3], x.shape[3], dtype=wide).transpose(2, 3)
    if documents is not None and document is None:
        document = documents.new_zeros(x.shape[0])
    if count := flops.counter():
        count.record("ssd", ssd_flops(x.shape, b.shape))
        return torch.empty_like(x, dtype=dtype), state if return_state else None
    refusal, fused_refusal = dispatch.refusal(x, dt, state), fused.ssd_refusal(x, documents)
    run = backend.implementation("ssd", IMPLEMENTATIONS, x, refusal, fused_refusal)
    with backend.no_autocast(x):
        y, state = run(x, dt, a, b, c, state=state, documents=documents, document=document, alone=alone)
        if d is not None:
            skip = x if documents is None else x.masked_fill((documents == 0)[:, :, None, None], 0)
            y = y + d.to(y.dtype).view(x.shape[2], -1) * skip
    return y.to(dtype), state if return_state else None


def _dual(
    linear_attention: Callable[..., tuple[Tensor, Tensor, None]],
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    state: Tensor,
    documents: Tensor | None,
    document: Tensor | None,
    alone: bool,
) -> tuple[Tensor, Tensor]:
    """The recurrence on an implementation of linear attention; its state is [B, H, N, P], a view of ours."""
    y, state, _ = linear_attention(
        c, b, x, causal=True, normalise=False, log_decay=dt * a, gain=dt.to(state.dtype), kv=state.mT, z=None,
        documents=documents, document=document, alone=alone,
    )  # fmt: skip
    return y, state.mT


IMPLEMENTATIONS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "triton": partial(_dual, dispatch.linear_attention),
    "portable": partial(_dual, portable.linear_attention),
    "reference": ssd_reference.ssd,
    "mamba_ssm": fused.ssd,
}


def ssd_flops(x: tuple[int, ...], b: tuple[int, ...]) -> flops.Formula:
    """The recurrence: a multiply-add an entry of the state to update it, one to read it."""
    batch, time, heads, width = x
    return flops.Formula.of("2 * B*T*H * 2*P*N", B=batch, T=time, H=heads, P=width, N=b[3])


def _check(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    state: Tensor | None,
    documents: Tensor | None,
    document: Tensor | None,
) -> None:
    if not x.dim() == b.dim() == 4 or b.shape != c.shape or x.shape[:2] != b.shape[:2]:
        raise ValueError(
            f"ssd wants x [B, T, H, P] and b, c [B, T, G, N]; got {list(x.shape)}, {list(b.shape)}, {list(c.shape)}"
        )
    if not b.shape[2] or x.shape[2] % b.shape[2]:
        raise ValueError(f"H={x.shape[2]} heads of x must be a multiple of G={b.shape[2]} groups of b and c")
    if not x.dtype == b.dtype == c.dtype or not x.is_floating_point():
        raise ValueError(f"x, b, c must have one floating dtype; got {x.dtype}, {b.dtype}, {c.dtype}")
    batch, time, heads, width = x.shape
    wanted: dict[str, tuple[Tensor | None, list[tuple[int, ...]]]] = {
        "dt": (dt, [(batch, time, heads)]),
        "a": (a, [(heads,)]),
        "d": (d, [(heads,), (heads, width)]),
        "state": (state, [(batch, heads, width, b.shape[3])]),
        "documents": (documents, [(batch, time)]),
        "document": (document, [(batch,)]),
    }
    for name, (tensor, shapes) in wanted.items():
        if tensor is not None and tuple(tensor.shape) not in shapes:
            raise ValueError(
                f"{name} must have shape {' or '.join(str(list(s)) for s in shapes)}; got {list(tensor.shape)}"
            )
    check_wide(x, dt=dt, a=a, state=state)
    if documents is not None and state is not None and document is None:
        raise ValueError("a state with `documents` needs `document`, the id that the state belongs to")
