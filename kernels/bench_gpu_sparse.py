"""Speed of NSA and additive attention on a GPU: `python -m kernels.bench_gpu_sparse`.

NSA's branches (the paper's blocks, keys and values of their own, no projections) against flash attention on the same
heads, from short to long, and the length from which NSA is the faster one; `parallel_nsa` of flash-linear-attention,
where it can be imported, compresses without overlap and is a comparator of speed alone. Additive attention, with the
exact and the approximate tanh, against full broadcasting. Times as in `kernels.bench_gpu`; with `--write` the table
goes into docs/kernels_gpu.md.
"""

from __future__ import annotations

import argparse
import importlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kernels import backend
from kernels.additive.op import Tanh, additive_attention
from kernels.attention.op import attention
from kernels.bench_gpu import median_ms
from kernels.record import rewrite
from kernels.sparse.op import compressed_attention, selected_attention

# NSA: section 4.1 of the paper has 64 query heads on 4 key heads.
HEADS, GROUPS, WIDTH = 64, 4, 128
BLOCK, STRIDE, SELECT_BLOCK, N_SELECTED, WINDOW = 32, 16, 64, 16, 512
LENGTHS = (1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)
HEAD = "| what | T | who | forward ms | forward + backward ms |"
OURS, FLASH = "this project", "sdpa flash"

Run = Callable[..., Tensor]


def nsa(q: Tensor, *keys: Tensor) -> Tensor:
    """The three branches, ungated: q [B, T, H, K], then keys and values of each, compressed ones first."""
    compressed_k, compressed_v, selected_k, selected_v, window_k, window_v = keys
    y, chosen = compressed_attention(
        q, compressed_k, compressed_v, block=BLOCK, stride=STRIDE, n_selected=N_SELECTED, select_block=SELECT_BLOCK
    )
    y = y + selected_attention(q, selected_k, selected_v, chosen, block=SELECT_BLOCK)
    return y + attention(q, window_k, window_v, window=WINDOW)


def flash(q: Tensor, *keys: Tensor) -> Tensor:
    """Full causal attention to the last pair of keys and values."""
    q, k, v = (t.transpose(1, 2) for t in (q, *keys[-2:]))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def peer(function: Run, q: Tensor, *keys: Tensor) -> Tensor:
    """flash-linear-attention's NSA."""
    gates = q.new_ones(q.shape[:3])
    sizes = dict(block_counts=N_SELECTED, block_size=SELECT_BLOCK, window_size=WINDOW)
    return function(q, *keys[-2:], gates, gates, gates, **sizes)


def sparse_inputs(length: int) -> list[Tensor]:
    """One sequence: queries, and keys and values of the three branches."""
    blocks = (length - BLOCK) // STRIDE + 1
    shapes = [(length, HEADS), *[(blocks, GROUPS)] * 2, *[(length, GROUPS)] * 4]
    made = (torch.randn(1, *shape, WIDTH, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    return [t.requires_grad_() for t in made]


def broadcast(*inputs: Tensor) -> Tensor:
    """Additive attention over all pairs and channels at once."""
    with backend.using("reference"):
        return additive_attention(*inputs)


def additive(tanh: Tanh, *inputs: Tensor) -> Tensor:
    """Additive attention on our kernels."""
    return additive_attention(*inputs, tanh=tanh)


def additive_inputs(length: int) -> list[Tensor]:
    """q, k, v of one sequence with 8 heads of 64 channels, and the weight."""
    made = [torch.randn(1, length, 8, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    return [t.requires_grad_() for t in (*made, torch.randn(8, 64, device="cuda") / 8)]


def problems() -> Iterator[tuple[str, int, Callable[[int], list[Tensor]], dict[str, Run]]]:
    """What, length, inputs of a length, and who takes part."""
    takers: dict[str, Run] = {OURS: nsa, FLASH: flash}
    try:
        takers["flash-linear-attention"] = partial(peer, importlib.import_module("fla.ops.nsa").parallel_nsa)
    # A package that does not fit this torch or triton may raise anything.
    except Exception as error:
        print(f"flash-linear-attention cannot be imported: left out ({error})", file=sys.stderr)
    for length in LENGTHS:
        yield "nsa", length, sparse_inputs, takers
    for length in (512, 2048, 8192):
        names: dict[str, Run] = {OURS: partial(additive, "exact"), "approximate tanh": partial(additive, "approximate")}
        # 8 heads of 8192 tokens would take 69 GB in bf16.
        yield "additive", length, additive_inputs, names | ({"full broadcasting": broadcast} if length < 8192 else {})


def measure(run: Run, inputs: Sequence[Tensor]) -> tuple[float, float]:
    """Milliseconds forward, and forward and backward."""
    dy = torch.randn_like(inputs[0])

    def both() -> object:
        return torch.autograd.grad(run(*inputs), inputs, dy, allow_unused=True)

    with torch.no_grad():
        forward = median_ms(lambda: run(*inputs))
    return forward, median_ms(both)


def crossover(lengths: Sequence[int], ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """The length from which ours stays below theirs, between two of the lengths by straight lines in logarithms."""
    gaps = [math.log(a / b) for a, b in zip(ours, theirs, strict=True)]
    if not gaps or gaps[-1] >= 0:
        return None
    last = max((i for i, gap in enumerate(gaps) if gap >= 0), default=-1)
    if last < 0:
        return float(lengths[0])
    low, high = math.log(lengths[last]), math.log(lengths[last + 1])
    return math.exp(low + (high - low) * gaps[last] / (gaps[last] - gaps[last + 1]))


def verdicts(found: dict[str, dict[int, tuple[float, float]]]) -> Iterator[str]:
    """From which length on NSA is faster, by the times of both at each length."""
    common = sorted(set(found.get(OURS, {})) & set(found.get(FLASH, {})))
    for i, what in enumerate(("forward", "forward + backward")):
        length = crossover(common, *([found[name][n][i] for n in common] for name in (OURS, FLASH)))
        reach = f"not up to {common[-1]}" if common else "not measured"
        yield f"NSA is faster than flash attention, {what}: {reach if length is None else f'from T {length:.0f} on'}."


def table(seconds: float) -> Iterator[str]:
    """The heading, the rows as long as there is time, and the crossover lengths."""
    end = time.perf_counter() + seconds
    found: dict[str, dict[int, tuple[float, float]]] = {}
    yield f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, causal, one sequence; NSA: {HEADS} query "
    yield f"heads on {GROUPS}, D {WIDTH}, the paper's blocks; additive: 8 heads, A 64."
    yield from ("", HEAD, "|---" * 5 + "|")
    for what, length, inputs, takers in problems():
        for name, run in takers.items():
            if time.perf_counter() > end:
                print(f"out of time before {what}, T {length}", file=sys.stderr)
                break
            try:
                times = measure(run, inputs(length))
            # Triton's own errors, and whatever a rival raises: one row, not the table.
            except Exception as error:
                torch.cuda.empty_cache()
                said = (str(error).splitlines() or [type(error).__name__])[0]
                yield f"| {what} | {length} | {name} | {said[:60].replace('|', '/')} | |"
                continue
            if what == "nsa":
                found.setdefault(name, {})[length] = times
            yield f"| {what} | {length} | {name} | {times[0]:.3f} | {times[1]:.3f} |"
    yield ""
    yield from verdicts(found)


def main(arguments: list[str] | None = None) -> int:
    """Print the table, and keep it in the docs when asked to."""
    parser = argparse.ArgumentParser(description="NSA and additive attention on a GPU, measured.")
    parser.add_argument("--write", action="store_true", help="put the table into docs/kernels_gpu.md")
    parser.add_argument("--seconds", type=float, default=120.0, help="stop after so long")
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("kernels.bench_gpu_sparse needs a GPU", file=sys.stderr)
        return 1
    rows = []
    for row in table(given.seconds):
        print(row, flush=True)
        rows.append(row)
    if given.write:
        rewrite("measured sparse", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
