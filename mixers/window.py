"""Sliding-window attention (Beltagy et al. 2020, arXiv:2004.05150, section 3.1; causal: Mistral, arXiv:2310.06825)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mixers.attention import Attention, Position
from mixers.registry import register
from mixers.rope import Layout


@register("window")
class SlidingWindowAttention(Attention):
    """A query sees the last `window` tokens, itself included; not causal: fewer than `window` away on both sides.

    Options as in `Attention`; the cache holds `window` tokens and no more.
    """

    def __init__(
        self,
        d_model: int,
        *,
        window: int = 128,
        n_heads: int | None = None,
        n_kv_heads: int | None = None,
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
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            window=window,
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
