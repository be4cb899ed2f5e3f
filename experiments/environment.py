"""What a run ran on: versions, commit, machine."""

from __future__ import annotations

import hashlib
import inspect
import os
import platform
import subprocess
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import arch
import experiments
import kernels
import mixers

_OURS = (kernels, mixers, arch, experiments)
_PACKAGES = ("triton", "lightning", "hydra-core", "omegaconf", "mlflow", "numpy", "einops")


def environment(options: Mapping[str, Any]) -> dict[str, Any]:
    """A flat dict for environment.json.

    Args:
        options: how this run uses the machine (threads, backend, compile, ...).
    """
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "python": platform.python_version(), "platform": platform.platform(),
        "processor": _processor(), "processor_count": os.cpu_count(), "gpus": gpus,
        **{f"{name}_version": _version(name) for name in _PACKAGES},
        # Not the package's: it leaves out which build it is (+cpu, +cu130).
        "torch_version": torch.__version__,
        "commit": _commit(), "uncommitted_changes": bool(_commit() and _git("status", "--porcelain")),
        **options,
    }


def code(*classes: type) -> str:
    """12 hexadecimal digits that stand for the code that a run's result comes from: ours, and that of `classes`."""
    ours = [path for package in _OURS for path in sorted(Path(package.__file__).parent.rglob("*.py"))]
    others = {Path(inspect.getsourcefile(cls)) for cls in classes} - set(ours)
    digest = hashlib.sha256()
    for path in [*ours, *sorted(others)]:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


@cache
def _commit() -> str | None:
    """The commit of this code; None where it was installed, even if into a folder of somebody's repository."""
    return _git("rev-parse", "HEAD") if _git("ls-files", __file__) else None


@cache
def _git(*command: str) -> str | None:
    try:
        done = subprocess.run(["git", *command], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
