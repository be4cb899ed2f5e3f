"""Softmax attention by its definition: one dense score matrix, right in float64."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor


def visible(
    queries: int,
    keys: int,
    *,
    causal: bool,
    window: int | None,
    q_positions: Tensor | None,
    k_positions: Tensor | None,
    q_documents: Tensor | None,
    k_documents: Tensor | None,
    device: torch.device,
) -> Tensor | None:
    """Which pairs are attended to: [1 or B, T, S] bool, or None where every pair is.

    Positions are aligned at the end when not given. A None side of the documents belongs to every document.
    """
    parts = []
    if causal or window is not None:
        distance = distances(queries, keys, q_positions, k_positions, device)
        if causal:
            parts.append(distance >= 0)
        if window is not None:
            parts.append((distance if causal else distance.abs()) < window)
    if q_documents is not None:
        parts.append((q_documents > 0)[:, :, None])
    if k_documents is not None:
        parts.append((k_documents > 0)[:, None, :])
    if q_documents is not None and k_documents is not None:
        parts.append(q_documents[:, :, None] == k_documents[:, None, :])
    return reduce(torch.logical_and, parts).expand(-1, queries, keys) if parts else None


def distances(
    queries: int, keys: int, q_positions: Tensor | None, k_positions: Tensor | None, device: torch.device
) -> Tensor:
    """Query position minus key position, [1 or B, T, S]."""
    if q_positions is None:
        q_positions = torch.arange(keys - queries, keys, device=device)[None]
    if k_positions is None:
        k_positions = torch.arange(keys, device=device)[None]
    return q_positions[:, :, None].to(torch.int64) - k_positions[:, None, :].to(torch.int64)


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
    dropout: float,
    lse: bool = True,
) -> tuple[Tensor, Tensor]:
    """[B, T, H, V] and the log-sum-exp of the scores [B, T, H] (always); arguments as in `op.attention`."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("bthk,bshk->bhts", q, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        distance = distances(q.shape[1], k.shape[1], q_positions, k_positions, q.device)
        scores = scores - alibi_slopes[:, None, None].to(scores.dtype) * distance.abs()[:, None].to(scores.dtype)
    seen = visible(
        q.shape[1],
        k.shape[1],
        causal=causal,
        window=window,
        q_positions=q_positions,
        k_positions=k_positions,
        q_documents=q_documents,
        k_documents=k_documents,
        device=q.device,
    )
    if seen is not None:
        scores = scores.masked_fill(~seen[:, None], float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].to(scores.dtype).expand(*scores.shape[:3], 1)], -1)
    # The maximum only keeps exp in range, so no gradient needs to pass it; finite in rows that see nothing.
    top = scores.detach().amax(-1, keepdim=True) if scores.shape[-1] else scores.new_zeros(*scores.shape[:3], 1)
    top = top.masked_fill(top == float("-inf"), 0)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    probabilities = weights / total.masked_fill(total == 0, 1)
    if sinks is not None:
        probabilities = probabilities[..., :-1]
    probabilities = torch.nn.functional.dropout(probabilities, dropout)
    y = torch.einsum("bhts,bshv->bthv", probabilities, v)
    empty = total == 0
    log_total = (top + total.masked_fill(empty, 1).log()).masked_fill(empty, float("-inf"))
    return y, log_total.squeeze(-1).transpose(1, 2)
