"""Mamba (Gu and Dao 2023, arXiv:2312.00752)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu, softplus

from kernels.ssm.scan import selective_scan
from mixers.base import Memory, State
from mixers.parts import mark, normed
from mixers.registry import register
from mixers.state_space import StateSpace, begun, check_sizes, step_bias


@register("mamba")
class Mamba(StateSpace):
    """A selective state space a channel, behind a short convolution and gated (section 3.4, figure 3).

    Args:
        d_model: width D of the residual stream; the state has expand * D channels.
        d_state: N, the size of each channel's state.
        d_conv: taps of the convolution.
        expand: channels a channel of the residual stream.
        dt_rank: rank of the map from the input to step sizes; None: D / 16, rounded up.
        dt_min, dt_max: range of the step sizes at the start.
        conv_bias: of the convolution.
        bias: of the projections from and to the residual stream.
        inner_norm: RMSNorm of the low-rank step sizes, B and C (Lieber et al. 2024, arXiv:2403.19887, section 6.4).
    Raises:
        ValueError: a size below 1, or dt_min and dt_max that are no range.
    """

    def __init__(
        self,
        d_model: int,
        *,
        d_state: int = 16,
        d_conv: int = 4,
        expand: int = 2,
        dt_rank: int | None = None,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        conv_bias: bool = True,
        bias: bool = False,
        inner_norm: bool = False,
    ):
        check_sizes(d_model=d_model, d_state=d_state, d_conv=d_conv, expand=expand, dt_rank=dt_rank)
        inner = expand * d_model
        super().__init__(inner, d_conv, conv_bias, (inner, d_state))
        self.d_state = d_state
        self.dt_rank = math.ceil(d_model / 16) if dt_rank is None else dt_rank
        self.in_proj = nn.Linear(d_model, 2 * inner, bias=bias)
        self.x_proj = nn.Linear(inner, self.dt_rank + 2 * d_state, bias=False)
        self.dt_proj = nn.Linear(self.dt_rank, inner)
        nn.init.uniform_(self.dt_proj.weight, -(self.dt_rank**-0.5), self.dt_rank**-0.5)
        self.dt_proj.bias = nn.Parameter(step_bias(inner, dt_min, dt_max))
        mark(self.dt_proj, own_init=True)
        mark(self.dt_proj, "bias", no_decay=True)
        self.A_log = nn.Parameter(torch.arange(1.0, d_state + 1).log().repeat(inner, 1))
        self.D = nn.Parameter(torch.ones(inner))
        mark(self, own_init=True, no_decay=True)
        self.out_proj = mark(nn.Linear(inner, d_model, bias=bias), residual=True)
        self.inner_norm = inner_norm
        if inner_norm:
            self.dt_layernorm = nn.RMSNorm(self.dt_rank, eps=1e-6)
            self.b_layernorm, self.c_layernorm = (nn.RMSNorm(d_state, eps=1e-6) for _ in range(2))

    def mix(
        self, x: Tensor, past: State | None, documents: Tensor | None, memory: Memory | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See `Mixer.mix`."""
        wide = torch.promote_types(x.dtype, torch.float32)
        x, gate = self.in_proj(x).chunk(2, -1)
        x, kept = self.convolved(x, past, documents)
        dt, b, c = self.x_proj(x).split([self.dt_rank, self.d_state, self.d_state], -1)
        if self.inner_norm:
            dt, b, c = normed(self.dt_layernorm, dt), normed(self.b_layernorm, b), normed(self.c_layernorm, c)
        # Steps, decays and the skip stay wide, whatever the precision of the rest.
        dt = softplus(linear(dt, self.dt_proj.weight).to(wide) + self.dt_proj.bias.to(wide))
        y, state = selective_scan(
            x,
            dt,
            -self.A_log.to(wide).exp(),
            b.to(x.dtype),
            c.to(x.dtype),
            d=self.D.to(wide),
            state=begun(past),
            documents=documents,
            document=None if past is None else past.get("document"),
            return_state=past is not None,
        )
        y = self.out_proj(y * silu(gate))
        return y, {} if state is None else kept | {"state": state}
