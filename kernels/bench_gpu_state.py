"""What `kernels.bench_gpu` measures of the selective scan and the causal convolution; bf16, rows of TOKENS in all.

mamba-ssm and causal-conv1d are the peers where they can be imported; each gets its tensors as it likes them best.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels import backend
from kernels.conv.op import causal_conv, causal_conv_flops
from kernels.ssm.scan import selective_scan, selective_scan_flops

TOKENS, STATES, TAPS = 16_384, 16, 4


@dataclass(frozen=True)
class Problem:
    """One op over [TOKENS / T, T, D] or, for T = 1, 16 rows; `run` of `inputs`, or with backward all its gradients."""

    what: str
    width: int
    time: int
    who: str
    run: Callable[..., Tensor]
    inputs: Callable[[int, int, int], list[Tensor]]
    backward: bool

    def call(self) -> Callable[[], Any]:
        """What is to be timed."""
        batch = 16 if self.time == 1 else max(1, TOKENS // self.time)
        inputs = [t.requires_grad_(self.backward) for t in self.inputs(batch, self.time, self.width)]
        y = self.run(*inputs)
        if not self.backward:
            return partial(self.run, *inputs)
        return partial(torch.autograd.grad, y, inputs, torch.randn_like(y), retain_graph=True)

    def work(self) -> tuple[float, int]:
        """FLOPs, and the bytes that must move at least: x, y and steps; twice both in the backward pass."""
        shape = (16 if self.time == 1 else max(1, TOKENS // self.time), self.time, self.width)
        scan = self.what.startswith("scan")
        flops = selective_scan_flops(shape, STATES) if scan else causal_conv_flops(shape, TAPS)
        moved = (8 if scan else 4) * shape[0] * self.time * self.width
        return (1 + self.backward) * flops.value, (1 + self.backward) * moved


def problems() -> Iterator[Problem]:
    """Every line of the table."""
    for what, table in (("scan, N 16", scans()), ("convolution, W 4", convolutions())):
        for backward in (False, True):
            for time in (1, 1024, 4096, 16_384):
                if time == 1 and backward:
                    continue
                for who, (run, inputs) in table.items():
                    name = f"{what}, {'backward' if backward else 'forward'}"
                    yield Problem(name, 2048, time, who, run, inputs, backward)


def scans() -> dict[str, tuple[Callable, Callable]]:
    """Name -> function and its inputs."""
    found: dict[str, tuple[Callable, Callable]] = {"this project": (_ours_scan, scan_inputs)}
    if module := _importable("mamba_ssm.ops.selective_scan_interface"):
        found["mamba-ssm"] = module.selective_scan_fn, _channels_first
    return found


def convolutions() -> dict[str, tuple[Callable, Callable]]:
    """Name -> function and its inputs."""
    found: dict[str, tuple[Callable, Callable]] = {"this project": (_ours_convolution, convolution_inputs)}
    if module := _importable("causal_conv1d"):
        found["causal-conv1d"] = partial(_causal_conv1d, module), convolution_inputs
    return found


def _importable(name: str) -> Any:
    """The module, or None."""
    try:
        return importlib.import_module(name)
    # A package that does not fit this torch may raise anything.
    except Exception as error:
        print(f"{name} cannot be imported: left out ({error})", file=sys.stderr)
        return None


def scan_inputs(batch: int, time: int, width: int) -> list[Tensor]:
    """x, dt, a, b, c."""
    make = partial(torch.randn, device="cuda")
    x, b, c = (make(batch, time, n, dtype=torch.bfloat16) for n in (width, STATES, STATES))
    return [x, make(batch, time, width).square() / 10, -make(width, STATES).square() - 0.1, b, c]


def _channels_first(batch: int, time: int, width: int) -> list[Tensor]:
    """The same for mamba-ssm: [B, D, T] and [B, N, T], all bf16 but a."""
    x, dt, a, b, c = scan_inputs(batch, time, width)
    x, dt, b, c = (t.to(torch.bfloat16).transpose(1, 2).contiguous() for t in (x, dt, b, c))
    return [x, dt, a, b, c]


def _ours_scan(*inputs: Tensor) -> Tensor:
    with backend.using("triton"):
        return selective_scan(*inputs, return_state=False)[0]


def convolution_inputs(batch: int, time: int, width: int) -> list[Tensor]:
    """x, weight, bias."""
    make = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    return [make(batch, time, width), make(TAPS, width), make(width)]


def _ours_convolution(*inputs: Tensor) -> Tensor:
    with backend.using("triton"):
        return causal_conv(*inputs)


def _causal_conv1d(module: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return module.causal_conv1d_fn(x.transpose(1, 2), weight.t().contiguous(), bias).transpose(1, 2)
