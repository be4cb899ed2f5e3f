"""Linear attention in chunks: dense products inside a chunk, one state a chunk between them.

Shapes here: P = batch x heads, n chunks of C tokens. The decay is masked before it is exponentiated, so that nothing
overflows.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import pad

CHUNK = 64


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
    """As `reference.linear_attention`."""
    dtype, wide = v.dtype, torch.promote_types(q.dtype, torch.float32)
    q, k, v = q.to(wide), k.to(wide), v.to(wide)
    if documents is not None:
        pads = (documents == 0)[:, :, None, None]
        q, k, v = (x.masked_fill(pads, 0) for x in (q, k, v))
    if normalise:
        # The normaliser is one more value column of ones; pads already have k = 0.
        v = torch.cat([v, torch.ones_like(v[..., :1])], -1)
    if causal:
        assert kv is not None
        state = kv if z is None else torch.cat([kv, z[..., None]], -1)
        y, state = _causal(q, k, v, log_decay, state, documents, document, alone=alone)
        kv, z = (state[..., :-1], state[..., -1]) if normalise else (state, None)
    else:
        y, kv, z = _bidirectional(q, k, v, documents), None, None
    if normalise:
        y, total = y[..., :-1], y[..., -1:]
        y = y / total.masked_fill(total == 0, 1)
    return y.to(dtype), kv, z


def _bidirectional(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
    if documents is None or not documents.shape[1]:
        return torch.einsum("bthk,bhkv->bthv", q, torch.einsum("bshk,bshv->bhkv", k, v))
    empty = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3])
    first, last = documents[:, 0], documents[:, -1]
    before = _causal(q, k, v, None, empty, documents, first)[0]
    # The tokens after: the same sum on the reversed row, the token itself left out. Pads lead there, with k = 0.
    q, k, v, documents = (x.flip(1) for x in (q, k, v, documents))
    after = _causal(q, k, v, None, empty, documents, last, diagonal=-1)[0]
    return before + after.flip(1)


def _causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    state: Tensor,
    documents: Tensor | None,
    document: Tensor | None,
    diagonal: int = 0,
    alone: bool = False,
) -> tuple[Tensor, Tensor]:
    """Sum over the visible past: y [B, T, H, V] and the state [B, H, K, V] after the last token."""
    batch, time, heads, _width = q.shape
    if 0 in q.shape:
        return v.new_zeros(v.shape), state
    size = min(CHUNK, time)
    q, k, v = (rearrange(_fill(x, size), "b (n c) h d -> (b h) n c d", c=size) for x in (q, k, v))
    chunks = q.shape[1]
    ids = None if documents is None or document is None else _document_chunks(documents, document, size, heads)
    steps = None if log_decay is None else _decay_chunks(log_decay, documents, batch, time, size, heads)

    weights = q @ k.transpose(-1, -2)
    causal = torch.ones(size, size, dtype=torch.bool, device=q.device).tril(diagonal)
    between = None if steps is None else _between(steps)
    if between is not None:
        weights = weights * between.masked_fill(~causal, float("-inf")).exp()
    seen = causal if ids is None else causal & (ids[0][..., :, None] == ids[0][..., None, :])
    y = weights.masked_fill(~seen, 0) @ v
    if alone and chunks == 1:
        return rearrange(y, "(b h) 1 c d -> b c h d", b=batch)[:, :time], state

    # What each chunk adds to the state, and how much of the state before it is left after it.
    keys, queries, keep = k, q, None
    if steps is not None and between is not None:
        keys = k * between[..., -1, :].exp()[..., None]
        queries = q * steps.cumsum(-1).exp()[..., None]
        keep = steps.sum(-1).exp()
    if ids is not None:
        now, before, after = ids
        keys = keys.masked_fill((now != after[..., None])[..., None], 0)
        queries = queries.masked_fill((now != before[..., None])[..., None], 0)
        same = (before == after).to(q.dtype)
        keep = same if keep is None else keep * same
    state = rearrange(state, "b h k v -> (b h) k v")
    states, state = _scan(keys.transpose(-1, -2) @ v, keep, state.to(q.dtype))
    y = y + queries @ states
    y = rearrange(y, "(b h) n c d -> b (n c) h d", b=batch, n=chunks)[:, :time]
    return y, rearrange(state, "(b h) k v -> b h k v", b=batch)


def _scan(added: Tensor, keep: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
    """States before each chunk [P, n, K, V] and after the last, from what each adds [P, n, K, V] and keeps [P, n]."""
    states = [state]
    # unbind, not indexing: a slice in a loop makes the backward pass quadratic.
    kept = [None] * added.shape[1] if keep is None else keep[..., None, None].unbind(1)
    for new, share in zip(added.unbind(1), kept, strict=True):
        states.append(states[-1] + new if share is None else torch.addcmul(new, share, states[-1]))
    return torch.stack(states[:-1], 1), states[-1]


def _fill(x: Tensor, size: int) -> Tensor:
    """Zeros at the end of the time axis, up to whole chunks: they add nothing to the state."""
    return pad(x, (0, 0, 0, 0, 0, -x.shape[1] % size))


def _document_chunks(documents: Tensor, document: Tensor, size: int, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ids [P, n, C], pads taken as part of the document before them; the id before and after each chunk [P, n]."""
    # Documents are contiguous, so the latest real token's index says the id at a pad.
    index = torch.arange(1, documents.shape[1] + 1, device=documents.device)
    latest = torch.where(documents > 0, index, 0).cummax(1).values
    ids = torch.cat([document[:, None].to(documents.dtype), documents], 1).gather(1, latest)
    ids = torch.cat([ids, ids[:, -1:].expand(-1, -ids.shape[1] % size)], 1)
    ids = rearrange(ids, "b (n c) -> b n c", c=size).repeat_interleave(heads, 0)
    after = ids[..., -1]
    before = torch.cat([document[:, None].to(ids.dtype).repeat_interleave(heads, 0), after[:, :-1]], 1)
    return ids, before, after


def _decay_chunks(log_decay: Tensor, documents: Tensor | None, batch: int, time: int, size: int, heads: int) -> Tensor:
    """Log-decay of each token [P, n, C]; pads do not decay."""
    full = log_decay.expand(batch, time, heads)
    if documents is not None:
        full = full.masked_fill((documents == 0)[..., None], 0)
    full = pad(full, (0, 0, 0, -time % size))
    return rearrange(full, "b (n c) h -> (b h) n c", c=size)


def _between(steps: Tensor) -> Tensor:
    """Log-decay from token j to token i >= j of a chunk, [P, n, C] -> [P, n, C (i), C (j)].

    Summed for each j alone: a difference of two sums from the chunk's start loses all digits behind a strong decay.
    """
    size = steps.shape[-1]
    after = torch.ones(size, size, dtype=torch.bool, device=steps.device).tril(-1)
    return steps[..., :, None].expand(*steps.shape, size).masked_fill(~after, 0).cumsum(-2)
