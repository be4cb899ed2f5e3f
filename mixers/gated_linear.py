"""Linear attention with a forget gate a token and head (Yang et al. 2024, arXiv:2312.06635, with one gate a head)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, rms_norm, silu

from mixers.base import State
from mixers.feature_attention import FeatureAttention
from mixers.parts import mark
from mixers.registry import register


@register("gated_linear")
class GatedLinearAttention(FeatureAttention):
    """W_O (swish(x W_G) * RMSNorm(heads)) with S_t = a_t S_{t-1} + k_t v_t^T, a_t = sigmoid(x_t W_a + b_a)^(1 / tau).

    The paper gates each channel of the keys; one gate a head is its scalar form (gated retention, Sun et al. 2024,
    arXiv:2405.05254, section 3.1), which needs no second level of chunks.

    Args:
        d_model, n_heads, bias: as in `FeatureAttention`; the bias is of q, k, v, the output gate and out.
        tau: above 0; a larger one forgets more slowly.
    Raises:
        ValueError: options out of range.
    """

    def __init__(self, d_model: int, *, n_heads: int | None = None, tau: float = 16.0, bias: bool = False):
        if tau <= 0:
            raise ValueError(f"tau={tau} must be above 0")
        super().__init__(d_model, n_heads=n_heads, bias=bias, normalise=False)
        self.tau = tau
        self.forget = nn.Linear(d_model, self.n_heads)
        self.gate = nn.Linear(d_model, d_model, bias=bias)
        self.norm = nn.RMSNorm(self.value_dim, eps=1e-5)
        for project in (self.q, self.k, self.v, self.gate, self.forget):
            nn.init.xavier_uniform_(mark(project, "weight", own_init=True).weight, gain=2**-2.5)

    def encode(self, q: Tensor, k: Tensor, documents: Tensor | None, past: State | None) -> tuple[Tensor, Tensor]:
        """Scaled by 1 / sqrt(K)."""
        return q * self.key_dim**-0.5, k

    def log_decay(self, x: Tensor) -> Tensor:
        """[B, T, H]."""
        logits = self.forget(x)
        return logsigmoid(logits.to(torch.promote_types(logits.dtype, torch.float32))) / self.tau

    def merge(self, y: Tensor, x: Tensor) -> Tensor:
        """Norm a head, and gate."""
        y = rms_norm(y, self.norm.normalized_shape, self.norm.weight.to(y.dtype), self.norm.eps)
        return y.flatten(2) * silu(self.gate(x))
