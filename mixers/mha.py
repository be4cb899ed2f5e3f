"""Multi-head attention (Vaswani et al. 2017, arXiv:1706.03762, section 3.2.2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mixers.attention import Attention, Position
from mixers.registry import register
from mixers.rope import Layout


@register("mha")
class MultiHeadAttention(Attention):
    """Every query head has a key/value head of its own; options as in `Attention`."""

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int | None = None,
        head_dim: int | None = None,
        causal: bool = True,
        position: Position = "rope",
        rope_base: float = 10_000.0,
        rope_fraction: float = 1.0,
        rope_layout: Layout = "half",
        rope_scaling: Mapping[str, Any] | None = None,
        bias: bool = False,
        qk_norm: bool = False,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        dropout: float = 0.0,
    ):
        super().__init__(
            d_model,
            n_heads=n_heads,
            n_kv_heads=None,
            head_dim=head_dim,
            window=None,
            causal=causal,
            position=position,
            rope_base=rope_base,
            rope_fraction=rope_fraction,
            rope_layout=rope_layout,
            rope_scaling=rope_scaling,
            bias=bias,
            qk_norm=qk_norm,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
            dropout=dropout,
        )
