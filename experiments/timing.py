"""Times to be trusted: warm calls, device synchronised, beside what the machine can do and what others did to it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

# Shorter readings are mostly the clock, the scheduler and the ticks of /proc/stat.
LEAST_SECONDS = 0.2
# Others who keep this many cores busy, or more, are seen in the times.
SHARED_CORES = 0.2
# Rows and columns of the products that find the peak: large enough to be bound by arithmetic, and done in a second.
_CPU_SIZE, _GPU_SIZE = 1024, 8192


@dataclass(frozen=True)
class Reading:
    """Seconds of one call, the mean over some in a row: of the clock on the wall, and of all threads on a CPU."""

    wall: float
    cpu: float

    def busy(self, device: str) -> float:
        """What the work itself took. On a CPU, others stretch the time on the wall but not that of our threads."""
        return self.cpu if device == "cpu" else self.wall


def now(device: torch.device) -> tuple[float, float]:
    """Wall and CPU seconds, once the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter(), time.process_time()


def read(call: Callable[[], object], device: torch.device, calls: int) -> Reading:
    """The mean of `calls` calls in a row. They should be warm: the first ones compile, tune and allocate."""
    start = now(device)
    for _ in range(calls):
        call()
    wall, cpu = (end - begin for begin, end in zip(start, now(device), strict=True))
    return Reading(wall / calls, cpu / calls)


def calls_needed(call: Callable[[], object], device: torch.device) -> int:
    """How many calls make a reading long enough: powers of two are tried, which warms up too."""
    calls = 1
    while read(call, device, calls).wall * calls < LEAST_SECONDS:
        calls *= 2
    return calls


def peak_flops(device: torch.device, precision: int | str) -> float:
    """FLOPs in a second (on a CPU: a second of one core) of the fastest matrix product, the bound for all else.

    On a GPU always that of the tensor cores in bfloat16: kernels may use them for float32 too.
    """
    low = device.type == "cuda" or precision != 32
    return max(_product(device, dtype) for dtype in (torch.float32, *([torch.bfloat16] if low else [])))


def _product(device: torch.device, dtype: torch.dtype) -> float:
    size = _CPU_SIZE if device.type == "cpu" else _GPU_SIZE
    a, b = torch.ones(2, size, size, dtype=dtype, device=device)
    out = a @ b
    readings = [read(lambda: torch.mm(a, b, out=out), device, 1) for _ in range(4)]
    return 2 * size**3 / min(reading.busy(device.type) for reading in readings)


class Load:
    """What other processes do to this machine, between `start` and `stop`, summed over all such stretches."""

    def __init__(self) -> None:
        self._wall = self._others = 0.0

    def start(self) -> None:
        self._since = time.perf_counter(), time.process_time(), _machine_seconds()

    def stop(self) -> None:
        start, used, machine = self._since
        wall, own = time.perf_counter() - start, time.process_time() - used
        self._wall += wall
        if machine is None:
            # Without /proc: the processes that wanted to run in the last minute, less our own.
            self._others += wall * max(0.0, os.getloadavg()[0] - max(1.0, own / wall))
        else:
            self._others += max(0.0, _machine_seconds() - machine - own)

    def cores(self) -> float:
        """Cores that others kept busy, the mean over time; what a host took away from a virtual machine included."""
        return self._others / self._wall if self._wall else 0.0


def _machine_seconds() -> float | None:
    """CPU seconds that this machine has been busy since it started; None where the system does not tell."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    except OSError:
        return None
    user, nice, system, _idle, _wait, interrupt, soft, steal = map(int, fields[1:9])
    return (user + nice + system + interrupt + soft + steal) / os.sysconf("SC_CLK_TCK")
