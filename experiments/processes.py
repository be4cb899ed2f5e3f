"""Processes as records name them. A number alone is no name: the system gives it to another process later."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """A process on some machine.

    Attributes:
        began: when it began, as its machine says it; with the number it stands for one process alone.
    """

    number: int
    host: str
    began: str | None

    @classmethod
    def this(cls) -> Process:
        """The process that runs this."""
        return cls(os.getpid(), platform.node(), _began(os.getpid()))

    @property
    def alive(self) -> bool | None:
        """None: it is on another machine, and nobody here knows."""
        if self.host != platform.node():
            return None
        return self.began is not None and _began(self.number) == self.began

    def terminate(self) -> bool:
        """SIGTERM, where this very process is alive on this machine; was it?"""
        if not self.alive:
            return False
        try:
            os.kill(self.number, signal.SIGTERM)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def __str__(self) -> str:
        return f"process {self.number} on {self.host}"


def _began(number: int) -> str | None:
    """When the process of this number began; None where there is none, or only what is left of a dead one."""
    if not Path("/proc/self/stat").exists():
        done = subprocess.run(["ps", "-o", "lstart=", "-p", str(number)], capture_output=True, text=True)
        return done.stdout.strip() or None
    try:
        # The name, in parentheses, may hold anything. proc(5): then state, and 19 fields on the start in clock ticks.
        fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    return None if fields[0] in "ZX" else f"{fields[19]} after {boot}"
