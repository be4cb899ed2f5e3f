"""What a run costs on the machine it runs on: training tokens a second and peak memory."""

from __future__ import annotations

import ctypes
import re
import resource
import time
from pathlib import Path

import torch


class Clock:
    """Seconds of work on a device. Starting and stopping wait for what the device still has to do."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = 0.0
        self._since: float | None = None

    @property
    def running(self) -> bool:
        return self._since is not None

    def start(self) -> None:
        if self._since is None:
            self._since = self._now()

    def stop(self) -> None:
        if self._since is not None:
            self.seconds += self._now() - self._since
            self._since = None

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


class PeakMemory:
    """Highest memory since it was made: allocated tensors on a GPU, resident memory of the process on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        else:
            _reset_peak()

    def bytes(self) -> int | None:
        """None where the system's peak cannot be reset, so that it may be another job's."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return _resident_peak()


_resets = 0
_can_reset = True


def _reset_peak() -> None:
    """Give memory of earlier jobs back and let the kernel count anew."""
    global _resets, _can_reset
    _resets += 1
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, AttributeError):
        _can_reset = False


def _resident_peak() -> int | None:
    if _can_reset:
        return 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])
    # Without a reset, the peak of the process is that of its first job alone.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if _resets == 1 else None
