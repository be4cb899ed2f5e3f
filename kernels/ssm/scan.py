"""Mamba's selective scan: the public op, its checks and its FLOP formula."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import backend, flops
from kernels.linear.op import check_wide
from kernels.ssm import dispatch, fused, scan_portable, scan_reference

IMPLEMENTATIONS = {
    "triton": dispatch.selective_scan,
    "portable": scan_portable.selective_scan,
    "reference": scan_reference.selective_scan,
    "mamba_ssm": fused.selective_scan,
}


def selective_scan(
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
) -> tuple[Tensor, Tensor | None]:
    """A diagonal state-space model a channel, with a step size, an input and an output map of each token's own.

    h_t = exp(dt_t a) h_{t-1} + dt_t x_t b_t and y_t = h_t c_t + d x_t, for every channel and state entry.

    Args:
        x: [B, T, D]; b, c: [B, T, N], one floating dtype.
        dt: [B, T, D] steps, at least 0 (after the softplus), fp32 or wider.
        a: [D, N], below 0; d: [D]; both fp32 or wider. Signs are not looked at, which would wait for the device: where
            dt a is above 0, the state grows.
        state: h before the first token, [B, D, N], fp32 or wider; None: zero.
        documents: [B, T] integers, contiguous, trailing zeros are padding; None: each row goes on with one document.
        document: [B], the document that the state belongs to (0: none); needed with `documents` and a state.
        return_state: False: the state after the last token is not wanted, and None.
    Returns:
        y [B, T, D] of x's dtype, 0 at pads; h after the last token [B, D, N].
    Raises:
        ValueError: shapes or dtypes that do not fit.
    Source: Gu and Dao 2023, arXiv:2312.00752, equations 2 and 4 with section 3.2; as in their code, b is multiplied by
        dt where equation 4 has (dt a)^-1 (exp(dt a) - 1) dt.
    """
    _check(x, dt, a, b, c, d, state, documents, document)
    wide = torch.promote_types(x.dtype, dt.dtype)
    fused_refusal = fused.scan_refusal(x, a.shape[1], state is not None, documents, return_state)
    if state is None:
        state = x.new_zeros(*x.shape[::2], a.shape[1], dtype=wide)
    if count := flops.counter():
        count.record("selective_scan", selective_scan_flops(x.shape, a.shape[1]))
        return torch.empty_like(x), state if return_state else None
    fresh = pads = None
    if documents is not None:
        fresh, pads = _starts(documents, document), (documents == 0)[..., None]
        # A step of 0 keeps the state as it is, and takes nothing in.
        x, dt, b = (t.masked_fill(pads, 0) for t in (x, dt, b))
    refusal = dispatch.refusal(x, wide, a.shape[1])
    run = backend.implementation("selective_scan", IMPLEMENTATIONS, x, refusal, fused_refusal)
    with backend.no_autocast(x):
        y, state = run(x, dt.to(wide), a.to(wide), b, c, None if d is None else d.to(wide), state.to(wide), fresh)
    return y if pads is None else y.masked_fill(pads, 0), state if return_state else None


def selective_scan_flops(x: tuple[int, ...], state: int) -> flops.Formula:
    """The recurrence: a multiply-add an entry of the state to update it, one to read it (decays are elementwise)."""
    batch, time, width = x
    return flops.Formula.of("2 * B*T*D * 2*N", B=batch, T=time, D=width, N=state)


def _starts(documents: Tensor, document: Tensor | None) -> Tensor:
    """[B, T]: does another document start at this token? Pads start none."""
    before = documents.new_zeros(len(documents)) if document is None else document.to(documents.dtype)
    previous = torch.cat([before[:, None], documents[:, :-1]], 1)[:, : documents.shape[1]]
    return (documents > 0) & (documents != previous)


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
    if x.dim() != 3 or a.dim() != 2:
        raise ValueError(f"selective_scan wants x [B, T, D] and a [D, N]; got {list(x.shape)} and {list(a.shape)}")
    batch, time, width = x.shape
    wanted: dict[str, tuple[Tensor | None, tuple[int, ...]]] = {
        "dt": (dt, (batch, time, width)),
        "a": (a, (width, a.shape[1])),
        "b": (b, (batch, time, a.shape[1])),
        "c": (c, (batch, time, a.shape[1])),
        "d": (d, (width,)),
        "state": (state, (batch, width, a.shape[1])),
        "documents": (documents, (batch, time)),
        "document": (document, (batch,)),
    }
    for name, (tensor, shape) in wanted.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must have shape {list(shape)}; got {list(tensor.shape)}")
    if not x.dtype == b.dtype == c.dtype or not x.is_floating_point():
        raise ValueError(f"x, b, c must have one floating dtype; got {x.dtype}, {b.dtype}, {c.dtype}")
    check_wide(x, dt=dt, a=a, d=d, state=state)
    if documents is not None and state is not None and document is None:
        raise ValueError("a state with `documents` needs `document`, the id that the state belongs to")
