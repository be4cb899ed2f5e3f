"""The state space of Mamba-2 by its definition: the recurrence token by token, right in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def ssd(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    state: Tensor,
    documents: Tensor | None,
    document: Tensor | None,
    alone: bool = False,
) -> tuple[Tensor, Tensor]:
    """Arguments and results as in `ssd.ssd` without the skip `d`, y of the state's dtype; the state is filled in.

    `alone`: there is no state before the row and none is wanted after it; the definition does not care.
    """
    wide, share = state.dtype, x.shape[2] // b.shape[2]
    rows = []
    for t in range(x.shape[1]):
        x_t, dt_t = x[:, t].to(wide), dt[:, t].to(wide)
        # Head h reads group h // (H / G).
        b_t, c_t = (g[:, t].to(wide).repeat_interleave(share, 1) for g in (b, c))
        if documents is not None and document is not None:
            now = documents[:, t]
            real = now > 0
            state = torch.where((real & (now != document))[:, None, None, None], 0, state)
            document = torch.where(real, now, document)
            dt_t = torch.where(real[:, None], dt_t, 0)
            x_t, b_t = (torch.where(real[:, None, None], t, 0) for t in (x_t, b_t))
        keep = (dt_t * a.to(wide)).exp()
        state = keep[..., None, None] * state + torch.einsum("bh,bhp,bhn->bhpn", dt_t, x_t, b_t)
        y_t = torch.einsum("bhpn,bhn->bhp", state, c_t)
        rows.append(y_t if documents is None else torch.where(real[:, None, None], y_t, 0))
    return torch.stack(rows, 1) if rows else x.new_zeros(x.shape, dtype=wide), state
