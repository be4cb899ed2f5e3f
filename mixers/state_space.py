"""What Mamba and Mamba-2 share: a short convolution in front of a state, step sizes, and how both start.

Parameters have the names and shapes of the published code, so that its state_dicts load as they are.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from mixers.base import Mixer, State
from mixers.convolution import convolve

# The published floor of step sizes at the start.
FLOOR = 1e-4


class StateSpace(Mixer):
    """A mixer with a convolution of its own (`conv1d`) and a recurrent state of constant size.

    Args:
        channels: of the convolution.
        d_conv: its taps W; 1: none but the present token.
        conv_bias: does it have a bias?
        state_shape: of one row.
    """

    has_convolution = True

    def __init__(self, channels: int, d_conv: int, conv_bias: bool, state_shape: tuple[int, ...]):
        super().__init__()
        self.conv1d = nn.Conv1d(channels, channels, d_conv, groups=channels, bias=conv_bias)
        self.state_shape = state_shape

    def empty(self, batch: int, like: Tensor) -> dict[str, Tensor]:
        """The last W - 1 inputs of the convolution, and the state, at least fp32."""
        wide = torch.promote_types(like.dtype, torch.float32)
        return {
            "tail": like.new_zeros(batch, self.conv1d.kernel_size[0] - 1, self.conv1d.in_channels),
            "state": like.new_zeros(batch, *self.state_shape, dtype=wide),
        }

    def convolved(self, x: Tensor, past: State | None, documents: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        """silu of the convolution of x [B, T, channels], and its tail."""
        y, kept = convolve(x, self.conv1d.weight[:, 0].t(), self.conv1d.bias, past, documents)
        return silu(y), kept


def begun(past: State | None) -> Tensor | None:
    """The state that `past` holds; None before any token, where kernels need not read zeros."""
    return past["state"] if past is not None and past.length else None


def check_sizes(**sizes: int | None) -> None:
    """Raises ValueError for a size below 1; None: chosen by the mixer."""
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ValueError(f"{name}={size} must be at least 1")


def step_bias(count: int, dt_min: float, dt_max: float) -> Tensor:
    """[count] whose softplus is log-uniform between dt_min and dt_max: the published start of step sizes.

    Raises:
        ValueError: not FLOOR <= dt_min <= dt_max.
    Source: Gu and Dao 2023, arXiv:2312.00752, section 3.6.
    """
    if not FLOOR <= dt_min <= dt_max:
        raise ValueError(f"dt_min={dt_min} and dt_max={dt_max} must be {FLOOR} <= dt_min <= dt_max")
    steps = torch.exp(torch.empty(count).uniform_(math.log(dt_min), math.log(dt_max)))
    # The inverse of the softplus.
    return steps + torch.log(-torch.expm1(-steps))
