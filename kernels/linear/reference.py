"""Linear attention by its definition: the recurrence token by token, right in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    normalise: bool,
    log_decay: Tensor | None,
    kv: Tensor | None,
    z: Tensor | None,
    documents: Tensor | None,
    document: Tensor | None,
    alone: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Arguments and results as in `op.linear_attention`, the state filled in (kv, z, document) by the op.

    `alone`: there is no state before the row and none is wanted after it; the definition does not care.
    """
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    if not causal:
        return _bidirectional(q, k, v, normalise, documents), None, None
    assert kv is not None
    wide = kv.dtype
    rows = []
    for t in range(q.shape[1]):
        q_t, k_t, v_t = q[:, t].to(wide), k[:, t].to(wide), v[:, t].to(wide)
        decay = torch.ones(*kv.shape[:2], dtype=wide, device=kv.device)
        if log_decay is not None:
            decay = (log_decay.expand(q.shape[:3])[:, t]).to(wide).exp()
        if documents is not None and document is not None:
            now = documents[:, t]
            real = now > 0
            fresh = real & (now != document)
            decay = decay.masked_fill(~real[:, None], 1).masked_fill(fresh[:, None], 0)
            k_t, v_t = (x.masked_fill(~real[:, None, None], 0) for x in (k_t, v_t))
            document = torch.where(real, now, document)
        kv = decay[..., None, None] * kv + torch.einsum("bhk,bhv->bhkv", k_t, v_t)
        y_t = torch.einsum("bhk,bhkv->bhv", q_t, kv)
        if z is not None:
            z = decay[..., None] * z + k_t
            total = torch.einsum("bhk,bhk->bh", q_t, z)[..., None]
            y_t = y_t / total.masked_fill(total == 0, 1)
        if documents is not None:
            y_t = y_t.masked_fill(~real[:, None, None], 0)
        rows.append(y_t)
    y = torch.stack(rows, 1) if rows else v.new_zeros(v.shape)
    return y.to(v.dtype), kv, z


def _bidirectional(q: Tensor, k: Tensor, v: Tensor, normalise: bool, documents: Tensor | None) -> Tensor:
    """Every token of the document is visible: the dense sum over pairs."""
    wide = torch.promote_types(q.dtype, torch.float32)
    pairs = torch.einsum("bthk,bshk->bhts", q.to(wide), k.to(wide))
    if documents is not None:
        same = (documents[:, :, None] == documents[:, None, :]) & (documents > 0)[:, :, None]
        pairs = pairs.masked_fill(~same[:, None], 0)
    y = torch.einsum("bhts,bshv->bthv", pairs, v.to(wide))
    if normalise:
        total = pairs.sum(-1).transpose(1, 2)[..., None]
        y = y / total.masked_fill(total == 0, 1)
    return y.to(v.dtype)
