"""What all softmax-attention mixers share: projections, positions, caches, cross-attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from einops import rearrange
from torch import Tensor, nn

from kernels.attention.op import attention
from mixers import alibi, cache
from mixers.base import Memory, Mixer, State, positions, take
from mixers.parts import divisor_up_to, head_count, mark, normed
from mixers.rope import Layout, Rope, reach

Position = Literal["rope", "alibi", "none"]


class Attention(Mixer):
    """Softmax attention of H query heads over G key/value heads, all of the past or its last W tokens.

    With a memory the queries come from x and the keys and values from the memory: no mask but documents, no positions.

    Args:
        d_model: width D of the residual stream.
        n_heads: H; None: the largest divisor of d_model up to d_model // 64.
        n_kv_heads: G, a divisor of H; None: H.
        head_dim: K; None: d_model / n_heads.
        window: W, keys a query sees on its left, itself included; None: all.
        causal: False: every token sees both sides (the window too).
        position: "rope" turns queries and keys, "alibi" takes a slope times the distance from the scores (on both sides
            where not causal), "none" leaves order to the mask.
        rope_base, rope_fraction, rope_layout: see `mixers.rope`.
        rope_scaling: null, or {rope_type: yarn, factor: 4, ..} for lengths past the trained one: `mixers.rope_scaling`.
            Under dynamic and longrope the angles depend on the length of the document so far. Keys are then cached
            unturned and turned for each call, so that the last output is that of an uncached call on the same inputs;
            what earlier calls gave (and so the inputs of the layers above) stays as it was at their length.
        bias: of the four projections.
        qk_norm: RMS norm over each head's queries and keys, before they turn.
        scale: factor of the scores; None: 1 / sqrt(K); 1.0: unscaled, the multiplicative form of Luong et al. 2015.
        softcap: scores become softcap * tanh(score / softcap).
        sinks: a learned score a head that takes part in the softmax and gives nothing, 0 at first.
        dropout: share of attention weights dropped in training.
    Raises:
        ValueError: heads that do not divide, an option out of range.
    """

    takes_memory = True

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int | None,
        n_kv_heads: int | None,
        head_dim: int | None,
        window: int | None,
        causal: bool,
        position: Position,
        rope_base: float,
        rope_fraction: float,
        rope_layout: Layout,
        rope_scaling: Mapping[str, Any] | None,
        bias: bool,
        qk_norm: bool,
        scale: float | None,
        softcap: float | None,
        sinks: bool,
        dropout: float,
    ):
        super().__init__()
        self.n_heads = head_count(d_model, n_heads, free=head_dim is not None)
        self.n_kv_heads = self.n_heads if n_kv_heads is None else n_kv_heads
        if self.n_kv_heads < 1 or self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads={self.n_heads} must be a multiple of n_kv_heads={n_kv_heads}")
        self.head_dim = d_model // self.n_heads if head_dim is None else head_dim
        _check(self.head_dim, window, scale, softcap, dropout)
        if rope_scaling is not None and position != "rope":
            raise ValueError(f"rope_scaling={dict(rope_scaling)} needs position=rope; got {position}")
        self.rope = None
        if position == "rope":
            self.rope = Rope(self.head_dim, rope_base, rope_fraction, rope_layout, rope_scaling)
        self.window, self.causal, self.position = window, causal, position
        self.scale, self.softcap, self.dropout = scale, softcap, dropout
        self.q = nn.Linear(d_model, self.n_heads * self.head_dim, bias=bias)
        self.k = nn.Linear(d_model, self.n_kv_heads * self.head_dim, bias=bias)
        self.v = nn.Linear(d_model, self.n_kv_heads * self.head_dim, bias=bias)
        self.out = mark(nn.Linear(self.n_heads * self.head_dim, d_model, bias=bias), residual=True)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=1e-6) if qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(self.head_dim, eps=1e-6) if qk_norm else nn.Identity()
        self.sinks = nn.Parameter(torch.zeros(self.n_heads)) if sinks else None

    def empty(self, batch: int, like: Tensor) -> dict[str, Tensor]:
        """A cache without tokens."""
        return cache.empty(batch, self.n_kv_heads, self.head_dim, self.head_dim, like)

    def remember(self, memory: Memory) -> dict[str, Tensor]:
        """The memory's keys and values, computed once."""
        x, documents = memory.compact()
        k, v = self._keys(x)
        kept = {"memory.k": k, "memory.v": v}
        return kept if documents is None else kept | {"memory.documents": documents}

    def cross_weights(self, x: Tensor, memory: Memory) -> Tensor:
        """How much each query of x [B, T, D] takes from each token of a memory, a head: [B, T, H, S].

        What the op gives for one-hot values in place of the memory's, so whatever shapes the scores is in them.
        """
        kept = self.remember(memory)
        k, places = kept["memory.k"], cross_places(kept, x, None)
        return self._attend(self._queries(x), k, one_hot(k), ordered=False, causal=False, **places)

    def self_weights(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        """How much each query of x [B, T, D] takes from each token of x, a head: [B, T, H, T]; see `cross_weights`.

        Args:
            documents: [B, T], compact, as `mix` takes them.
        """
        q, k = self._turned(self._queries(x), self._keys(x)[0], None, documents)
        return self._attend(
            q, k, one_hot(k), causal=self.causal, window=self.window, q_documents=documents, k_documents=documents
        )

    def mix(
        self, x: Tensor, past: State | None, documents: Tensor | None, memory: Memory | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See `Mixer.mix`."""
        q = self._queries(x)
        if memory is not None:
            return self._cross(q, self.remember(memory), documents), {}
        if past is not None and "memory.k" in past.tensors:
            return self._cross(q, past.tensors, documents), past.own
        k, v = self._keys(x)
        q, k = self._turned(q, k, past, documents)
        if past is None:
            y = self._attend(
                q, k, v, causal=self.causal, window=self.window, q_documents=documents, k_documents=documents
            )
            return self._project(y), {}
        if self.window is None:
            seen, kept = cache.growing(past, k, v, documents)
        else:
            seen, kept = cache.ring(past, k, v, documents, self.window)
        k = seen.k
        if self.rope is not None and self.rope.by_length:
            q, k = self._turned_now(self.rope, q, seen, reach(documents, past, x.shape[1], x.device))
        return self._project(self._attend_cache(q, k, seen, documents)), kept

    def _turned(self, q: Tensor, k: Tensor, past: State | None, documents: Tensor | None) -> tuple[Tensor, Tensor]:
        """Queries and keys of this call by position; as they are where cached keys are to turn with them."""
        if self.rope is None or (past is not None and self.rope.by_length):
            return q, k
        places = positions(documents, past, q.shape[1], q.device)
        length = reach(documents, past, q.shape[1], q.device) if self.rope.by_length else None
        angles = self.rope.angles(places, length)
        return self.rope.turn(q, angles), self.rope.turn(k, angles)

    def _turned_now(self, rope: Rope, q: Tensor, seen: cache.Attended, length: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and all keys, cached ones too, at the angles of the length reached."""
        q_places, k_places = seen.places(q.shape[1])
        k_length = length if seen.fresh is None or length.shape[1] == 1 else take(length, seen.fresh)
        return rope.turn(q, rope.angles(q_places, length)), rope.turn(seen.k, rope.angles(k_places, k_length))

    def _attend_cache(self, q: Tensor, k: Tensor, seen: cache.Attended, documents: Tensor | None) -> Tensor:
        return self._attend(q, k, seen.v, **seen.mask(self.window, documents, placed=self.position == "alibi"))

    def _cross(self, q: Tensor, kept: dict[str, Tensor], documents: Tensor | None) -> Tensor:
        places = cross_places(kept, q, documents)
        y = self._attend(q, kept["memory.k"], kept["memory.v"], ordered=False, causal=False, window=None, **places)
        return self._project(y)

    def _queries(self, x: Tensor) -> Tensor:
        return normed(self.q_norm, rearrange(self.q(x), "b t (h k) -> b t h k", h=self.n_heads))

    def _keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        k, v = (rearrange(project(x), "b s (g k) -> b s g k", g=self.n_kv_heads) for project in (self.k, self.v))
        return normed(self.k_norm, k), v

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, ordered: bool = True, **places: Any) -> Tensor:
        return attention(
            q,
            # The cache may hold another dtype than autocast gives here.
            k.to(q.dtype),
            v.to(q.dtype),
            scale=self.scale,
            softcap=self.softcap,
            alibi_slopes=alibi.slopes(self.n_heads, q.device) if ordered and self.position == "alibi" else None,
            sinks=self.sinks,
            dropout=self.dropout if self.training else 0.0,
            **places,
        )

    def _project(self, y: Tensor) -> Tensor:
        return self.out(rearrange(y, "b t h k -> b t (h k)"))


def cross_places(kept: dict[str, Tensor], q: Tensor, documents: Tensor | None) -> dict[str, Tensor | None]:
    """Documents of queries [B, T, ...] and of what `remember` kept, as an attention op takes them."""
    ids = kept.get("memory.documents")
    if ids is not None and documents is None:
        documents = ids.new_ones(q.shape[:2])
    return dict(q_documents=documents, k_documents=ids)


def one_hot(k: Tensor) -> Tensor:
    """Values [B, S, G, S] for keys [B, S, G, K] that tell the tokens of a memory apart: the sum is then the weights."""
    return torch.eye(k.shape[1], dtype=k.dtype, device=k.device)[:, None].expand(len(k), -1, k.shape[2], -1)


def default_kv_heads(d_model: int, n_heads: int | None, head_dim: int | None) -> int:
    """A quarter of the query heads, or the largest divisor below."""
    heads = head_count(d_model, n_heads, free=head_dim is not None)
    return divisor_up_to(heads, max(1, heads // 4))


def _check(head_dim: int, window: int | None, scale: float | None, softcap: float | None, dropout: float) -> None:
    for name, value, fine, wanted in (
        ("head_dim", head_dim, head_dim >= 1, "at least 1"),
        ("window", window, window is None or window >= 1, "at least 1"),
        ("scale", scale, scale is None or scale > 0, "above 0"),
        ("softcap", softcap, softcap is None or softcap > 0, "above 0"),
        ("dropout", dropout, 0 <= dropout < 1, "at least 0 and below 1"),
    ):
        if not fine:
            raise ValueError(f"{name}={value} must be {wanted}")
