"""Mamba-2 (Dao and Gu 2024, arXiv:2405.21060)."""

from __future__ import annotations

from typing import Literal

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from kernels.ssm.ssd import ssd
from mixers.base import Memory, State
from mixers.parts import divisor_up_to, mark
from mixers.registry import register
from mixers.state_space import StateSpace, begun, check_sizes, step_bias

Norm = Literal["after_gate", "before_gate", "none"]


@register("mamba2")
class Mamba2(StateSpace):
    """Heads of a state space with one decay each, behind a short convolution, gated and normed (section 7, figure 6).

    Args:
        d_model: width D of the residual stream.
        d_state: N; each head's state is head_dim x N.
        d_conv: taps of the convolution over x, B and C.
        expand: n_heads * head_dim = expand * D where n_heads is not given.
        head_dim: P, channels of a head; None: the largest divisor of expand * D up to 64.
        n_heads: None: expand * D / head_dim.
        n_groups: heads of a group share B and C, and the norm is taken over the channels of a group.
        dt_min, dt_max: range of the step sizes at the start.
        dt_floor: steps below it are raised to it (Zamba2 and Nemotron-H: 0.001).
        a_min, a_max: range of the decay rates at the start.
        norm: RMSNorm behind the gate or in front of it, or none.
        conv_bias: of the convolution.
        bias: of the projections from and to the residual stream.
    Raises:
        ValueError: sizes below 1 or that do not divide, or ranges that are none.
    """

    def __init__(
        self,
        d_model: int,
        *,
        d_state: int = 128,
        d_conv: int = 4,
        expand: int = 2,
        head_dim: int | None = None,
        n_heads: int | None = None,
        n_groups: int = 1,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_floor: float = 0.0,
        a_min: float = 1.0,
        a_max: float = 16.0,
        norm: Norm = "after_gate",
        conv_bias: bool = True,
        bias: bool = False,
    ):
        check_sizes(d_model=d_model, d_state=d_state, d_conv=d_conv, expand=expand, n_groups=n_groups)
        n_heads, head_dim = _heads(expand * d_model, head_dim, n_heads, n_groups)
        if not 0 < a_min <= a_max:
            raise ValueError(f"a_min={a_min} and a_max={a_max} must be 0 < a_min <= a_max")
        if dt_floor < 0:
            raise ValueError(f"dt_floor={dt_floor} must be at least 0")
        inner = n_heads * head_dim
        channels = inner + 2 * n_groups * d_state
        super().__init__(channels, d_conv, conv_bias, (n_heads, head_dim, d_state))
        self.n_heads, self.head_dim, self.n_groups, self.d_state = n_heads, head_dim, n_groups, d_state
        self.dt_floor = dt_floor
        self.in_proj = nn.Linear(d_model, inner + channels + n_heads, bias=bias)
        self.dt_bias = nn.Parameter(step_bias(n_heads, dt_min, dt_max))
        self.A_log = nn.Parameter(torch.empty(n_heads).uniform_(a_min, a_max).log())
        self.D = nn.Parameter(torch.ones(n_heads))
        mark(self, own_init=True, no_decay=True)
        self.norm = None if norm == "none" else GatedNorm(inner, n_groups, before_gate=norm == "before_gate")
        self.out_proj = mark(nn.Linear(inner, d_model, bias=bias), residual=True)

    def mix(
        self, x: Tensor, past: State | None, documents: Tensor | None, memory: Memory | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See `Mixer.mix`."""
        wide = torch.promote_types(x.dtype, torch.float32)
        inner, shared = self.n_heads * self.head_dim, self.n_groups * self.d_state
        gate, x, dt = self.in_proj(x).split([inner, inner + 2 * shared, self.n_heads], -1)
        x, kept = self.convolved(x, past, documents)
        x, b, c = x.split([inner, shared, shared], -1)
        # Steps and decays stay wide, whatever the precision of the rest.
        dt = softplus(dt.to(wide) + self.dt_bias.to(wide)).clamp(min=self.dt_floor)
        y, state = ssd(
            rearrange(x, "b t (h p) -> b t h p", h=self.n_heads),
            dt,
            -self.A_log.to(wide).exp(),
            *(rearrange(t, "b t (g n) -> b t g n", g=self.n_groups) for t in (b, c)),
            d=self.D.to(wide),
            state=begun(past),
            documents=documents,
            document=None if past is None else past.get("document"),
            return_state=past is not None,
            # Sums of fp16 may be beyond it, where the norm brings them back.
            dtype=wide,
        )
        y = rearrange(y, "b t h p -> b t (h p)")
        y = self.out_proj((y * silu(gate)).to(x.dtype) if self.norm is None else self.norm(y, gate))
        return y, {} if state is None else kept | {"state": state}


class GatedNorm(nn.Module):
    """RMSNorm over the channels of each group, with a gate y silu(z) in front of it or behind it.

    Args:
        width: channels.
        groups: how many parts are normed apart.
        before_gate: norm first.
    """

    def __init__(self, width: int, groups: int, before_gate: bool):
        super().__init__()
        self.groups, self.before_gate = groups, before_gate
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, y: Tensor, gate: Tensor) -> Tensor:
        """[.., D] and its gate -> [.., D] of the gate's dtype, computed in at least fp32."""
        wide = torch.promote_types(y.dtype, torch.float32)
        out, act = y.to(wide), silu(gate.to(wide))
        if not self.before_gate:
            out = out * act
        parts = out.unflatten(-1, (self.groups, -1))
        out = (parts * (parts.square().mean(-1, keepdim=True) + 1e-5).rsqrt()).flatten(-2) * self.weight
        return (out * act if self.before_gate else out).to(gate.dtype)


def _heads(inner: int, head_dim: int | None, n_heads: int | None, n_groups: int) -> tuple[int, int]:
    """How many heads, and their width."""
    check_sizes(head_dim=head_dim, n_heads=n_heads)
    if head_dim is None:
        head_dim = 64 if n_heads else divisor_up_to(inner, 64)
    if n_heads is None:
        if inner % head_dim:
            raise ValueError(f"head_dim={head_dim} must divide expand * d_model = {inner}")
        n_heads = inner // head_dim
    if n_heads % n_groups:
        raise ValueError(f"n_groups={n_groups} must divide the {n_heads} heads")
    return n_heads, head_dim
