"""`python -m kernels.bench`: what the portable ops cost on a CPU, against what people use instead.

The contenders of a row take turns in one process; CPU seconds of all threads count, the median of the rounds. Memory is
the most that the CPU allocator held at once above the inputs, in a run of its own. Ratios below 1.3 are ties: a second
run moves them by that much. The table is kept in docs/kernels_cpu.md.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv1d, scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

from kernels import backend
from kernels.additive.op import additive_attention
from kernels.attention.op import attention
from kernels.conv.op import causal_conv
from kernels.sparse.op import select_blocks, selected_attention

Call = Callable[[], Any]

# The profiler says when it starts and stops.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
        label: what is computed.
        ours, theirs: the contenders; `against` names the other.
        bar: the least ratio theirs / ours that is asked for.
        memory: the largest share of their memory that is asked for; None: any.
    """

    label: str
    against: str
    ours: Call
    theirs: Call
    bar: float
    memory: float | None = None


def cpu_ms(calls: Sequence[Call], rounds: int, between: Call = lambda: None) -> list[float]:
    """CPU milliseconds of each call, taking turns; the first round is not counted, nor what is done between turns."""
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds + 1):
        for call, found in zip(calls, seconds, strict=True):
            between()
            start = time.process_time()
            call()
            found.append(time.process_time() - start)
    return [1e3 * statistics.median(found[1:]) for found in seconds]


def peak_bytes(call: Call) -> int:
    """The most that was allocated at once, above what was there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = call()
    assert recorded.profiler is not None
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    del result
    live = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most


def measure(rows: Iterator[Row], rounds: int, between: Call = lambda: None) -> Iterator[str]:
    """The table, a line at a time; arguments as in `cpu_ms`."""
    yield "| core op (fp32, CPU) | against | ms | theirs | ratio | asked | MB | theirs |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in rows:
        ours, theirs = cpu_ms((row.ours, row.theirs), rounds, between)
        held, other = (peak_bytes(call) / 2**20 for call in (row.ours, row.theirs))
        asked = f"{row.bar:g}x" + ("" if row.memory is None else f", {row.memory:g} of the MB")
        fine = theirs / ours >= row.bar and (row.memory is None or held <= row.memory * other)
        yield (
            f"| {row.label} | {row.against} | {ours:.2f} | {theirs:.2f} | {theirs / ours:.1f}x | "
            f"{asked}{'' if fine else ' **missed**'} | {held:.1f} | {other:.1f} |"
        )


def heads(length: int, count: int = 4, width: int = 64, grad: bool = True) -> list[Tensor]:
    """q, k, v [1, length, H, K]."""
    return [torch.randn(1, length, count, width, requires_grad=grad) for _ in range(3)]


def forward(function: Callable[..., Tensor], inputs: list[Tensor]) -> Call:
    """A call without gradients."""

    def call() -> Tensor:
        with torch.no_grad():
            return function(*inputs)

    return call


def both(function: Callable[..., Tensor], inputs: list[Tensor]) -> Call:
    """A forward and backward pass."""
    weight = torch.randn_like(inputs[0])
    return lambda: torch.autograd.grad(function(*inputs), inputs, weight)


def headed(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function of [B, H, T, K] for tensors [B, T, H, K]."""
    return lambda *tensors: function(*(t.transpose(1, 2) for t in tensors)).transpose(1, 2)


def attention_rows() -> Iterator[Row]:
    """Full and window attention; B 1, H 4, K 64, causal."""
    fused = headed(lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True))
    inputs = heads(2048)
    yield Row("mha forward + backward, T 2048", "SDPA", both(attention, inputs), both(fused, inputs), 0.8)
    inputs = heads(8192)
    distance = torch.arange(8192)[:, None] - torch.arange(8192)
    mask = (distance >= 0) & (distance < 256)
    masked = headed(lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=mask))
    yield Row("window 256 forward, T 8192", "SDPA, bool mask", forward(window, inputs), forward(masked, inputs), 15)
    yield Row("window 256 forward + backward", "SDPA, bool mask", both(window, inputs), both(masked, inputs), 12)
    if find_spec("local_attention") is None:
        return
    # It sees one key more, 257.
    package = import_module("local_attention")
    options = dict(causal=True, look_backward=1, exact_windowsize=True, use_rotary_pos_emb=False)
    local = headed(package.LocalAttention(256, **options))
    name = "local-attention"
    yield Row("window 256 forward, T 8192", name, forward(window, inputs), forward(local, inputs), 4, 0.2)
    yield Row("window 256 forward + backward", name, both(window, inputs), both(local, inputs), 2.5, 0.2)


def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention to the last 256 tokens."""
    return attention(q, k, v, window=256)


def convolution_rows() -> Iterator[Row]:
    """Causal depthwise convolution with 4 taps; B 1, D 512."""
    name = "conv1d as transformers calls it"
    inputs = [torch.randn(shape, requires_grad=True) for shape in ((1, 2048, 512), (4, 512), (512,))]
    yield Row("conv 4 forward, T 2048, D 512", name, forward(causal_conv, inputs), forward(channels_first, inputs), 2)
    yield Row("conv 4 forward + backward", name, both(causal_conv, inputs), both(channels_first, inputs), 2)
    ids = torch.arange(2048).div(500, rounding_mode="floor").int()[None] + 1

    def packed(*tensors: Tensor) -> Tensor:
        return causal_conv(*tensors, documents=ids)

    label = "conv 4 forward + backward, documents"
    yield Row(label, f"{name}, none", both(packed, inputs), both(channels_first, inputs), 1)
    parts = [torch.randn(1, 1, 512), torch.randn(1, 3, 512), *inputs[1:]]
    yield Row("conv 4, a token", f"cat, {name}", forward(step, parts), forward(channels_first_step, parts), 1)


def channels_first(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The convolution of `transformers`' Mamba without kernels, the transposes around it included."""
    taps, width = weight.shape
    y = conv1d(x.transpose(1, 2), weight.t()[:, None], bias, padding=taps - 1, groups=width)
    return y[..., : x.shape[1]].transpose(1, 2)


def channels_first_step(x: Tensor, tail: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A token of it."""
    inputs = torch.cat([tail, x], 1).transpose(1, 2)
    return conv1d(inputs, weight.t()[:, None], bias, groups=weight.shape[1]).transpose(1, 2)


def step(x: Tensor, tail: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A token of ours."""
    return causal_conv(x, weight, bias, tail=tail)


def additive(length: int) -> list[Tensor]:
    """q, k, v [1, length, H, K] and the weight [H, K]."""
    return [*heads(length), (torch.randn(4, 64) / 8).requires_grad_()]


def broadcast(*inputs: Tensor) -> Tensor:
    """Additive attention over all pairs and channels at once."""
    with backend.using("reference"):
        return additive_attention(*inputs)


def additive_rows() -> Iterator[Row]:
    """Additive attention; B 1, H 4, A 64, causal."""
    inputs, name = additive(512), "full broadcasting"
    yield Row("additive forward, T 512", name, forward(additive_attention, inputs), forward(broadcast, inputs), 6)
    yield Row("additive forward + backward", name, both(additive_attention, inputs), both(broadcast, inputs), 4)


def selected_rows() -> Iterator[Row]:
    """NSA's selected branch: 4 query heads on 2, 16 blocks of 64 among 128, chosen at random."""
    length, block, chosen = 8192, 64, 16
    inputs = [torch.randn(1, length, count, 64, requires_grad=True) for count in (4, 2, 2)]
    own = torch.arange(length)[None] // block
    indices = select_blocks(torch.rand(1, length, 2, length // block), own, chosen)
    seen = torch.zeros(1, length, 2, length // block + 1, dtype=torch.bool)
    seen.scatter_(3, indices.long().where(indices >= 0, length // block), True)
    mask = seen[..., :-1].repeat_interleave(block, 3).transpose(1, 2).repeat_interleave(2, 1).tril()
    dense = headed(lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True))

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return selected_attention(q, k, v, indices, block=block)

    name = "SDPA, bool mask"
    yield Row("selected blocks forward, T 8192", name, forward(ours, inputs), forward(dense, inputs), 4)
    yield Row("selected blocks forward + backward", name, both(ours, inputs), both(dense, inputs), 4)


def growth(
    function: Callable[..., Tensor], rounds: int, inputs: Callable[[int], list[Tensor]] = heads
) -> tuple[float, float]:
    """Exponents of CPU time and memory of a forward and backward pass, from T 2048 to 8192."""
    calls = [both(function, inputs(length)) for length in (2048, 8192)]
    (short, long), (small, large) = cpu_ms(calls, rounds), [peak_bytes(call) for call in calls]
    return math.log(long / short, 4), math.log(large / small, 4)


def rounds_asked(description: str) -> int:
    """The command line of a benchmark; sets the threads."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="turns that each contender takes (default: 5)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default: 1)")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    torch.manual_seed(0)
    return chosen.rounds


def main() -> None:
    """The command line."""
    rounds = rounds_asked(__doc__ or "")
    for line in measure(chain(attention_rows(), convolution_rows(), additive_rows(), selected_rows()), rounds):
        print(line, flush=True)
    print("\nForward + backward from T 2048 to 8192: exponents of time and memory (asked of windows: at most 1.3)")
    for name, function in (("window 256", window), ("mha", attention)):
        time_growth, memory_growth = growth(function, rounds)
        print(f"{name}: {time_growth:.2f}, {memory_growth:.2f}", flush=True)
    held = peak_bytes(both(additive_attention, additive(2048))) / 2**20
    print(f"additive forward + backward, T 2048: {held:.0f} MB (asked: under 2000; all pairs at once: about 12,700)")


if __name__ == "__main__":
    main()
