"""Multi-query attention (Shazeer 2019, arXiv:1911.02150, section 3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mixers.attention import Attention, Position
from mixers.registry import register
from mixers.rope import Layout


@register("mqa")
class MultiQueryAttention(Attention):
    """All query heads share one key/value head; options as in `Attention`."""

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
            n_kv_heads=1,
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
