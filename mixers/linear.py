"""Linear attention (Katharopoulos et al. 2020, arXiv:2006.16236)."""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from torch.nn.functional import relu

from mixers.feature_attention import FeatureAttention
from mixers.registry import register


@register("linear")
class LinearAttention(FeatureAttention):
    """phi(x) = elu(x) + 1 (equation 7); options as in `FeatureAttention`."""

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int | None = None,
        feature_map: Literal["elu"] = "elu",
        causal: bool = True,
        bias: bool = False,
    ):
        super().__init__(d_model, n_heads=n_heads, key_dim=None, causal=causal, bias=bias)
        self.feature_map = feature_map

    def features(self, x: Tensor) -> Tensor:
        """elu(x) + 1."""
        # Not torch's elu: compiled, its backward is traced with strides that it does not have when it runs.
        return relu(x) + x.clamp(max=0).exp()
