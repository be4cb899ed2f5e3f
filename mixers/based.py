"""Based: linear attention with the second-order Taylor map of exp (Arora et al. 2024, arXiv:2402.18668, section 4.1)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mixers.feature_attention import FeatureAttention
from mixers.registry import register


@register("based")
class Based(FeatureAttention):
    """phi(q) . phi(k) = 1 + s + s^2 / 2 with s = q . k / sqrt(feature_dim), which is above 0 for every s.

    The published map, all d^2 products kept: K' = 1 + d + d^2. Options as in `FeatureAttention`.

    Args:
        feature_dim: d, width of a head's queries and keys.
    """

    def __init__(self, d_model: int, *, n_heads: int | None = None, feature_dim: int = 16, causal: bool = True,
                 bias: bool = False):
        if feature_dim < 1:
            raise ValueError(f"feature_dim={feature_dim} must be at least 1")
        super().__init__(d_model, n_heads=n_heads, key_dim=feature_dim, causal=causal, bias=bias)

    def features(self, x: Tensor) -> Tensor:
        """[1, x / d^(1/4), x x^T / sqrt(2 d)] flattened."""
        x = x / self.key_dim ** 0.25
        squares = (x[..., :, None] * x[..., None, :]).flatten(-2) / math.sqrt(2)
        return torch.cat([torch.ones_like(x[..., :1]), x, squares], -1)

    @property
    def feature_dim(self) -> int:
        """1 + d + d^2."""
        return 1 + self.key_dim + self.key_dim ** 2
