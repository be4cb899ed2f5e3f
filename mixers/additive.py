"""Additive attention (Bahdanau et al. 2014, arXiv:1409.0473, section 3.1 and appendix A.1.2)."""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from kernels.additive.op import additive_attention
from mixers import cache
from mixers.attention import cross_places, one_hot
from mixers.base import Memory, Mixer, State
from mixers.parts import head_count, mark
from mixers.registry import register


@register("additive")
class AdditiveAttention(Mixer):
    """A head's score of query i and key j is a small network, v_a . tanh(W_a x_i + U_a x_j + b).

    With a memory the keys and values come from it: the paper's form, where x are the states of the decoder and the
    memory holds the annotations. There the annotations themselves are summed; here they pass a value and an output
    projection, as in the other mixers. Order is known from the mask alone.

    Args:
        d_model: width D of the residual stream.
        n_heads: H; None: the largest divisor of d_model up to d_model // 64.
        attention_dim: A, width of a head's hidden layer; None: d_model / n_heads.
        window: W, keys a query sees on its left, itself included; None: all.
        causal: False: every token sees both sides (the window too).
        bias: b, 0 at first.
    Raises:
        ValueError: heads that do not divide, an option out of range.
    """

    takes_memory = True

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int | None = None,
        attention_dim: int | None = None,
        window: int | None = None,
        causal: bool = True,
        bias: bool = True,
    ):
        super().__init__()
        self.n_heads = head_count(d_model, n_heads)
        self.head_dim = d_model // self.n_heads
        self.attention_dim = self.head_dim if attention_dim is None else attention_dim
        for name, value in (("attention_dim", attention_dim), ("window", window)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        self.window, self.causal = window, causal
        self.q = nn.Linear(d_model, self.n_heads * self.attention_dim, bias=False)
        self.k = nn.Linear(d_model, self.n_heads * self.attention_dim, bias=False)
        self.v = nn.Linear(d_model, d_model, bias=False)
        self.out = mark(nn.Linear(d_model, d_model, bias=False), residual=True)
        # As the weight of a linear layer with one output a head; in the paper it starts at 0.
        self.score = nn.Parameter(torch.empty(self.n_heads, self.attention_dim))
        nn.init.normal_(self.score, std=self.attention_dim**-0.5)
        self.bias = nn.Parameter(torch.zeros(self.n_heads, self.attention_dim)) if bias else None
        mark(self, "bias", no_decay=True)

    def empty(self, batch: int, like: Tensor) -> dict[str, Tensor]:
        """A cache without tokens."""
        return cache.empty(batch, self.n_heads, self.attention_dim, self.head_dim, like)

    def remember(self, memory: Memory) -> dict[str, Tensor]:
        """The memory's keys and values, computed once."""
        x, documents = memory.compact()
        k, v = self._keys(x)
        kept = {"memory.k": k, "memory.v": v}
        return kept if documents is None else kept | {"memory.documents": documents}

    def cross_weights(self, x: Tensor, memory: Memory) -> Tensor:
        """[B, T, H, S], see `mixers.attention.Attention.cross_weights`."""
        kept = self.remember(memory)
        return self._sum(x, kept["memory.k"], one_hot(kept["memory.k"]), causal=False, **cross_places(kept, x, None))

    def self_weights(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        """[B, T, H, T], see `mixers.attention.Attention.self_weights`."""
        k = self._keys(x)[0]
        places = dict(q_documents=documents, k_documents=documents)
        return self._sum(x, k, one_hot(k), causal=self.causal, window=self.window, **places)

    def mix(
        self, x: Tensor, past: State | None, documents: Tensor | None, memory: Memory | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See `Mixer.mix`."""
        if memory is not None:
            return self._cross(x, self.remember(memory), documents), {}
        if past is not None and "memory.k" in past.tensors:
            return self._cross(x, past.tensors, documents), past.own
        k, v = self._keys(x)
        if past is None:
            places = dict(q_documents=documents, k_documents=documents)
            return self._attend(x, k, v, causal=self.causal, window=self.window, **places), {}
        if self.window is None:
            seen, kept = cache.growing(past, k, v, documents)
        else:
            seen, kept = cache.ring(past, k, v, documents, self.window)
        return self._attend(x, seen.k, seen.v, **seen.mask(self.window, documents)), kept

    def _cross(self, x: Tensor, kept: dict[str, Tensor], documents: Tensor | None) -> Tensor:
        places = cross_places(kept, x, documents)
        return self._attend(x, kept["memory.k"], kept["memory.v"], causal=False, **places)

    def _keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        k, v = (rearrange(project(x), "b s (h a) -> b s h a", h=self.n_heads) for project in (self.k, self.v))
        return k, v

    def _attend(self, x: Tensor, k: Tensor, v: Tensor, **mask: Any) -> Tensor:
        return self.out(rearrange(self._sum(x, k, v, **mask), "b t h v -> b t (h v)"))

    def _sum(self, x: Tensor, k: Tensor, v: Tensor, **mask: Any) -> Tensor:
        """The weighted values of each head, [B, T, H, V]."""
        q = rearrange(self.q(x), "b t (h a) -> b t h a", h=self.n_heads)
        # The cache may hold another dtype than autocast gives here.
        return additive_attention(q, k.to(q.dtype), v.to(q.dtype), self.score, bias=self.bias, **mask)
