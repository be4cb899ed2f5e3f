"""What all linear-attention mixers share: heads, a state of constant size, and the places where they differ."""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from kernels.linear.op import linear_attention
from mixers.base import Memory, Mixer, State
from mixers.parts import head_count, mark


class FeatureAttention(Mixer):
    """Attention whose weight is a product of feature maps, phi(q) . phi(k), times a decay where there is one.

    Args:
        d_model: width D of the residual stream.
        n_heads: H; None: the largest divisor of d_model up to d_model // 64.
        key_dim: width of a head's queries and keys before the feature map; None: d_model / n_heads.
        expand: V as a multiple of d_model / n_heads.
        causal: False: every token of the document is visible.
        bias: of the four projections.
        normalise: divide by the sum of the visible weights, which must not be negative then.
    """

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int | None,
        key_dim: int | None = None,
        expand: int = 1,
        causal: bool = True,
        bias: bool = False,
        normalise: bool = True,
    ):
        super().__init__()
        self.n_heads = head_count(d_model, n_heads)
        self.value_dim = expand * (d_model // self.n_heads)
        self.key_dim = d_model // self.n_heads if key_dim is None else key_dim
        self.causal, self.normalise = causal, normalise
        self.q = nn.Linear(d_model, self.n_heads * self.key_dim, bias=bias)
        self.k = nn.Linear(d_model, self.n_heads * self.key_dim, bias=bias)
        self.v = nn.Linear(d_model, self.n_heads * self.value_dim, bias=bias)
        self.out = mark(nn.Linear(self.n_heads * self.value_dim, d_model, bias=bias), residual=True)

    def encode(self, q: Tensor, k: Tensor, documents: Tensor | None, past: State | None) -> tuple[Tensor, Tensor]:
        """phi of queries and keys, [B, T, H, K] -> [B, T, H, K'], at least fp32."""
        raise NotImplementedError

    def values(self, v: Tensor) -> Tensor:
        """Of the projected values [B, T, H, V]."""
        return v

    def log_decay(self, x: Tensor) -> Tensor | None:
        """[H] or [B, T, H], at most 0 and at least fp32; None: nothing is forgotten."""
        return None

    def merge(self, y: Tensor, x: Tensor) -> Tensor:
        """The heads' outputs [B, T, H, V], at least fp32, and the mixer's input -> [B, T, H V]."""
        return y.flatten(2)

    @property
    def feature_dim(self) -> int:
        """K', the width after the feature map."""
        return self.key_dim

    def empty(self, batch: int, like: Tensor) -> dict[str, Tensor]:
        """S [B, H, K', V] and, under a normaliser, z [B, H, K'], at least fp32."""
        wide = torch.promote_types(like.dtype, torch.float32)
        z = {"z": like.new_zeros(batch, self.n_heads, self.feature_dim, dtype=wide)} if self.normalise else {}
        return {"kv": like.new_zeros(batch, self.n_heads, self.feature_dim, self.value_dim, dtype=wide)} | z

    def mix(
        self, x: Tensor, past: State | None, documents: Tensor | None, memory: Memory | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See `Mixer.mix`."""
        q, k, v = (
            rearrange(project(x), "b t (h k) -> b t h k", h=self.n_heads) for project in (self.q, self.k, self.v)
        )
        kept: dict[str, Any] = (
            {} if past is None else {"kv": past["kv"], "z": past.get("z"), "document": past.get("document")}
        )
        # Rounded features can cancel in sums that are above 0 by definition, and then divide by nothing.
        wide = torch.promote_types(q.dtype, torch.float32)
        y, kv, z = linear_attention(
            *self.encode(q.to(wide), k.to(wide), documents, past),
            self.values(v.to(wide)),
            causal=self.causal,
            normalise=self.normalise,
            log_decay=self.log_decay(x),
            documents=documents,
            return_state=past is not None,
            **kept,
        )
        y = self.out(self.merge(y, x).to(v.dtype))
        return y, {name: t for name, t in (("kv", kv), ("z", z)) if t is not None}
