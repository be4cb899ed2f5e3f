"""Additive attention: the public op, its checks and its FLOP formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from kernels import backend, flops
from kernels.additive import dispatch, portable, reference
from kernels.attention.op import moved_bytes, score_bytes, visible_pairs

IMPLEMENTATIONS: dict[str, Callable[..., Tensor]] = {
    "triton": dispatch.attention,
    "portable": portable.attention,
    "reference": reference.attention,
}

Tanh = Literal["exact", "approximate"]


def additive_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
    q_documents: Tensor | None = None,
    k_documents: Tensor | None = None,
    tanh: Tanh = "exact",
) -> Tensor:
    """Attention whose scores are a small network of query and key: weight . tanh(q_i + k_j + bias), a head.

    Which keys a query sees is as in `kernels.attention.op.attention`: without positions the two ends are aligned, a
    document of id 0 is padding, and a query that sees nothing gets 0, with finite gradients.

    Args:
        q: [B, T, H, A]; k: [B, S, H, A], queries and keys after their projections; v: [B, S, H, V]; one floating dtype.
        weight: [H, A], v_a of the paper; bias: [H, A].
        window: keys that a query sees on its left, itself included (both sides when not causal); None: all.
        q_positions, k_positions: [B, T], [B, S] integers; both or neither.
        q_documents, k_documents: [B, T], [B, S] integers; a missing side belongs to every document.
        tanh: "approximate" is one instruction of NVIDIA's GPUs, off by up to 5e-4: Triton kernels alone have it.
    Returns:
        [B, T, H, V] of q's dtype.
    Raises:
        ValueError: shapes, dtypes, devices or options that do not fit.
    Source: Bahdanau et al. 2014, arXiv:1409.0473, appendix A.1.2.
    """
    places = dict(
        q_positions=q_positions, k_positions=k_positions, q_documents=q_documents, k_documents=k_documents
    )
    _check(q, k, v, weight, bias, window, tanh)
    _check_places(q, k, **places)
    if count := flops.counter():
        count.record("additive_attention", additive_flops(q.shape, k.shape, v.shape, causal, window))
        count.attention_bytes += moved_bytes(q.shape, k.shape, v.shape, q.element_size())
        count.score_bytes += score_bytes(q.shape, k.shape, q.element_size())
        return q.new_empty(*q.shape[:3], v.shape[3])
    run = backend.implementation("additive_attention", IMPLEMENTATIONS, q, dispatch.refusal(q, v))
    options: dict[str, Any] = {}
    if run is dispatch.attention:
        options["approximate"] = tanh == "approximate"
    if tanh == "approximate" and (not options or q.device.type != "cuda" or torch.version.hip):
        raise ValueError(
            "tanh='approximate' is an instruction of NVIDIA's GPUs, which the Triton kernels alone have; here runs "
            f"{run.__module__} on {q.device.type}"
        )
    if bias is not None:
        q = q + bias.to(q.dtype)
    with backend.no_autocast(q):
        return run(q, k, v, weight, causal=causal, window=window, **places, **options)


def additive_flops(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], causal: bool, window: int | None
) -> flops.Formula:
    """An add, a tanh and a multiply-add a channel of each visible pair, and the sum of its values."""
    batch, queries, heads, width = q
    pairs = visible_pairs(queries, k[1], causal, window)
    return flops.Formula.of(
        "(4*A + 2*V) * B*H * visible_pairs", A=width, V=v[3], B=batch, H=heads, visible_pairs=pairs
    )


def _check(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, bias: Tensor | None, window: int | None, tanh: str
) -> None:
    if (
        not q.dim() == k.dim() == v.dim() == 4
        or (q.shape[0], *q.shape[2:]) != (k.shape[0], *k.shape[2:])
        or k.shape[:3] != v.shape[:3]
    ):
        raise ValueError(
            "additive_attention wants q [B, T, H, A], k [B, S, H, A], v [B, S, H, V]; got "
            f"{list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        )
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise ValueError(f"q, k, v must have one floating dtype; got {q.dtype}, {k.dtype}, {v.dtype}")
    if not q.shape[3]:
        raise ValueError("q and k have A=0 channels; A must be at least 1")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and (tensor.shape != q.shape[2:] or not tensor.is_floating_point()):
            raise ValueError(f"{name} must be floating [H, A] = {list(q.shape[2:])}; got {list(tensor.shape)}")
    devices = [str(t.device) for t in (q, k, v, weight)]
    if len(set(devices)) > 1:
        raise ValueError(f"q, k, v, weight must be on one device; got {', '.join(devices)}")
    if window is not None and (isinstance(window, (bool, float)) or window < 1):
        raise ValueError(f"window={window} must be a whole number of at least 1")
    if tanh not in ("exact", "approximate"):
        raise ValueError(f"tanh={tanh!r} is unknown; allowed: exact, approximate")


def _check_places(q: Tensor, k: Tensor, **places: Tensor | None) -> None:
    if (places["q_positions"] is None) != (places["k_positions"] is None):
        raise ValueError("give q_positions and k_positions together")
    for name, tensor in places.items():
        wanted = (q if name.startswith("q") else k).shape[:2]
        if tensor is not None and (tensor.shape != wanted or tensor.is_floating_point()):
            raise ValueError(f"{name} must be integers {list(wanted)}; got {tensor.dtype} {list(tensor.shape)}")
