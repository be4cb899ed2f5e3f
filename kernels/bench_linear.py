"""`python -m kernels.bench_linear`: linear attention and the state space of Mamba-2 on a CPU, as in `kernels.bench`.

B 1, H 4, widths 64, causal, float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import elu, logsigmoid

from kernels import backend
from kernels.bench import Call, Row, both, cpu_ms, forward, growth, heads, measure, rounds_asked
from kernels.linear.op import linear_attention
from kernels.ssm.ssd import ssd


def linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """phi = elu + 1, normalised."""
    return linear_attention(elu(q) + 1, elu(k) + 1, v, return_state=False)[0]


def decayed(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    """A gate a token, not normalised."""
    return linear_attention(q, k, v, normalise=False, log_decay=log_decay, return_state=False)[0]


def fixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Retention's decay a head."""
    return decayed(q, k, v, torch.log(1 - 2.0 ** (-5 - torch.arange(float(v.shape[2])))))


def mamba2(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """One group."""
    return ssd(x, dt, a, b, c, return_state=False)[0]


def decayed_inputs(length: int) -> list[Tensor]:
    """q, k, v and gates close to 1."""
    return [*heads(length), logsigmoid(torch.randn(1, length, 4) + 3).requires_grad_()]


def mamba2_inputs(length: int) -> list[Tensor]:
    """x, dt in [1e-3, 1e-1], a, and b and c of one group."""
    x, b, c = torch.randn(1, length, 4, 64), torch.randn(1, length, 1, 64), torch.randn(1, length, 1, 64)
    dt = torch.exp(math.log(1e-3) + torch.rand(1, length, 4) * math.log(100))
    return [t.requires_grad_() for t in (x, dt, -1 - 15 * torch.rand(4), b, c)]


def recurrent(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`linear`, token by token."""
    with backend.using("reference"):
        return linear(q, k, v)


def linear_rows() -> Iterator[Row]:
    """Against the recurrence and, where they are installed, other people's plain PyTorch."""
    inputs = heads(2048)
    name = "the recurrence"
    yield Row("linear (elu + 1) forward, T 2048", name, forward(linear, inputs), forward(recurrent, inputs), 10)
    yield Row("linear (elu + 1) forward + backward", name, both(linear, inputs), both(recurrent, inputs), 60)
    if find_spec("fla") is not None:
        naive = _alone("fla", "ops/simple_gla/naive.py").naive_chunk_simple_gla
        inputs, name = decayed_inputs(2048), "fla, naive chunks"
        chunks = _first(naive, scale=1.0)
        yield Row("linear, decay, forward, T 2048", name, forward(decayed, inputs), forward(chunks, inputs), 1)
        yield Row("linear, decay, forward + backward", name, both(decayed, inputs), both(chunks, inputs), 3)
    if find_spec("transformers") is not None:
        slow = import_module("transformers.models.mamba2.modeling_mamba2").mamba2_chunk_scan
        inputs, name = mamba2_inputs(2048), "transformers, slow path, chunk 256"
        slow = _first(getattr(slow, "__wrapped__", slow), chunk_size=256)
        yield Row("mamba2 (ssd) forward, T 2048", name, forward(mamba2, inputs), forward(slow, inputs), 4)
        yield Row("mamba2 (ssd) forward + backward", name, both(mamba2, inputs), both(slow, inputs), 4)


def _alone(package: str, file: str) -> Any:
    """A module of a package without the rest of it, which may want a GPU."""
    (folder,) = getattr(find_spec(package), "submodule_search_locations", None) or [""]
    spec = spec_from_file_location(Path(file).stem, Path(folder) / file)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _first(function: Callable, **options: object) -> Callable[..., Tensor]:
    """The output alone of a function that may give more."""

    def call(*tensors: Tensor) -> Tensor:
        found = function(*tensors, **options)
        return found[0] if isinstance(found, tuple) else found

    return call


def growing() -> Iterator[tuple[str, Callable[..., Tensor], Callable[[int], list[Tensor]]]]:
    """What `kernels.bench.growth` looks at: a name, a function, its inputs at a length."""
    yield "linear (elu + 1)", linear, heads
    yield "linear, decay", decayed, decayed_inputs
    yield "mamba2 (ssd)", mamba2, mamba2_inputs


def decode(length: int) -> Call:
    """A turn of 20 tokens behind `length` others."""
    with torch.no_grad():
        q, k, v = heads(length, grad=False)
        _, kv, z = linear_attention(elu(q) + 1, elu(k) + 1, v)
        token = [t.abs() for t in heads(1, grad=False)]

    def turn() -> None:
        with torch.inference_mode():
            state = kv, z
            for _ in range(20):
                state = linear_attention(*token, kv=state[0], z=state[1])[1:]

    return turn


def main() -> None:
    """The command line."""
    rounds = rounds_asked(__doc__ or "")
    for line in measure(linear_rows(), rounds):
        print(line, flush=True)
    print("\nForward + backward from T 2048 to 8192: exponents of time and memory (asked: at most 1.3)")
    for name, function, inputs in growing():
        time_growth, memory_growth = growth(function, rounds, inputs)
        print(f"{name}: {time_growth:.2f}, {memory_growth:.2f}", flush=True)
    lengths = (512, 2048, 16384)
    found = cpu_ms([decode(length) for length in lengths], 10 * rounds)
    print("\nlinear: ms for 20 tokens behind so many others (asked: flat)")
    print(", ".join(f"{length}: {ms:.2f}" for length, ms in zip(lengths, found, strict=True)))


if __name__ == "__main__":
    main()
