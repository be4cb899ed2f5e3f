"""`python -m mixers.bench_mamba`: Mamba on a CPU against what people use there, as in `kernels.bench`.

Mamba-1 is the scan alone, 256 channels of 16 states; Mamba-2 the whole mixer, 256 wide, as transformers builds it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import chain

import torch
from torch import Tensor, nn

from kernels.bench import Call, Row, both, cpu_ms, forward, growth, measure, rounds_asked
from kernels.ssm.scan import selective_scan
from mixers import registry
from mixers.base import Mixer

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


def layer_inputs(layer: nn.Module, length: int) -> list[Tensor]:
    """x and the parameters, so that gradients of all of them are taken."""
    return [torch.randn(1, length, WIDTH, requires_grad=True), *layer.parameters()]


def first(layer: nn.Module, x: Tensor, *_: Tensor) -> Tensor:
    """The layer on the first of its `layer_inputs`."""
    return layer(x)


def mixer_rows() -> Iterator[Row]:
    """The whole of Mamba-2, 8 heads of 64 with 128 states. A third of our time is projections, the same for both."""
    if find_spec("transformers") is None:
        return
    theirs = import_module("transformers.models.mamba2.modeling_mamba2").Mamba2Mixer
    options = dict(hidden_size=WIDTH, num_heads=8, n_groups=1, num_hidden_layers=1)
    config = import_module("transformers").Mamba2Config(**options)
    layers = registry.build("mamba2", WIDTH), theirs(config, 0)
    for kind, call in (("forward", forward), ("forward + backward", both)):
        name = f"transformers, slow path, chunk {config.chunk_size}"
        mine, peer = (call(partial(first, layer), layer_inputs(layer, 2048)) for layer in layers)
        yield Row(f"mamba2, whole mixer, {kind}, T 2048", name, mine, peer, 4)


def decode(mixer: Mixer, length: int) -> Call:
    """A turn of 20 tokens behind `length` others."""
    with torch.inference_mode():
        x = torch.randn(1, length, WIDTH)
        _, state = mixer.extend(x, mixer.start(1, x))

    def turn() -> None:
        with torch.inference_mode():
            for t in range(20):
                mixer.extend(x[:, t : t + 1], state)

    return turn


def main() -> None:
    """The command line."""
    rounds = rounds_asked(__doc__ or "")
    for line in measure(chain(scan_rows(), mixer_rows()), rounds):
        print(line, flush=True)
    mixers = {name: registry.build(name, WIDTH) for name in ("mamba", "mamba2")}
    print("\nForward + backward from T 2048 to 8192: exponents of time and memory (asked: at most 1.3)")
    print("selective scan: {:.2f}, {:.2f}".format(*growth(scan, rounds, scan_inputs)), flush=True)
    for name, mixer in mixers.items():
        time_growth, memory_growth = growth(partial(first, mixer), rounds, partial(layer_inputs, mixer))
        print(f"{name}: {time_growth:.2f}, {memory_growth:.2f}", flush=True)
    print("\nMs for 20 tokens behind so many others (asked: flat)")
    lengths = (512, 2048, 16384)
    for name, mixer in mixers.items():
        found = cpu_ms([decode(mixer, length) for length in lengths], 10 * rounds)
        print(f"{name}: " + ", ".join(f"{length}: {ms:.2f}" for length, ms in zip(lengths, found, strict=True)))


if __name__ == "__main__":
    main()
