"""Mamba's selective scan by its definition: the recurrence token by token, right in float64."""

from __future__ import annotations

import torch
from torch import Tensor


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
    """Arguments and results as in `scan.selective_scan`; dt, a, d and state of one dtype, the widest.

    Args:
        dt: 0 at pads, and so are x and b.
        fresh: [B, T] bool: what came before this token is forgotten; None: nowhere.
    """
    wide = state.dtype
    rows = []
    for t in range(x.shape[1]):
        x_t, dt_t, b_t, c_t = x[:, t].to(wide), dt[:, t], b[:, t].to(wide), c[:, t].to(wide)
        decay = torch.exp(dt_t[..., None] * a)
        if fresh is not None:
            decay = decay.masked_fill(fresh[:, t, None, None], 0)
        state = decay * state + (dt_t * x_t)[..., None] * b_t[:, None]
        y_t = torch.einsum("bdn,bn->bd", state, c_t)
        rows.append(y_t if d is None else y_t + d * x_t)
    y = torch.stack(rows, 1) if rows else torch.zeros_like(x)
    return y.to(x.dtype), state
