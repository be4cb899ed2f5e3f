"""Grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245, section 2.2)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from mixers.attention import Attention, Position, default_kv_heads
from mixers.registry import register
from mixers.rope import Layout

_log = logging.getLogger(__name__)


@register("gqa")
class GroupedQueryAttention(Attention):
    """Query head h shares key/value head h // (H / G); options as in `Attention`.

    Args:
        n_kv_heads: G; None: n_heads // 4, or the largest divisor of n_heads below.
    """

    def __init__(
        self,
        d_model: int,
        *,
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
            n_kv_heads=default_kv_heads(d_model, n_heads, head_dim) if n_kv_heads is None else n_kv_heads,
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
        if n_kv_heads is None and self.n_kv_heads == self.n_heads:
            heads = self.n_heads
            _log.warning("gqa with n_heads=%d has n_kv_heads=%d by default: the same as mha", heads, heads)
