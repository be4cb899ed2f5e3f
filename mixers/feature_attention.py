"""What all linear-attention mixers share: feature maps of queries and keys, and a state of constant size."""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from kernels.linear.op import linear_attention
from mixers.base import Memory, Mixer, State
from mixers.parts import head_count, mark


class FeatureAttention(Mixer):
    """Attention whose weight is a product of feature maps, phi(q) . phi(k), normalised over what is visible.

    Args:
        d_model: width D of the residual stream.
        n_heads: H; None: the largest divisor of d_model up to d_model // 64.
        key_dim: width of a head's queries and keys before the feature map; None: d_model / n_heads.
        causal: False: every token of the document is visible.
        bias: of the four projections.
    """

    def __init__(self, d_model: int, *, n_heads: int | None, key_dim: int | None, causal: bool, bias: bool):
        super().__init__()
        self.n_heads = head_count(d_model, n_heads)
        self.value_dim = d_model // self.n_heads
        self.key_dim = self.value_dim if key_dim is None else key_dim
        self.causal = causal
        self.q = nn.Linear(d_model, self.n_heads * self.key_dim, bias=bias)
        self.k = nn.Linear(d_model, self.n_heads * self.key_dim, bias=bias)
        self.v = nn.Linear(d_model, d_model, bias=bias)
        self.out = mark(nn.Linear(d_model, d_model, bias=bias), residual=True)

    def features(self, x: Tensor) -> Tensor:
        """phi, at least 0 on every pair: [B, T, H, K] -> [B, T, H, K']."""
        raise NotImplementedError

    @property
    def feature_dim(self) -> int:
        """K', the width after the feature map."""
        return self.key_dim

    def empty(self, batch: int, like: Tensor) -> dict[str, Tensor]:
        """S [B, H, K', V] and z [B, H, K'], at least fp32."""
        wide = torch.promote_types(like.dtype, torch.float32)
        return {
            "kv": like.new_zeros(batch, self.n_heads, self.feature_dim, self.value_dim, dtype=wide),
            "z": like.new_zeros(batch, self.n_heads, self.feature_dim, dtype=wide),
        }

    def mix(
        self, x: Tensor, past: State | None, documents: Tensor | None, memory: Memory | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See `Mixer.mix`."""
        q, k, v = (
            rearrange(project(x), "b t (h k) -> b t h k", h=self.n_heads) for project in (self.q, self.k, self.v)
        )
        kept: dict[str, Any] = (
            {} if past is None else {"kv": past["kv"], "z": past["z"], "document": past.get("document")}
        )
        # Rounded features can cancel in sums that are above 0 by definition, and then divide by nothing.
        wide = torch.promote_types(q.dtype, torch.float32)
        y, kv, z = linear_attention(
            self.features(q.to(wide)),
            self.features(k.to(wide)),
            v.to(wide),
            causal=self.causal,
            documents=documents,
            return_state=past is not None,
            **kept,
        )
        y = self.out(rearrange(y.to(v.dtype), "b t h v -> b t (h v)"))
        return y, {} if kv is None or z is None else {"kv": kv, "z": z}
