"""What chunked implementations share: pads, documents, the normaliser and both directions around one causal sum.

`CausalSum` is what an implementation brings; see `portable.causal_sum`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Ids:
    """The document of each token [B, T], pads taken as part of the one before them, and the state's document [B]."""

    row: Tensor
    before: Tensor

    @classmethod
    def of(cls, documents: Tensor, document: Tensor) -> Ids:
        """Documents are contiguous, so the latest real token says the id at a pad."""
        index = torch.arange(1, documents.shape[1] + 1, device=documents.device)
        latest = torch.where(documents > 0, index, 0).cummax(1).values
        before = document.to(documents.dtype)
        return cls(torch.cat([before[:, None], documents], 1).gather(1, latest), before)


# (q, k, v, log_decay, gain, state, ids, strict) -> y, state; values are times gain; strict leaves out the token itself.
CausalSum = Callable[
    [Tensor, Tensor, Tensor, "Tensor | None", "Tensor | None", Tensor, "Ids | None", bool], tuple[Tensor, Tensor]
]


def attend(
    causal_sum: CausalSum,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    normalise: bool,
    log_decay: Tensor | None,
    kv: Tensor | None,
    z: Tensor | None,
    documents: Tensor | None,
    document: Tensor | None,
    gain: Tensor | None = None,
    apart: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """As `reference.linear_attention`, out of causal sums; without a state `kv`, both ways.

    gain: [B, T, H] of each value, where they are causal and not normalised.
    apart: the normaliser is a sum of its own, where one more value column would be a tile of its own.
    """
    dtype = v.dtype if gain is None else torch.promote_types(v.dtype, gain.dtype)
    pads = None if documents is None else (documents == 0)[:, :, None, None]
    if pads is not None:
        q, k, v = (x.masked_fill(pads, 0) for x in (q, k, v))
        if log_decay is not None:
            log_decay = log_decay.expand(v.shape[:3]).masked_fill(pads[..., 0], 0)
        gain = None if gain is None else gain.masked_fill(pads[..., 0], 0)
    ids = None if documents is None or document is None else Ids.of(documents, document)

    def summed(values: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if state is None:
            return _bidirectional(causal_sum, q, k, values, documents), None
        return causal_sum(q, k, values, log_decay, gain, state, ids, False)

    # The normaliser is the sum of ones; pads already have k = 0.
    ones = torch.ones_like(v[..., :1])
    if not normalise:
        y, kv = summed(v, kv)
        return y.to(dtype), kv, None
    if apart:
        y, kv = summed(v, kv)
        total, norm = summed(ones, z if z is None else z[..., None])
    else:
        state = None if kv is None or z is None else torch.cat([kv, z[..., None]], -1)
        both, state = summed(torch.cat([v, ones], -1), state)
        y, total = both.split([v.shape[3], 1], -1)
        kv, norm = (None, None) if state is None else state.split([v.shape[3], 1], -1)
    y = y / total.masked_fill(total == 0, 1)
    return y.to(dtype), kv, None if norm is None else norm[..., 0]


def _bidirectional(causal_sum: CausalSum, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    if documents is None or not documents.numel():
        q, k, v = (x.to(wide) for x in (q, k, v))
        k, q = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (k, q))
        return torch.einsum("bthk,bhkv->bthv", q, torch.einsum("bshk,bshv->bhkv", k, v))
    empty = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3], dtype=wide)
    before, _ = causal_sum(q, k, v, None, None, empty, Ids.of(documents, documents[:, 0]), False)
    # The tokens after: the same sum on the reversed row, the token itself left out. Pads lead there, with k = 0.
    q, k, v, documents = (x.flip(1) for x in (q, k, v, documents))
    after, _ = causal_sum(q, k, v, None, None, empty, Ids.of(documents, documents[:, -1]), True)
    return before + after.flip(1)
