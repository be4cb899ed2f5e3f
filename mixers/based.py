"""Based: linear attention with a second-order Taylor map of exp (Arora et al. 2024, arXiv:2402.18668, section 4.1)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mixers.base import State
from mixers.feature_attention import FeatureAttention
from mixers.registry import register


@register("based")
class Based(FeatureAttention):
    """phi(q) . phi(k) = 1 + s + s^2 / 2 with s = scale * (q . k), which is above 0 for every s.

    The published map, all d^2 products kept: K' = 1 + d + d^2. Options as in `FeatureAttention`.

    Args:
        feature_dim: d, width of a head's queries and keys.
        scale: None: 1 / sqrt(d), as published. A larger one starts sharper and learns recall in fewer steps.
    """

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int | None = None,
        feature_dim: int = 16,
        scale: float | None = None,
        causal: bool = True,
        bias: bool = False,
    ):
        if feature_dim < 1:
            raise ValueError(f"feature_dim={feature_dim} must be at least 1")
        if scale is not None and scale <= 0:
            raise ValueError(f"scale={scale} must be above 0")
        super().__init__(d_model, n_heads=n_heads, key_dim=feature_dim, causal=causal, bias=bias)
        self.scale = feature_dim**-0.5 if scale is None else scale

    def encode(self, q: Tensor, k: Tensor, documents: Tensor | None, past: State | None) -> tuple[Tensor, Tensor]:
        """See `FeatureAttention.encode`."""
        return self.features(q), self.features(k)

    def features(self, x: Tensor) -> Tensor:
        """[1, y, y y^T / sqrt(2)] flattened, with y = sqrt(scale) x."""
        x = x * self.scale**0.5
        squares = (x[..., :, None] * x[..., None, :]).flatten(-2) / math.sqrt(2)
        return torch.cat([torch.ones_like(x[..., :1]), x, squares], -1)

    @property
    def feature_dim(self) -> int:
        """1 + d + d^2."""
        return 1 + self.key_dim + self.key_dim**2
