"""Linear attention (Katharopoulos et al. 2020, arXiv:2006.16236)."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import relu

from mixers.base import State
from mixers.feature_attention import FeatureAttention
from mixers.options import nearest
from mixers.registry import register

FeatureMap = Literal["elu", "relu", "softmax_pair", "identity"]
FEATURE_MAPS: tuple[str, ...] = get_args(FeatureMap)


@register("linear")
class LinearAttention(FeatureAttention):
    """Weights phi(q) . phi(k), divided by their sum; other options as in `FeatureAttention`.

    Args:
        feature_map: phi.
            elu: elu(x) + 1 (equation 7).
            relu: max(x, 0); a query that meets no weight gets 0.
            softmax_pair: [softmax(x), softmax(-x)] (Hedgehog, Zhang et al. 2024, arXiv:2402.04347, equation 6; its
                linear map before the softmax is left to the projections, which can be it).
            identity: x, scaled by 1 / sqrt(K) and never divided: weights of both signs may sum to nothing.
    """

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int | None = None,
        feature_map: FeatureMap = "elu",
        causal: bool = True,
        bias: bool = False,
    ):
        if feature_map not in FEATURE_MAPS:
            raise ValueError(
                f"feature_map={feature_map!r} is unknown{nearest(feature_map, FEATURE_MAPS)}; "
                f"allowed: {', '.join(FEATURE_MAPS)}"
            )
        super().__init__(d_model, n_heads=n_heads, causal=causal, bias=bias, normalise=feature_map != "identity")
        self.feature_map = feature_map

    def encode(self, q: Tensor, k: Tensor, documents: Tensor | None, past: State | None) -> tuple[Tensor, Tensor]:
        """See `FeatureAttention.encode`."""
        match self.feature_map:
            case "elu":
                return elu_query(q), elu(k)
            case "relu":
                return relu(q), relu(k)
            case "softmax_pair":
                return softmax_pair(q), softmax_pair(k)
        return q * self.key_dim**-0.5, k

    @property
    def feature_dim(self) -> int:
        """K'."""
        return self.key_dim * (2 if self.feature_map == "softmax_pair" else 1)


def elu(x: Tensor) -> Tensor:
    """elu(x) + 1."""
    # Not torch's elu: compiled, its backward is traced with strides that it does not have when it runs.
    return relu(x) + x.clamp(max=0).exp()


def elu_query(x: Tensor) -> Tensor:
    """elu(x) + 1 up to a factor a row, which the normaliser takes out: far below 0 all channels would be exp(x) = 0."""
    largest = x.detach().amax(-1, keepdim=True).clamp(max=0)
    return relu(x) + (x.clamp(max=0) - largest).exp()


def softmax_pair(x: Tensor) -> Tensor:
    """[softmax(x), softmax(-x)], [..., K] -> [..., 2 K]."""
    return torch.cat([x.softmax(-1), (-x).softmax(-1)], -1)
