"""Speed of the kernels on a GPU, against PyTorch's and, where there, others: `python -m kernels.bench_gpu`.

Times are medians of calls timed by CUDA events after warming up, the cache of the card flushed before each; first
calls, which compile, are not in them. FLOPs are those of the visible pairs, backward 2.5 times forward: five products
instead of two. The table goes into docs/kernels_gpu.md with `--write`.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kernels import backend, bench_gpu_state
from kernels.attention.op import attention, attention_flops, moved_bytes
from kernels.record import rewrite

HEADS, GROUPS, TOKENS = 32, 8, 16_384
HEAD = "| what | D | T | S | who | ms | TFLOP/s | of matmul | GB/s |"


@dataclass(frozen=True)
class Problem:
    """Causal attention in bf16, HEADS query heads on GROUPS key heads, TOKENS queries in all or one a sequence."""

    what: str
    width: int
    queries: int
    keys: int
    window: int | None = None
    backward: bool = False

    @property
    def batch(self) -> int:
        """Sequences."""
        return 16 if self.queries == 1 else max(1, TOKENS // self.queries)

    def inputs(self) -> list[Tensor]:
        """q, k, v as `attention` takes them, and the gradient of the result."""
        shapes = [(self.queries, HEADS), (self.keys, GROUPS), (self.keys, GROUPS), (self.queries, HEADS)]
        made = [torch.randn(self.batch, *s, self.width, device="cuda", dtype=torch.bfloat16) for s in shapes]
        return [t.requires_grad_(self.backward) for t in made[:3]] + made[3:]

    def work(self) -> tuple[float, int]:
        """FLOPs of the visible pairs, and the bytes that must move at least, in the backward pass twice as many."""
        q, k = (self.batch, self.queries, HEADS, self.width), (self.batch, self.keys, GROUPS, self.width)
        forward, moved = attention_flops(q, k, k, True, self.window).value, moved_bytes(q, k, k, element_size=2)
        return (2.5 * forward, 2 * moved) if self.backward else (forward, moved)


def problems() -> Iterator[Problem]:
    """Every line of the table."""
    for width in (64, 128):
        for backward in (False, True):
            what = "backward" if backward else "forward"
            for time_ in (1024, 2048, 4096, 8192, 16_384, 32_768):
                yield Problem(what, width, time_, time_, backward=backward)
            yield Problem(f"{what}, window 1024", width, 16_384, 16_384, 1024, backward)
        for keys in (1024, 8192, 32_768):
            yield Problem("decode", width, 1, keys)


def rivals() -> dict[str, Callable]:
    """Name -> function of (q, k, v, window) over [B, T, H, K]."""
    found: dict[str, Callable] = {"this project": _ours}
    kinds = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
    found |= {f"sdpa {kind.name.removesuffix('_ATTENTION').lower()}": partial(_sdpa, kind) for kind in kinds}
    for name, module, function in (
        ("flash-attn", "flash_attn", _flash_attn),
        ("flash-linear-attention", "fla.ops.attn", _fla),
    ):
        try:
            found[name] = partial(function, importlib.import_module(module))
        # A package that does not fit this torch or triton may raise anything.
        except Exception as error:
            print(f"{name} cannot be imported: left out ({error})", file=sys.stderr)
    return found


def _ours(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    with backend.using("triton"):
        return attention(q, k, v, window=window)


def _sdpa(kind: SDPBackend, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    if window is not None:
        raise NotImplementedError("no window")
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    with sdpa_kernel(kind):
        return scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, enable_gqa=True).transpose(1, 2)


def _flash_attn(module: Any, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    left = -1 if window is None else window - 1
    return module.flash_attn_func(q, k, v, causal=True, window_size=(left, 0 if left >= 0 else -1))


def _fla(module: Any, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    if q.shape[1] == 1:
        raise NotImplementedError("no decode")
    return module.parallel_attn(q, k, v, window_size=window)


def median_ms(call: Callable[[], object], budget_s: float = 0.15) -> float:
    """Median time of a call on the device, the L2 cache flushed before each."""
    flush = torch.empty(64 * 2**20, dtype=torch.int32, device="cuda")
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    times: list[float] = []
    end = time.perf_counter() + budget_s
    while len(times) < 5 or (time.perf_counter() < end and len(times) < 50):
        flush.zero_()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def matmul_peak() -> float:
    """TFLOP/s of a square product of 8192 in bf16: what the card gives, not what its maker says."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / median_ms(lambda: a @ b, 1.0) / 1e9


def measure(problem: Problem, run: Callable) -> float:
    """Milliseconds of the forward or of the backward pass alone."""
    q, k, v, dy = problem.inputs()
    if not problem.backward:
        return median_ms(lambda: run(q, k, v, problem.window))
    y = run(q, k, v, problem.window)
    return median_ms(lambda: torch.autograd.grad(y, (q, k, v), dy, retain_graph=True))


def line(problem: Problem, name: str, run: Callable, peak: float) -> str:
    """A row of the table; what a rival does not have is said in its place."""
    start = f"| {problem.what} | {problem.width} | {problem.queries} | {problem.keys} | {name} |"
    return timed(start, lambda: measure(problem, run), problem.work(), peak)


def timed(start: str, measured: Callable[[], float], work: tuple[float, int], peak: float) -> str:
    """The rest of a row: milliseconds, and the rates of `work`, (FLOPs, bytes)."""
    try:
        ms = measured()
    # Triton's own errors, and whatever a rival raises: one row, not the table.
    except Exception as error:
        torch.cuda.empty_cache()
        said = (str(error).splitlines() or [type(error).__name__])[0]
        return f"{start} {said[:60].replace('|', '/')} | | | |"
    flops, moved = work
    rate = flops / ms / 1e9
    return f"{start} {ms:.3f} | {rate:.0f} | {rate / peak:.0%} | {moved / ms / 1e6:.0f} |"


def table(seconds: float) -> Iterator[str]:
    """The heading and the rows, as long as there is time."""
    peak, end = matmul_peak(), time.perf_counter() + seconds
    yield (
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, measured bf16 matmul peak {peak:.0f} TFLOP/s; "
        f"{HEADS} query heads on {GROUPS} key heads, bf16, causal."
    )
    yield ""
    yield HEAD
    yield "|---" * 9 + "|"
    others = rivals()
    for problem in problems():
        for name, run in others.items():
            if time.perf_counter() > end:
                print(f"out of time before {problem}", file=sys.stderr)
                return
            if name == "sdpa math" and problem.keys > 4096:
                continue
            yield line(problem, name, run, peak)
    for other in bench_gpu_state.problems():
        if time.perf_counter() > end:
            print(f"out of time before {other}", file=sys.stderr)
            return
        start = f"| {other.what} | {other.width} | {other.time} | | {other.who} |"
        yield timed(start, partial(lambda call: median_ms(call()), other.call), other.work(), peak)


def main(arguments: list[str] | None = None) -> int:
    """Print the table, and keep it in the docs when asked to."""
    parser = argparse.ArgumentParser(description="The kernels on a GPU, measured.")
    parser.add_argument("--write", action="store_true", help="put the table into docs/kernels_gpu.md")
    parser.add_argument("--seconds", type=float, default=240.0, help="stop after so long")
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("kernels.bench_gpu needs a GPU", file=sys.stderr)
        return 1
    rows = []
    for row in table(given.seconds):
        print(row, flush=True)
        rows.append(row)
    if given.write:
        rewrite("measured", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
