"""Linear attention: the public op, its checks and its FLOP formula."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import backend, flops
from kernels.linear import dispatch, portable, reference

IMPLEMENTATIONS = {
    "triton": dispatch.linear_attention,
    "portable": portable.linear_attention,
    "reference": reference.linear_attention,
}


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    normalise: bool = True,
    log_decay: Tensor | None = None,
    kv: Tensor | None = None,
    z: Tensor | None = None,
    documents: Tensor | None = None,
    document: Tensor | None = None,
    return_state: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Attention without a softmax, over queries and keys that already went through their feature map.

    y_t = q_t S_t / (q_t . z_t) with S_t = a_t S_{t-1} + k_t v_t^T and z_t = a_t z_{t-1} + k_t, a_t = exp(log_decay_t);
    not causal: S and z sum over the whole document. A query with q . z = 0 gets the undivided sum.

    Args:
        q, k: [B, T, G, K]; v: [B, T, H, V]; one floating dtype. Head h reads group h // (H / G).
        normalise: divide by q . z. Only for feature maps that are not negative.
        log_decay: [H] or [B, T, H], at most 0; only when causal. Not looked at, which would wait for the device: above
            0, what was seen grows.
        kv, z: the state before the first token, [B, H, K, V] and [B, H, K], fp32 or wider; None: nothing was seen yet.
        documents: [B, T] integers, contiguous, trailing zeros are padding; None: each row goes on with one document.
        document: [B], the document that the state belongs to (0: none); needed with `documents` and a state.
        return_state: False saves the work of the state after the last token; both states are then None.
    Returns:
        y [B, T, H, V] of v's dtype; S after the last token [B, H, K, V]; z [B, H, K], None without `normalise`. Both
        states are None when not causal.
    Raises:
        ValueError: shapes, dtypes or options that do not fit.
    Source: Katharopoulos et al. 2020, arXiv:2006.16236, equations 9 to 12; decay: Sun et al. 2023, arXiv:2307.08621.
    """
    _check(q, k, v, causal, normalise, log_decay, kv, z, documents, document)
    batch, width, heads = q.shape[0], q.shape[3], v.shape[2]
    wide = torch.promote_types(q.dtype, torch.float32)
    alone = kv is None and not return_state
    if causal:
        kv = q.new_zeros(batch, heads, width, v.shape[3], dtype=wide) if kv is None else kv
        z = q.new_zeros(batch, heads, width, dtype=wide) if z is None and normalise else z
    if documents is not None and document is None:
        document = documents.new_zeros(batch)
    if count := flops.counter():
        count.record("linear_attention", linear_attention_flops(q.shape, v.shape, normalise))
        return torch.empty_like(v), kv if return_state else None, z if return_state else None
    run = backend.implementation("linear_attention", IMPLEMENTATIONS, q, dispatch.refusal(q, kv, z))
    with backend.no_autocast(q):
        y, kv, z = run(
            q, k, v, causal=causal, normalise=normalise, log_decay=log_decay, kv=kv, z=z if normalise else None,
            documents=documents, document=document, alone=alone,
        )  # fmt: skip
    return (y, kv, z) if return_state else (y, None, None)


def linear_attention_flops(q: tuple[int, ...], v: tuple[int, ...], normalise: bool) -> flops.Formula:
    """The recurrence: a multiply-add an entry of the state to update it, one to read it; K (V + 1) entries with z."""
    batch, time, heads, value_dim = v
    text = "2 * B*T*H * 2*K*(V+1)" if normalise else "2 * B*T*H * 2*K*V"
    return flops.Formula.of(text, B=batch, T=time, H=heads, K=q[3], V=value_dim)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    normalise: bool,
    log_decay: Tensor | None,
    kv: Tensor | None,
    z: Tensor | None,
    documents: Tensor | None,
    document: Tensor | None,
) -> None:
    if not q.dim() == v.dim() == 4 or q.shape != k.shape or q.shape[:2] != v.shape[:2]:
        raise ValueError(
            "linear_attention wants q, k [B, T, G, K] and v [B, T, H, V]; got "
            f"{list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        )
    if not q.shape[2] or v.shape[2] % q.shape[2]:
        raise ValueError(f"H={v.shape[2]} heads of v must be a multiple of G={q.shape[2]} groups of q and k")
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise ValueError(f"q, k, v must have one floating dtype; got {q.dtype}, {k.dtype}, {v.dtype}")
    if not causal and any(t is not None for t in (log_decay, kv, z)):
        raise ValueError("causal=False has no decay and no state: log_decay, kv and z must be None")
    batch, time, heads, value_dim = v.shape
    wanted: dict[str, tuple[Tensor | None, list[tuple[int, ...]]]] = {
        "log_decay": (log_decay, [(heads,), (batch, time, heads)]),
        "kv": (kv, [(batch, heads, q.shape[3], value_dim)]),
        "z": (z, [(batch, heads, q.shape[3])]),
        "documents": (documents, [(batch, time)]),
        "document": (document, [(batch,)]),
    }
    for name, (tensor, shapes) in wanted.items():
        if tensor is not None and tuple(tensor.shape) not in shapes:
            raise ValueError(
                f"{name} must have shape {' or '.join(str(list(s)) for s in shapes)}; got {list(tensor.shape)}"
            )
    check_wide(q, kv=kv, z=z)
    if documents is not None and kv is not None and document is None:
        raise ValueError("a state with `documents` needs `document`, the id that the state belongs to")
    if (z is not None) != (kv is not None and normalise):
        raise ValueError(
            f"a state is kv, and z beside it with normalise=True alone; got normalise={normalise}, "
            f"kv={'None' if kv is None else 'given'}, z={'None' if z is None else 'given'}"
        )


def check_wide(like: Tensor, **states: Tensor | None) -> None:
    """Raises ValueError for a state that is narrower than fp32 or than `like`."""
    wide = torch.promote_types(like.dtype, torch.float32)
    for name, state in states.items():
        if state is not None and torch.promote_types(state.dtype, wide) != state.dtype:
            raise ValueError(f"{name} must be of dtype {wide} or wider for inputs of {like.dtype}; got {state.dtype}")
