"""Rotary position embedding, half-split layout (Su et al. 2021, arXiv:2104.09864, section 3.2; layout of Llama)."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, positions: Tensor, base: float, fraction: float = 1.0) -> Tensor:
    """Turn pair i of each head's first `fraction` of channels by position * base^(-2i/R).

    Args:
        x: [B, T, H, K]
        positions: [1 or B, T] integers.
        base: of the angles' geometric row.
        fraction: share of the K channels that turn; R = the even number of them. Channel i is paired with i + R/2.
    Returns:
        [B, T, H, K], dtype of x. Angles are float64 whatever the dtype or autocast: in fp32 they are off by 0.025 at
        position 1,000,000.
    """
    turned = rotary_channels(x.shape[-1], fraction)
    wide = torch.promote_types(x.dtype, torch.float32)
    index = torch.arange(0, turned, 2, device=x.device, dtype=torch.float64)
    angles = positions[:, :, None, None].to(torch.float64) * base ** (-index / turned)
    cos, sin = angles.cos().to(wide), angles.sin().to(wide)
    first, second, rest = x.split([turned // 2, turned // 2, x.shape[-1] - turned], -1)
    first, second = first.to(wide), second.to(wide)
    pieces = [(first * cos - second * sin).to(x.dtype), (second * cos + first * sin).to(x.dtype), rest]
    return torch.cat(pieces, -1)


def rotary_channels(head_dim: int, fraction: float) -> int:
    """How many channels turn: even, at least 2.

    Raises:
        ValueError: a fraction outside of (0, 1], or a head too narrow.
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"rope_fraction={fraction} must be above 0 and at most 1")
    turned = int(head_dim * fraction) // 2 * 2
    if turned < 2 or (fraction == 1 and turned != head_dim):
        raise ValueError(
            f"rope_fraction={fraction} of head_dim={head_dim} must be an even number of channels, at least 2"
        )
    return turned
