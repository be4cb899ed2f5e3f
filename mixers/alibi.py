"""ALiBi (Press et al. 2022, arXiv:2108.12409, section 3): scores fall with the distance, by a fixed slope a head."""

from __future__ import annotations

import torch
from torch import Tensor


def slopes(heads: int, device: torch.device) -> Tensor:
    """[H] fp32: 2^(-8/H), 2^(-16/H), .. 2^-8 where H is a power of two.

    Else, as in the authors' code, those of the next lower power P, then the first, third, .. of 2 P.
    """
    power = 1 << (heads.bit_length() - 1)
    head = torch.arange(heads, device=device, dtype=torch.float64)
    exponents = torch.where(head < power, (head + 1) / power, (2 * (head - power) + 1) / (2 * power))
    return torch.exp2(-8 * exponents).to(torch.float32)
