"""The one rule which implementation of an op runs.

`auto` is Triton for tensors on a GPU and portable PyTorch for everything else; an explicit choice that an op does not
have raises instead of falling back. The setting is process-wide and no part of a run's identity: it must not change
results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

BACKENDS = ("auto", "triton", "portable", "reference", "mamba_ssm")

_chosen = "auto"


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


def implementation(op: str, table: Mapping[str, Callable], like: Tensor) -> Callable:
    """The function of `table` (backend name -> function) that runs `op` on tensors such as `like`.

    Raises:
        ValueError: an explicit choice that `op` does not have.
    """
    name = _chosen
    if name == "auto":
        name = "triton" if "triton" in table and like.device.type == "cuda" else "portable"
    if name not in table:
        raise ValueError(f"backend={name!r} cannot run {op}; it has: {', '.join(table)}")
    return table[name]
