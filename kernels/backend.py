"""The one rule which implementation of an op runs.

`auto` is mamba-ssm or else Triton for tensors on a GPU, where they are there and have what the call asks for, and
portable PyTorch for everything else; an explicit choice that an op does not have raises instead of falling back.
`mamba_ssm` speaks of state spaces alone: the ops that it has nothing for run as under `auto`. The setting is
process-wide and no part of a run's identity: it must not change results.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

BACKENDS = ("auto", "triton", "portable", "reference", "mamba_ssm")

_chosen = "auto"
_TRITON = find_spec("triton") is not None
_MAMBA_SSM = find_spec("mamba_ssm") is not None


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


def implementation(
    op: str, table: Mapping[str, Callable], like: Tensor, refusal: str | None = None, fused_refusal: str | None = None
) -> Callable:
    """The function of `table` (backend name -> function) that runs `op` on tensors such as `like`.

    refusal: what of this call the Triton kernels do not have; fused_refusal: what mamba-ssm does not have. `auto` then
        takes the next one, in the end the portable path.

    Raises:
        ValueError: an explicit choice that `op` does not have, or that cannot run here.
    """
    name = "auto" if _chosen == "mamba_ssm" and _chosen not in table else _chosen
    reasons = {"mamba_ssm": fused_refusal or _no_mamba_ssm(like), "triton": refusal or _missing(like)}
    if name == "auto":
        on_gpu = (each for each in reasons if each in table and like.device.type == "cuda" and not reasons[each])
        name = next(on_gpu, "portable")
    if name not in table:
        raise ValueError(f"backend={name!r} cannot run {op}; it has: {', '.join(table)}")
    if reason := reasons.get(name):
        raise ValueError(f"backend={name!r} cannot run {op} here: {reason}")
    return table[name]


def _no_mamba_ssm(like: Tensor) -> str | None:
    """What mamba-ssm itself lacks to run on such tensors."""
    if not _MAMBA_SSM:
        return "the package mamba-ssm is not installed (pip install -e '.[mamba]' where there is CUDA)"
    if like.device.type != "cuda":
        return f"tensors on {like.device.type} must be on an NVIDIA GPU"
    return None


def no_autocast(like: Tensor) -> AbstractContextManager:
    """For the inside of an op: autocast would narrow sums over the whole past, which then overflow or cancel."""
    kind = like.device.type
    return torch.autocast(kind, enabled=False) if kind in ("cpu", "cuda") else nullcontext()


def without_autocast(differentiate: Callable[..., Any]) -> Callable[..., Any]:
    """The same for the gradient of an operator, which runs under whatever is on when backward is called."""

    def guarded(ctx: Any, *grads: Any) -> Any:
        # Not a look at what was saved: under activation checkpointing it may be unpacked once. None at all are zeros.
        given = next((grad for grad in grads if grad is not None), None)
        with nullcontext() if given is None else no_autocast(given):
            return differentiate(ctx, *grads)

    return guarded


def _missing(like: Tensor) -> str | None:
    """What Triton itself lacks to run on such tensors."""
    if not _TRITON:
        return "the package triton is not installed"
    if like.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"tensors on {like.device.type} must be on a GPU, or TRITON_INTERPRET=1 be set before the start (slow)"
    return None
