"""How this project starts a Triton kernel: on its tensors' device, never on an empty grid, and recordable.

While `recording` is on, launches are noted instead of run; that is how `kernels.triton_aot` learns, on a machine
without a GPU, what would be compiled on one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if INTERPRETED:
    from kernels import triton_interpreter

    triton_interpreter.mend()

# Multiprocessors of the card that is assumed where there is none: an H100 or H200.
_ASSUMED_PROCESSORS = 132


@dataclass(frozen=True)
class Launch:
    """One start of a kernel; `arguments` by name, constants included."""

    kernel: Any
    arguments: dict[str, Any]
    warps: int
    stages: int


_records: list[Launch] | None = None


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Note launches instead of running them; the tensors may be on the meta device."""
    global _records
    before, _records = _records, []
    try:
        yield _records
    finally:
        _records = before


def launch(kernel: Any, programs: int, *arguments: Any, warps: int = 4, stages: int = 1, **constants: Any) -> None:
    """Run `programs` programs of a kernel, on the device of its first tensor."""
    if _records is not None:
        named = dict(zip(kernel.arg_names, arguments, strict=False)) | constants
        _records.append(Launch(kernel, named, warps, stages))
        return
    if not programs:
        return
    like = next(a for a in arguments if isinstance(a, Tensor))
    with torch.cuda.device_of(like):
        kernel[(programs,)](*arguments, **constants, num_warps=warps, num_stages=stages)


def empty(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Contiguous memory for a kernel to fill, of like's device and, by default, dtype."""
    return like.new_empty(shape, dtype=dtype or like.dtype)


def processors(like: Tensor) -> int:
    """Multiprocessors of the tensor's device."""
    if like.device.type != "cuda":
        return _ASSUMED_PROCESSORS
    return int(torch.cuda.get_device_properties(like.device).multi_processor_count)


def dot_precision(like: Tensor) -> str:
    """fp32 products in three passes of TF32 (error about 1e-6); AMD's compiler has plain fp32 only."""
    return "tf32x3" if like.dtype == torch.float32 and torch.version.hip is None else "ieee"


def padded(width: int) -> int:
    """The tile's size for `width` columns: a power of two, at least the 16 of a tensor core."""
    return max(16, int(triton.next_power_of_2(width)))
