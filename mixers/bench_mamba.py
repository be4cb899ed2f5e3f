"""`python -m mixers.bench_mamba`: Mamba on a CPU against what people use there, as in `kernels.bench`.

Mamba-1 is the scan alone, 256 channels of 16 states; Mamba-2 the whole mixer, 256 wide, as transformers builds it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from kernels.bench import Row, both, forward, measure, rounds_asked
from kernels.ssm.scan import selective_scan

WIDTH, STATE = 256, 16


def scan_inputs(length: int) -> list[Tensor]:
    """x, dt in [1e-3, 1e-1], a, b, c of Mamba-1."""
    x, dt = torch.randn(1, length, WIDTH), torch.exp(torch.rand(1, length, WIDTH) * math.log(100)) / 1000
    a = -torch.arange(1.0, STATE + 1).repeat(WIDTH, 1)
    return [t.requires_grad_() for t in (x, dt, a, *torch.randn(2, 1, length, STATE).unbind())]


def scan(*inputs: Tensor) -> Tensor:
    """Ours, from a zero state."""
    return selective_scan(*inputs, return_state=False)[0]


def scan_rows() -> Iterator[Row]:
    """Mamba-1's core."""
    for name, function, length, bars, memory in scan_peers():
        inputs = scan_inputs(length)
        for kind, call, bar in (("forward", forward, bars[0]), ("forward + backward", both, bars[1])):
            label = f"selective scan {kind}, T {length}"
            yield Row(label, name, call(scan, inputs), call(function, inputs), bar, memory)


def scan_peers() -> Iterator[tuple[str, Callable[..., Tensor], int, tuple[float, float], float | None]]:
    """What is installed: name, function, length, least ratios of forward and both, largest share of the memory."""
    if find_spec("transformers") is not None:
        slow = import_module("transformers.models.mamba.modeling_mamba").mamba_selective_scan
        slow = getattr(slow, "__wrapped__", slow)
        yield "transformers, slow path", lambda *t: slow(*(turned(t))).transpose(1, 2), 512, (2, 25), None
    if find_spec("mambapy") is not None:
        pscan = import_module("mambapy.pscan").pscan

        def parallel(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
            steps = dt[..., None]
            states = pscan(torch.exp(steps * a), steps * b[:, :, None] * x[..., None])
            return (states @ c[..., None])[..., 0]

        yield "mambapy, parallel scan", parallel, 2048, (3, 3), 0.25


def turned(tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """Time last, as their functions want it; a [D, N] as it is."""
    return [t.transpose(1, 2) if t.dim() == 3 else t for t in tensors]


def main() -> None:
    """The command line."""
    rounds = rounds_asked(__doc__ or "")
    for line in measure(scan_rows(), rounds):
        print(line, flush=True)


if __name__ == "__main__":
    main()
