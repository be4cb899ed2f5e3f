"""The channel mixers of a block."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, relu, silu

from mixers.parts import mark

Kind = Literal["swiglu", "geglu", "gelu", "relu2", "none"]
_GATES = {"swiglu": silu, "geglu": lambda x: gelu(x, approximate="tanh")}
_ACTIVATIONS = {"gelu": gelu, "relu2": lambda x: relu(x).square()}


def mlp(kind: Kind, d_model: int, width: int | None, bias: bool) -> nn.Module:
    """[B, T, D] -> [B, T, D].

    Args:
        kind: "swiglu" or "geglu": down(act(gate(x)) * up(x)) (Shazeer 2020, arXiv:2002.05202);
            "gelu": down(gelu(up(x))); "relu2": down(relu(up(x))^2) (So et al. 2021, arXiv:2109.08668).
        width: of the hidden layer; None: 8/3 d_model rounded up to a multiple of 8 with a gate, else 4 d_model.
    Raises:
        ValueError: width below 1.
    """
    gated = kind in _GATES
    if width is None:
        width = -(-8 * d_model // 3 // 8) * 8 if gated else 4 * d_model
    if width < 1:
        raise ValueError(f"mlp_width={width} must be at least 1")
    return GatedMLP(kind, d_model, width, bias) if gated else MLP(kind, d_model, width, bias)


class GatedMLP(nn.Module):
    """A gated linear unit; gate and up are one product."""

    def __init__(self, kind: Kind, d_model: int, width: int, bias: bool):
        super().__init__()
        self.act = _GATES[kind]
        self.up = nn.Linear(d_model, 2 * width, bias=bias)
        self.down = mark(nn.Linear(width, d_model, bias=bias), residual=True)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        gate, up = self.up(x).chunk(2, -1)
        return self.down(self.act(gate) * up)


class MLP(nn.Module):
    """Two layers with an activation between them."""

    def __init__(self, kind: Kind, d_model: int, width: int, bias: bool):
        super().__init__()
        self.act = _ACTIVATIONS[kind]
        self.up = nn.Linear(d_model, width, bias=bias)
        self.down = mark(nn.Linear(width, d_model, bias=bias), residual=True)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        return self.down(self.act(self.up(x)))


def norm(kind: Literal["rmsnorm", "layernorm"], d_model: int, bias: bool, eps: float | None = None) -> nn.Module:
    """The norm in front of a sublayer."""
    if kind == "rmsnorm":
        return nn.RMSNorm(d_model, eps=torch.finfo(torch.float32).eps if eps is None else eps)
    return nn.LayerNorm(d_model, bias=bias, eps=1e-5 if eps is None else eps)
