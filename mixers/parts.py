"""Small parts that mixers and blocks share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)

MARKS = ("residual", "own_init", "no_decay")


def mark(module: M, *names: str, residual: bool = False, own_init: bool = False, no_decay: bool = False) -> M:
    """Say what is special about a module's own parameters (all of them, or those named).

    Kept on the module and not on the parameters, so that it survives copies.

    Args:
        residual: output projection into the residual stream: the model's init scales it by 1 / sqrt(2 layers).
        own_init: set by its author; the model's init leaves it alone.
        no_decay: never decayed, even when it is a matrix.
    """
    marks = module.__dict__.setdefault("marks", {})
    for name in names or [name for name, _ in module.named_parameters(recurse=False)]:
        said = dict(zip(MARKS, (residual, own_init, no_decay), strict=True))
        marks[name] = marks.get(name, frozenset()) | {m for m, on in said.items() if on}
    return module


def marked(module: nn.Module, name: str) -> frozenset[str]:
    """The marks of one of a module's own parameters."""
    return module.__dict__.get("marks", {}).get(name, frozenset())


def own_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """(full name, module, name in it, parameter) of every parameter once."""
    seen = set()
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{path}.{name}".lstrip("."), module, name, parameter


def normed(norm: nn.Module, x: Tensor) -> Tensor:
    """Normed in the dtype of the norm's weights, which autocast leaves alone; in the dtype of x."""
    return norm(x.to(norm.weight.dtype)).to(x.dtype) if isinstance(norm, nn.RMSNorm) else x


def divisor_up_to(number: int, limit: int) -> int:
    """The largest divisor of `number` that is at most `limit`."""
    return next(d for d in range(min(number, limit), 0, -1) if number % d == 0)


def head_count(d_model: int, n_heads: int | None, free: bool = False) -> int:
    """The number of heads: the given one, or the largest divisor of d_model up to max(1, d_model // 64).

    Args:
        free: the heads have a width of their own, so they need not divide d_model.
    Raises:
        ValueError: fewer than one head, or heads that do not divide d_model.
    """
    if d_model < 1:
        raise ValueError(f"d_model={d_model} must be at least 1")
    if n_heads is None:
        return divisor_up_to(d_model, max(1, d_model // 64))
    if n_heads < 1 or (not free and d_model % n_heads):
        raise ValueError(f"n_heads={n_heads} must divide d_model={d_model}")
    return n_heads
