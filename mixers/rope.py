"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864, section 3.2): queries and keys turn with their position.

Layouts of the R channels that turn: "half" pairs channel i with i + R/2 (Llama and most others), "interleaved" 2i with
2i + 1 (the paper, GPT-J). The other K - R channels stay. There is no table: any position is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from mixers.base import State, positions, take
from mixers.rope_scaling import scaling

Layout = Literal["half", "interleaved"]


class Rope:
    """How the heads of a mixer turn.

    Args:
        head_dim: K.
        base: of the angles' geometric row.
        fraction: share of the K channels that turn; R = the even number of them.
        layout: which channels are a pair.
        options: see `mixers.rope_scaling`.
    Attributes:
        by_length: the angles depend on the length of the document, so that they are not known when a key is cached.
    Raises:
        ValueError: options out of range, a head too narrow.
    """

    def __init__(
        self, head_dim: int, base: float, fraction: float, layout: Layout, options: Mapping[str, Any] | None
    ):
        if base <= 1:
            raise ValueError(f"rope_base={base} must be above 1")
        self.base, self.fraction, self.layout, self.scaling = base, fraction, layout, scaling(options)
        self.turned = _turning_channels(head_dim, fraction)
        self.by_length = self.scaling.by_length
        try:
            self.scaling.check(base, self.turned)
        except ValueError as error:
            raise ValueError(f"rope_scaling: {error}") from error

    def angles(self, places: Tensor, length: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Cosine and sine for `turn`: [1 or B, T, 1, R/2] float64, times the amplitude.

        They are float64 whatever the dtype or autocast: in fp32, angles are off by 0.025 at position 1,000,000.

        Args:
            places: [1 or B, T] integers; only differences inside a document count.
            length: of each token's document, [1 or B, 1 or T] integers; needed under `by_length` alone.
        """
        assert length is not None or not self.by_length
        steps = self.scaling.frequencies(self.base, self.turned, places if length is None else length)
        turns = (places.to(torch.float64)[..., None] * steps)[:, :, None]
        return turns.cos() * self.scaling.amplitude, turns.sin() * self.scaling.amplitude

    def turn(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """x [B, T, H, K] turned, of its dtype; computed in at least fp32."""
        cos, sin = (t.to(torch.promote_types(x.dtype, torch.float32)) for t in angles)
        turning, rest = x.split([self.turned, x.shape[-1] - self.turned], -1)
        if self.layout == "half":
            turned = _halves_turned(turning.to(cos.dtype), cos, sin)
        else:
            turned = torch.stack(_pairs_turned(turning[..., ::2], turning[..., 1::2], cos, sin), -1).flatten(-2)
        turned = turned.to(x.dtype)
        return torch.cat([turned, rest], -1) if rest.shape[-1] else turned


def reach(documents: Tensor | None, past: State | None, time: int, device: torch.device) -> Tensor:
    """Tokens of each token's document at the end of this piece: [1, 1] when nothing was packed, else [B, T]; int64."""
    if documents is None or not time:
        return torch.full((1, 1), time + (0 if past is None else past.length), device=device)
    ends = torch.cat([documents[:, 1:] != documents[:, :-1], documents[:, :1] == documents[:, :1]], 1)
    index = torch.where(ends, torch.arange(time, device=device), time)
    last = index.flip(1).cummin(1).values.flip(1)
    return take(positions(documents, past, time, device), last) + 1


def _turning_channels(head_dim: int, fraction: float) -> int:
    """How many channels turn: even, at least 2."""
    if not 0 < fraction <= 1:
        raise ValueError(f"rope_fraction={fraction} must be above 0 and at most 1")
    turned = int(head_dim * fraction) // 2 * 2
    if turned < 2 or (fraction == 1 and turned != head_dim):
        raise ValueError(
            f"rope_fraction={fraction} of head_dim={head_dim} must be an even number of channels, at least 2"
        )
    return turned


def _halves_turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As `_pairs_turned` of both halves, in wide rows and in place: half the time on a CPU."""
    first, second = x.chunk(2, -1)
    y = x * torch.cat([cos, cos], -1)
    return y.addcmul_(torch.cat([second, first], -1), torch.cat([-sin, sin], -1))


def _pairs_turned(first: Tensor, second: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    first, second = first.to(cos.dtype), second.to(cos.dtype)
    return first * cos - second * sin, second * cos + first * sin
