"""Retention: linear attention that forgets at a fixed rate a head (Sun et al. 2023, arXiv:2307.08621)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, rms_norm, sigmoid, silu

from mixers.base import State, positions
from mixers.feature_attention import FeatureAttention
from mixers.parts import mark
from mixers.registry import register
from mixers.rope import Rope


@register("retention")
class Retention(FeatureAttention):
    """W_O (swish(x W_G) * norm(heads)), a head sum_j gamma^(i-j) (q_i . k_j) v_j / sqrt(K), q and k turned by position.

    The defaults are RetNet's (section 2.2). MiniMax's lightning attention (arXiv:2501.08313) is decay=slopes,
    position=none, activation=silu, norm=rms, gate=sigmoid, scale=1, expand=1, with slope_scale falling over the layers.

    Args:
        d_model, n_heads, bias: as in `FeatureAttention`; the bias is of all five projections.
        expand: V as a multiple of K.
        decay: retention: gamma = 1 - 2^(-5-h) of head h = 0, 1, ...; slopes: exp(-slope_scale * 2^(-8 (h+1) / H)).
        slope_scale: above 0.
        position: rope: turns by t rope_base^(-2i/K), without xPos' growing factor, which the decay replaces.
        activation: of queries, keys and values.
        norm: group: each head less its mean over its deviation, no weights; rms: RMSNorm over all heads together.
        gate: function of x W_G.
        scale: of the weights; None: 1 / sqrt(K).
    Raises:
        ValueError: options out of range; an odd K to turn.
    """

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int | None = None,
        expand: int = 2,
        decay: Literal["retention", "slopes"] = "retention",
        slope_scale: float = 1.0,
        position: Literal["rope", "none"] = "rope",
        rope_base: float = 10000.0,
        activation: Literal["none", "silu"] = "none",
        norm: Literal["group", "rms"] = "group",
        gate: Literal["swish", "sigmoid"] = "swish",
        scale: float | None = None,
        bias: bool = False,
    ):
        for option, value in (("expand", expand), ("slope_scale", slope_scale), ("scale", scale)):
            if value is not None and value <= 0:
                raise ValueError(f"{option}={value} must be above 0")
        super().__init__(d_model, n_heads=n_heads, expand=expand, bias=bias, normalise=False)
        width = self.n_heads * self.value_dim
        self.decay, self.slope_scale, self.activation, self.gate_function = decay, slope_scale, activation, gate
        self.scale = self.key_dim**-0.5 if scale is None else scale
        self.rope = Rope(self.key_dim, rope_base, 1.0, "interleaved", None) if position == "rope" else None
        self.gate = nn.Linear(d_model, width, bias=bias)
        self.norm = nn.RMSNorm(width, eps=1e-6) if norm == "rms" else None
        for project in (self.q, self.k, self.v, self.gate):
            nn.init.xavier_uniform_(mark(project, "weight", own_init=True).weight, gain=2**-2.5)

    def encode(self, q: Tensor, k: Tensor, documents: Tensor | None, past: State | None) -> tuple[Tensor, Tensor]:
        """See `FeatureAttention.encode`."""
        q, k = self.values(q) * self.scale, self.values(k)
        if self.rope is None:
            return q, k
        angles = self.rope.angles(positions(documents, past, q.shape[1], q.device))
        return self.rope.turn(q, angles), self.rope.turn(k, angles)

    def values(self, v: Tensor) -> Tensor:
        """The activation."""
        return silu(v) if self.activation == "silu" else v

    def log_decay(self, x: Tensor) -> Tensor:
        """[H], computed here so that no cast of the module rounds it."""
        wide = torch.promote_types(x.dtype, torch.float32)
        head = torch.arange(self.n_heads, dtype=wide, device=x.device)
        if self.decay == "slopes":
            return -self.slope_scale * torch.exp2(-8 / self.n_heads * (head + 1))
        return torch.log1p(-torch.exp2(-5 - head))

    def merge(self, y: Tensor, x: Tensor) -> Tensor:
        """Norm and gate."""
        if self.norm is None:
            y = layer_norm(y, y.shape[-1:], eps=1e-5).flatten(2)
        else:
            y = rms_norm(y.flatten(2), self.norm.normalized_shape, self.norm.weight.to(y.dtype), self.norm.eps)
        gate = self.gate(x)
        return y * (silu(gate) if self.gate_function == "swish" else sigmoid(gate))
