"""The one rule which implementation of an op runs.

`auto` is Triton for tensors on a GPU, where it has what the call asks for, and portable PyTorch for everything else; an
explicit choice that an op does not have raises instead of falling back. The setting is process-wide and no part of a
run's identity: it must not change results.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec

from torch import Tensor

BACKENDS = ("auto", "triton", "portable", "reference", "mamba_ssm")

_chosen = "auto"
_TRITON = find_spec("triton") is not None


def use(name: str) -> None:
    """Set the backend of every op of this process.

    Raises:
        ValueError: `name` is none of `BACKENDS`.
    """
    global _chosen
    if name not in BACKENDS:
        raise ValueError(f"backend={name!r} is unknown; allowed: {', '.join(BACKENDS)}")
    _chosen = name


def chosen() -> str:
    """The setting made by `use`."""
    return _chosen


@contextmanager
def using(name: str) -> Iterator[None]:
    """`use` for the length of a with block."""
    before = _chosen
    use(name)
    try:
        yield
    finally:
        use(before)


def implementation(op: str, table: Mapping[str, Callable], like: Tensor, refusal: str | None = None) -> Callable:
    """The function of `table` (backend name -> function) that runs `op` on tensors such as `like`.

    refusal: what of this call the Triton kernels do not have; `auto` then takes the portable path.

    Raises:
        ValueError: an explicit choice that `op` does not have, or that cannot run here.
    """
    name = _chosen
    refusal = refusal or _missing(like)
    if name == "auto":
        name = "triton" if "triton" in table and like.device.type == "cuda" and not refusal else "portable"
    if name not in table:
        raise ValueError(f"backend={name!r} cannot run {op}; it has: {', '.join(table)}")
    if name == "triton" and refusal:
        raise ValueError(f"backend='triton' cannot run {op} here: {refusal}")
    return table[name]


def _missing(like: Tensor) -> str | None:
    """What Triton itself lacks to run on such tensors."""
    if not _TRITON:
        return "the package triton is not installed"
    if like.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"tensors on {like.device.type} must be on a GPU, or TRITON_INTERPRET=1 be set before the start (slow)"
    return None
