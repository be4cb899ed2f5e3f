"""Softmax attention: the public op, its checks and its FLOP formula."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from kernels import backend, flops
from kernels.attention import dispatch, portable, reference

IMPLEMENTATIONS = {"triton": dispatch.attention, "portable": portable.attention, "reference": reference.attention}


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
    q_documents: Tensor | None = None,
    k_documents: Tensor | None = None,
    dropout: float = 0.0,
    return_lse: bool = False,
) -> Tensor | Any:
    """Softmax attention with H query heads over G key/value heads; query head h reads key head h // (H / G).

    A key is visible to a query iff both are of one document (id 0 is padding and sees and shows nothing) and, with
    d = query position - key position: causal 0 <= d < window; not causal |d| < window. Without positions the two ends
    are aligned: query i stands at S - T + i. A query that sees nothing gets 0, with finite gradients.

    Args:
        q: [B, T, H, K]; k: [B, S, G, K]; v: [B, S, G, V]; one floating dtype, one device.
        window: keys that a query sees on its left, itself included (both sides when not causal); None: all.
        scale: factor of the scores, above 0; None: 1 / sqrt(K).
        softcap: scores become softcap * tanh(score / softcap).
        alibi_slopes: [H]; slope * |d| is taken from each score (Press et al. 2022, arXiv:2108.12409).
        sinks: [H] learned logits that take part in the softmax and give nothing (gpt-oss).
        q_positions, k_positions: [B, T], [B, S] integers; both or neither.
        q_documents, k_documents: [B, T], [B, S] integers; a missing side belongs to every document.
        dropout: share of attention weights dropped.
        return_lse: give the log-sum-exp of each query's scores too; -inf where nothing is visible.
    Returns:
        [B, T, H, V] of q's dtype, and [B, T, H] with `return_lse`.
    Raises:
        ValueError: shapes, dtypes, devices or options that do not fit.
    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.2; grouped heads: Ainslie et al. 2023, arXiv:2305.13245.
    """
    extras: dict[str, Any] = dict(
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        q_positions=q_positions,
        k_positions=k_positions,
        q_documents=q_documents,
        k_documents=k_documents,
    )
    _check(q, k, v, window=window, scale=scale, softcap=softcap, dropout=dropout, **extras)
    if count := flops.counter():
        count.record("attention", attention_flops(q.shape, k.shape, v.shape, causal, window))
        count.attention_bytes += moved_bytes(q.shape, k.shape, v.shape, q.element_size())
        count.score_bytes += score_bytes(q.shape, k.shape, q.element_size())
        y, lse = q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3])
        return (y, lse) if return_lse else y
    run = backend.implementation("attention", IMPLEMENTATIONS, q, dispatch.refusal(q, v, dropout))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    options: dict[str, Any] = dict(causal=causal, window=window, scale=scale, softcap=softcap, dropout=dropout)
    with backend.no_autocast(q):
        y, lse = run(q, k, v, **options, **extras, lse=return_lse)
    return (y, lse) if return_lse else y


def attention_flops(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], causal: bool, window: int | None
) -> flops.Formula:
    """Scores and sums of the visible pairs, for shapes as in `attention`, ends aligned, one document a row."""
    batch, queries, heads, width = q
    pairs = visible_pairs(queries, k[1], causal, window)
    return flops.Formula.of(
        "2 * B*H*(K+V) * visible_pairs", B=batch, H=heads, K=width, V=v[3], visible_pairs=pairs
    )


def moved_bytes(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], element_size: int) -> int:
    """The least traffic with device memory, for shapes as in `attention`: q, k and v are read once, y is written."""
    y = (*q[:3], v[3])
    return element_size * sum(math.prod(shape) for shape in (q, k, v, y))


def score_bytes(q: tuple[int, ...], k: tuple[int, ...], element_size: int) -> int:
    """The score matrix of every query head, T x S: what a naive implementation writes and a fused kernel does not."""
    return element_size * math.prod(q[:3]) * k[1]


def visible_pairs(queries: int, keys: int, causal: bool = True, window: int | None = None) -> int:
    """Pairs (query, key) that are attended to when the ends are aligned: the sum over the mask, in closed form."""
    first = keys - queries
    left = keys + queries if window is None else window
    after = 1 if causal else left
    # min(max(x, 0), keys) keys stand below position x; a query at p sees those in [p - left + 1, p + after).
    return (
        _ramp(keys - 1 + after, keys)
        - _ramp(first - 1 + after, keys)
        - _ramp(keys - left, keys)
        + _ramp(first - left, keys)
    )


def _ramp(top: int, limit: int) -> int:
    """Sum of min(max(x, 0), limit) over all integers x <= top."""
    low = min(max(top, 0), limit)
    return low * (low + 1) // 2 + max(top - limit, 0) * limit


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int | None,
    scale: float | None,
    softcap: float | None,
    dropout: float,
    **extras: Tensor | None,
) -> None:
    if (
        not q.dim() == k.dim() == v.dim() == 4
        or q.shape[0] != k.shape[0]
        or k.shape[:3] != v.shape[:3]
        or (q.shape[3] != k.shape[3])
    ):
        raise ValueError(
            "attention wants q [B, T, H, K], k [B, S, G, K], v [B, S, G, V]; got "
            f"{list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        )
    if not k.shape[2] or q.shape[2] % k.shape[2]:
        raise ValueError(f"H={q.shape[2]} query heads must be a multiple of G={k.shape[2]} key/value heads")
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise ValueError(f"q, k, v must have one floating dtype; got {q.dtype}, {k.dtype}, {v.dtype}")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k, v must be on one device; got {q.device}, {k.device}, {v.device}")
    if not q.shape[3]:
        raise ValueError("q and k have K=0 channels; K must be at least 1")
    if window is not None and (isinstance(window, (bool, float)) or window < 1):
        raise ValueError(f"window={window} must be a whole number of at least 1")
    for option, value in (("scale", scale), ("softcap", softcap)):
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{option}={value} must be above 0 and finite")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout={dropout} must be at least 0 and below 1")
    if (extras["q_positions"] is None) != (extras["k_positions"] is None):
        raise ValueError("give q_positions and k_positions together")
    for name, tensor in extras.items():
        wanted = (q.shape[2],) if name in ("alibi_slopes", "sinks") else (q if name.startswith("q") else k).shape[:2]
        if tensor is None:
            continue
        if tuple(tensor.shape) != tuple(wanted):
            raise ValueError(f"{name} must have shape {list(wanted)}; got {list(tensor.shape)}")
        if tensor.is_floating_point() != (len(wanted) == 1):
            raise ValueError(f"{name} must be {'floating' if len(wanted) == 1 else 'integers'}; got {tensor.dtype}")
        if tensor.device != q.device:
            raise ValueError(f"{name} must be on the device of q, {q.device}; got {tensor.device}")
