"""Key/value caches: what attention mixers remember.

Entries are head-major, [B, G, slots, K], which decode reads fastest. Without gradients they are written in place and
grow by doubling; with gradients every write makes a new tensor. `growing` keeps everything; `ring` keeps the last W
tokens, token p in slot p mod W. Both give the keys and values to attend to, with positions and documents where they are
needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mixers.base import State, take

# A position that no query reaches: the slot is empty.
_NEVER = 2**30


@dataclass(frozen=True)
class Attended:
    """Arguments of `attention`: k, v [B, S, G, K]; the rest [B, T] and [B, S], or None where nothing was packed.

    Attributes:
        all_visible: no mask is needed; the positions then only say how far apart tokens are.
        fresh: [B, S], which token of this piece a key is; 0 for those before it.
    """

    k: Tensor
    v: Tensor
    q_positions: Tensor | None = None
    k_positions: Tensor | None = None
    k_documents: Tensor | None = None
    fresh: Tensor | None = None
    all_visible: bool = False

    def places(self, time: int) -> tuple[Tensor, Tensor]:
        """Positions in the row of the piece's queries and of the keys, up to a common shift."""
        if self.q_positions is not None and self.k_positions is not None:
            return self.q_positions, self.k_positions
        index = torch.arange(self.k.shape[1], device=self.k.device)[None]
        return index[:, self.k.shape[1] - time :], index

    def mask(self, window: int | None, documents: Tensor | None, placed: bool = False) -> dict[str, Any]:
        """Who sees what, as an attention op takes it, for the piece's documents; `placed`: positions in any case."""
        placed = placed or not self.all_visible
        return dict(
            causal=not self.all_visible,
            window=None if self.all_visible else window,
            q_positions=self.q_positions if placed else None,
            k_positions=self.k_positions if placed else None,
            q_documents=documents,
            k_documents=self.k_documents,
        )


def empty(batch: int, heads: int, key_dim: int, value_dim: int, like: Tensor) -> dict[str, Tensor]:
    """A cache without tokens."""
    return {"k": like.new_zeros(batch, heads, 0, key_dim), "v": like.new_zeros(batch, heads, 0, value_dim)}


def growing(past: State, k: Tensor, v: Tensor, documents: Tensor | None) -> tuple[Attended, dict[str, Tensor]]:
    """Append k, v [B, T, G, K] behind each row's last real token."""
    batch, time = k.shape[:2]
    end = past.length + time
    new = {"k": k.transpose(1, 2), "v": v.transpose(1, 2)}
    if documents is None:
        kept = {name: _append(past[name], past.length, t) for name, t in new.items()}
        return Attended(_seen(kept["k"], end), _seen(kept["v"], end)), kept
    slots = past["filled"][:, None].to(torch.int64) + torch.arange(time, device=k.device)
    kept = {name: _scatter(past[name], end, slots, t) for name, t in new.items()}
    ids = _documents(past, batch, past.length, documents)
    kept["documents"] = _flat(_scatter(_headed(ids), end, slots, _headed(documents)))
    places = torch.arange(end, device=k.device).expand(batch, -1)
    fresh = (places - past["filled"][:, None]).clamp(0, max(time - 1, 0))
    seen = Attended(_seen(kept["k"], end), _seen(kept["v"], end), slots, places, kept["documents"][:, :end], fresh)
    return seen, kept


def ring(
    past: State, k: Tensor, v: Tensor, documents: Tensor | None, window: int
) -> tuple[Attended, dict[str, Tensor]]:
    """Keep the last `window` real tokens of each row; k, v [B, T, G, K] may be longer than that."""
    time, slots = k.shape[1], min(past.length + k.shape[1], window)
    new = {"k": k.transpose(1, 2), "v": v.transpose(1, 2)}
    if documents is not None:
        return _ragged_ring(past, new, documents, slots, window)
    if time == 1:
        kept = {name: _write(past[name], past.length, window, t) for name, t in new.items()}
        filled = torch.full((k.shape[0], 1), past.length + 1, device=k.device)
        places = filled - 1, _tokens(slots, filled, window, k.device)
        return Attended(_seen(kept["k"], slots), _seen(kept["v"], slots), *places, all_visible=True), kept
    # In the order of time, so that the ends are aligned.
    before = torch.arange(past.length - min(past.length, window - 1), past.length, device=k.device) % window
    old_k, old_v = (past[name].index_select(2, before) for name in ("k", "v"))
    seen = Attended(_behind(old_k, new["k"]), _behind(old_v, new["v"]))
    filled = torch.full((1, 1), past.length, device=k.device)
    return seen, {name: _roll(past[name], t, slots, filled, time, window) for name, t in new.items()}


def _ragged_ring(
    past: State, new: dict[str, Tensor], documents: Tensor, slots: int, window: int
) -> tuple[Attended, dict[str, Tensor]]:
    """`ring` where rows hold different numbers of tokens: positions say which slot holds what."""
    batch, time = documents.shape
    held = past["k"].shape[2]
    filled = past["filled"][:, None].to(torch.int64)
    q_positions = filled + torch.arange(time, device=documents.device)
    old = _tokens(held, filled, window, documents.device)
    k_positions = torch.cat([torch.where(old < 0, _NEVER, old), q_positions], 1)
    ids = _documents(past, batch, held, documents)
    k, v = (_behind(past[name], new[name]) for name in ("k", "v"))
    fresh = (torch.arange(held + time, device=documents.device) - held).clamp(min=0).expand(batch, -1)
    seen = Attended(k, v, q_positions, k_positions, torch.cat([ids, documents], 1), fresh)
    count = (documents > 0).sum(1, keepdim=True)
    kept = {name: _roll(past[name], t, slots, filled, count, window) for name, t in new.items()}
    return seen, kept | {"documents": _flat(_roll(_headed(ids), _headed(documents), slots, filled, count, window))}


def tail(past: Tensor, new: Tensor, documents: Tensor | None, past_documents: Tensor | None) -> dict[str, Tensor]:
    """The last W - 1 real inputs [B, W - 1, D] after `new` [B, T, D], and their documents."""
    width, inputs = past.shape[1], torch.cat([past.to(new.dtype), new], 1)
    if documents is None or past_documents is None:
        return {"tail": inputs[:, inputs.shape[1] - width :].clone()}
    last = (documents > 0).sum(1, keepdim=True) + torch.arange(width, device=new.device)
    return {"tail": take(inputs, last), "documents": take(torch.cat([past_documents, documents], 1), last)}


def tail_documents(past: State, documents: Tensor) -> Tensor:
    """The ids of a tail's inputs; what was fed before any packing is one document of id 1."""
    kept = past.get("documents")
    if kept is not None:
        return kept
    width = past["tail"].shape[1]
    ids = documents.new_zeros(documents.shape[0], width)
    ids[:, max(width - past.length, 0) :] = 1
    return ids


def _documents(past: State, batch: int, slots: int, like: Tensor) -> Tensor:
    """The ids of a cache's slots [B, slots]; what was fed before any packing is one document of id 1."""
    kept = past.get("documents")
    return like.new_ones(batch, slots) if kept is None else kept


def _headed(ids: Tensor) -> Tensor:
    """Ids [B, slots] in the shape of a cache."""
    return ids[:, None, :, None]


def _flat(cache: Tensor) -> Tensor:
    """What `_headed` did, undone."""
    return cache[:, 0, :, 0]


def _behind(old: Tensor, new: Tensor) -> Tensor:
    """Old entries, then new ones, time before heads."""
    return torch.cat([old.to(new.dtype), new], 2).transpose(1, 2)


def _in_place(cache: Tensor) -> bool:
    return not torch.is_grad_enabled() and cache.is_inference() == torch.is_inference_mode_enabled()


def _seen(cache: Tensor, slots: int) -> Tensor:
    """The filled part, time before heads."""
    return cache[:, :, :slots].transpose(1, 2)


def _room(cache: Tensor, filled: int, slots: int, like: Tensor, limit: int | None = None) -> Tensor:
    """The cache with at least that many slots: at least doubled when it must grow, but not past `limit`."""
    if cache.shape[2] >= slots and (filled or cache.dtype == like.dtype):
        return cache
    size = max(slots, 2 * cache.shape[2] if limit is None else min(2 * cache.shape[2], limit))
    # The first tokens decide the dtype: under autocast the projections' one, not that of the residual stream.
    dtype = cache.dtype if filled else like.dtype
    grown = like.new_zeros(*cache.shape[:2], size, cache.shape[3], dtype=dtype)
    grown[:, :, : cache.shape[2]] = cache
    return grown


def _append(cache: Tensor, filled: int, new: Tensor) -> Tensor:
    if not _in_place(cache):
        return torch.cat([cache[:, :, :filled], new.to(cache.dtype)], 2) if filled else new
    cache = _room(cache, filled, filled + new.shape[2], new)
    cache[:, :, filled : filled + new.shape[2]] = new
    return cache


def _write(cache: Tensor, length: int, window: int, new: Tensor) -> Tensor:
    """One more token behind `length` others in a ring."""
    filled, slot = min(length, window), length % window
    if not _in_place(cache):
        new = new.to(cache.dtype) if filled else new
        before, after = cache[:, :, :slot], cache[:, :, slot + 1 : filled]
        return torch.cat([before, new, after], 2) if filled else new
    cache = _room(cache, filled, slot + 1, new, limit=window)
    cache[:, :, slot : slot + 1] = new
    return cache


def _scatter(cache: Tensor, end: int, slots: Tensor, new: Tensor) -> Tensor:
    """New entries [B, G, T, K] at per-row slots [B, T]; trailing pads land past the fill, to be overwritten later."""
    grown = _room(cache, cache.shape[2], end, new)
    index = slots[:, None, :, None].expand_as(new)
    if (grown is not cache and not torch.is_grad_enabled()) or _in_place(cache):
        return grown.scatter_(2, index, new.to(grown.dtype))
    return grown.scatter(2, index, new.to(grown.dtype))


def _tokens(slots: int, filled: Tensor, window: int, device: torch.device) -> Tensor:
    """Which token [B, slots] each slot of a ring holds after `filled` [B, 1] tokens; negative: none."""
    return filled - 1 - (filled - 1 - torch.arange(slots, device=device)) % window


def _roll(cache: Tensor, new: Tensor, slots: int, filled: Tensor, count: Tensor | int, window: int) -> Tensor:
    """A ring of that many slots after `count` [B, 1] more tokens of `new` [B, G, T, K]."""
    if not new.shape[2]:
        return cache
    old = cache
    if cache.shape[2] < slots:
        filler = new.new_zeros(*cache.shape[:2], slots - cache.shape[2], cache.shape[3])
        old = torch.cat([cache.to(new.dtype) if not cache.shape[2] else cache, filler], 2)
    fresh = (_tokens(old.shape[2], filled + count, window, new.device) - filled)[:, None, :, None]
    picked = new.gather(2, fresh.clamp(0, new.shape[2] - 1).expand(*old.shape))
    return torch.where(fresh >= 0, picked.to(old.dtype), old)
