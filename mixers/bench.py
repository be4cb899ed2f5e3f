"""`python -m mixers.bench`: decoding and sparse attention, against what people use instead.

Decoding is one more token through the caches of the attention mixers, without projections: a key and a value are kept,
and a query attends to what is kept. As in `kernels.bench`, contenders take turns and CPU seconds count. Between
turns of decoding other memory is written, as by the other layers of a model: tokens in a row on one cache would find it
in the processor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from itertools import count

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from kernels.attention.op import attention
from kernels.bench import Call, Row, both, cpu_ms, forward, headed, measure, rounds_asked
from mixers import cache, registry
from mixers.base import State

WINDOW, WIDTH = 256, 64


def tokens(step: Callable[[], Tensor], number: int = 1) -> Call:
    """A turn of so many tokens."""

    def turn() -> None:
        with torch.inference_mode():
            for _ in range(number):
                step()

    return turn


def token(heads: int) -> Tensor:
    """[1, 1, H, K]."""
    return torch.randn(1, 1, heads, WIDTH)


def ours(length: int, heads: int, groups: int, window: int | None = None) -> Callable[[], Tensor]:
    """A step on our caches, filled with `length` tokens; it stays at that length."""
    q, k, v = token(heads), token(groups), token(groups)
    with torch.inference_mode():
        past = State(cache.empty(1, groups, WIDTH, WIDTH, k))
        prompt_k, prompt_v = (torch.randn(1, length, groups, WIDTH) for _ in range(2))
        state = State(_kept(past, prompt_k, prompt_v, window)[1], length)
    lengths = count(length)

    def step() -> Tensor:
        # A ring moves on; a cache that grows is held at its length.
        state.length = length if window is None else next(lengths)
        seen, state.tensors = _kept(state, k, v, window)
        return attention(q, seen.k, seen.v, causal=False)

    return step


def _kept(past: State, k: Tensor, v: Tensor, window: int | None) -> tuple[cache.Attended, dict[str, Tensor]]:
    return cache.growing(past, k, v, None) if window is None else cache.ring(past, k, v, None, window)


def concatenating(length: int, heads: int, groups: int, repeat: bool) -> Callable[[], Tensor]:
    """A step on a cache that is concatenated anew for each token, as transformers' DynamicCache is.

    Args:
        repeat: write out each key head for all of its query heads (transformers' `repeat_kv`: under a mask, and in its
            eager attention); False: leave the sharing to SDPA.
    """
    q, k, v = (t.transpose(1, 2) for t in (token(heads), token(groups), token(groups)))
    kept = [torch.randn(1, groups, length, WIDTH) for _ in range(2)]

    def step() -> Tensor:
        kept[:] = [torch.cat([old, new], 2) for old, new in zip(kept, (k, v), strict=True)]
        keys, values = (t.repeat_interleave(heads // groups, 1) for t in kept) if repeat else kept
        return scaled_dot_product_attention(q, keys, values, enable_gqa=not repeat)

    return step


def decode_rows() -> Iterator[Row]:
    """Grouped heads over a long cache."""
    for heads, groups in ((4, 1), (8, 2)):
        for repeat, name, bar in ((True, "cat, repeat_kv, SDPA", 8.0), (False, "cat, SDPA", 1.0)):
            calls = tokens(ours(8192, heads, groups)), tokens(concatenating(8192, heads, groups, repeat))
            yield Row(f"a token, {heads} heads on {groups}, 8192 cached", name, *calls, bar)


def nsa_rows() -> Iterator[Row]:
    """The whole `nsa` mixer at its defaults, 256 wide, 4 query heads on 2."""
    ours = registry.build("nsa", 256, n_heads=4, n_kv_heads=2)
    if find_spec("native_sparse_attention_pytorch") is not None:
        package = import_module("native_sparse_attention_pytorch")
        sizes = dict(sliding_window_size=512, compress_block_size=32, compress_block_sliding_stride=16)
        sizes |= dict(selection_block_size=64, num_selected_blocks=16)
        theirs = package.SparseAttention(dim=256, dim_head=64, heads=4, kv_heads=2, causal=True, **sizes)
        x = [torch.randn(1, 1024, 256, requires_grad=True)]
        name = "native-sparse-attention-pytorch"
        yield Row("nsa forward, T 1024", name, forward(ours, x), forward(theirs, x), 20, 0.05)
        yield Row("nsa forward + backward", name, trained(ours, x), trained(theirs, x), 20, 0.05)
    x, full = [torch.randn(1, 16384, 256)], registry.build("gqa", 256, n_heads=4, n_kv_heads=2)
    # The same heads without projections, RoPE and gates, which only `ours` has.
    qkv = [torch.randn(1, 16384, count, WIDTH, requires_grad=True) for count in (4, 2, 2)]
    sdpa = headed(lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
    yield Row("nsa forward, T 16384", "causal SDPA alone", forward(ours, x), forward(sdpa, qkv), 1.2)
    yield Row("nsa forward + backward, T 16384", "causal SDPA alone", trained(ours, x), both(sdpa, qkv), 1.5)
    yield Row("nsa forward, T 16384", "gqa, the whole mixer", forward(ours, x), forward(full, x), 1.2)
    yield Row("nsa forward + backward, T 16384", "gqa, the whole mixer", trained(ours, x), trained(full, x), 1.5)


def trained(mixer: nn.Module, inputs: list[Tensor]) -> Call:
    """A forward and backward pass to every parameter."""
    learned = [p for p in mixer.parameters() if p.requires_grad]
    return lambda: torch.autograd.grad(mixer(*inputs).sum(), learned, allow_unused=True)


def nsa_growth(rounds: int) -> tuple[float, float]:
    """Exponents of the CPU time of a forward, and of a forward and backward pass, from T 4096 to 16384."""
    mixer = registry.build("nsa", 256, n_heads=4, n_kv_heads=2)
    inputs = [[torch.randn(1, length, 256)] for length in (4096, 16384)]
    short, long, short_both, long_both = cpu_ms(
        [*(forward(mixer, x) for x in inputs), *(trained(mixer, x) for x in inputs)], rounds
    )
    return math.log(long / short, 4), math.log(long_both / short_both, 4)


def main() -> None:
    """The command line."""
    asked = rounds_asked(__doc__ or "")
    for line in measure(nsa_rows(), asked):
        print(line, flush=True)
    print("nsa from T 4096 to 16384, exponents of time, forward and both (asked: at most 1.4): ", end="")
    print(", ".join(f"{exponent:.2f}" for exponent in nsa_growth(asked)), end="\n\n", flush=True)
    rounds = 10 * asked
    others = torch.zeros(16 << 20)
    for line in measure(decode_rows(), rounds, lambda: others.add_(1)):
        print(line, flush=True)
    lengths = (512, 2048, 16384)
    found = cpu_ms([tokens(ours(length, 4, 4, WINDOW), 20) for length in lengths], rounds)
    print(f"\nWindow {WINDOW}: ms for 20 tokens behind so many others (asked: flat)")
    print(", ".join(f"{length}: {ms:.2f}" for length, ms in zip(lengths, found, strict=True)))


if __name__ == "__main__":
    main()
