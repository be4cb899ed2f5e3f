"""`python -m kernels.bench_gpu_linear`: linear attention on a GPU, against flash-linear-attention.

Medians as in `kernels.bench_gpu`; bf16, causal, 16 heads of 64 or 128, 16,384 tokens in all, a scalar gate a head and
token. Not run on a device yet.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from kernels import backend
from kernels.bench_gpu import median_ms
from kernels.linear.op import linear_attention

HEADS, TOKENS = 16, 16_384


def ours(name: str) -> Callable[..., Tensor]:
    """Our op on an implementation."""

    def run(q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
        with backend.using(name):
            return linear_attention(q, k, v, normalise=False, log_decay=gates, return_state=False)[0]

    return run


def rivals() -> dict[str, Callable[..., Tensor]]:
    """Name -> function of (q, k, v, gates)."""
    found = {"this project": ours("triton"), "plain PyTorch": ours("portable")}
    try:
        chunk = importlib.import_module("fla.ops.simple_gla").chunk_simple_gla
        found["flash-linear-attention"] = lambda q, k, v, gates: chunk(q, k, v, g=gates, scale=1.0)[0]
    # A package that does not fit this torch or triton may raise anything.
    except Exception as error:
        print(f"flash-linear-attention cannot be imported: left out ({error})", file=sys.stderr)
    return found


def lines() -> Iterator[str]:
    """The table."""
    yield f"{torch.cuda.get_device_name()}, torch {torch.__version__}; ms"
    yield "| D | T | who | forward | backward |"
    yield "|---|---|---|---|---|"
    for width in (64, 128):
        for time in (2048, 16_384):
            shape = (TOKENS // time, time, HEADS, width)
            q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3))
            gates = logsigmoid(torch.randn(shape[:3], device="cuda") + 3).requires_grad_()
            for name, run in rivals().items():
                inputs = (q, k, v, gates)
                forward, y = median_ms(partial(run, *inputs)), run(*inputs)
                backward = median_ms(partial(torch.autograd.grad, y, inputs, torch.randn_like(y), retain_graph=True))
                yield f"| {width} | {time} | {name} | {forward:.3f} | {backward:.3f} |"


def main() -> int:
    """Print the table."""
    if not torch.cuda.is_available():
        print("kernels.bench_gpu_linear needs a GPU", file=sys.stderr)
        return 1
    for line in lines():
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
