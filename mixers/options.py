"""From configuration to code: a constructor's signature is its config, checked in one place.

Used for mixers, models, tasks, optimisers and trainers alike: names, types and defaults come from the signature, and
every wrong one gets the same kind of error.
"""

from __future__ import annotations

import inspect
import math
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Any, Literal, TypeVar

R = TypeVar("R")


def call(function: Callable[..., R], options: Mapping[str, Any], what: str, **fixed: Any) -> R:
    """`function(**fixed, **options)` after checking `options` against the signature.

    Args:
        options: from a user; `fixed` from our own code, unchecked and not settable by options.
        what: names the function in errors ("mixer 'gqa'").
    Raises:
        ValueError: an unknown or ill-typed option, or one that is missing; what the constructor itself refuses.
    """
    allowed = {name: p for name, p in _parameters(function).items() if name not in fixed}
    for name in options:
        if name not in allowed:
            raise ValueError(
                f"{what} has no option {name!r}{nearest(str(name), allowed)}; options: {', '.join(allowed) or 'none'}"
            )
    for name, parameter in allowed.items():
        if name not in options and parameter.default is inspect.Parameter.empty:
            raise ValueError(f"{what} needs the option {name!r}")
    checked = {
        name: _convert(value, _hints(function).get(name, Any), f"{what}: {name}") for name, value in options.items()
    }
    try:
        return function(**fixed, **checked)
    except ValueError as error:
        # What the constructor itself refuses, with the name of what was built in front.
        if str(error).startswith(what):
            raise
        raise ValueError(f"{what}: {error}") from error


def defaults(function: Callable) -> dict[str, Any]:
    """Option -> default; parameters without a default are left out."""
    return {name: p.default for name, p in _parameters(function).items() if p.default is not inspect.Parameter.empty}


def nearest(name: str, allowed: Collection[str]) -> str:
    """ " (did you mean 'gqa'?)" where something is close, else nothing."""
    close = get_close_matches(name, list(allowed), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


@cache
def _parameters(function: Callable) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(function).parameters
    for name, p in parameters.items():
        if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL):
            raise ValueError(
                f"{function.__qualname__} takes *{name}: the signature is the config, so it must name every option"
            )
    return dict(parameters)


@cache
def _hints(function: Callable) -> dict[str, Any]:
    return typing.get_type_hints(function.__init__ if inspect.isclass(function) else function)


def _convert(value: Any, hint: Any, where: str) -> Any:
    """`value` as `hint` says, or an error. Conversions: int to float, and a sequence to the sequence asked for."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or isinstance(hint, typing.TypeVar):
        return value
    if origin in (typing.Union, types.UnionType):
        return _convert_union(value, inner, where)
    if origin is Literal:
        if any(type(value) is type(allowed) and value == allowed for allowed in inner):
            return value
        close = nearest(value, [a for a in inner if isinstance(a, str)]) if isinstance(value, str) else ""
        raise ValueError(f"{where}={value!r} is not allowed{close}; allowed: {', '.join(map(str, inner))}")
    if origin in (list, tuple, Sequence):
        return _convert_sequence(value, hint, where)
    if origin in (dict, Mapping):
        if isinstance(value, Mapping):
            return dict(value)
    elif hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        if math.isfinite(value):
            return float(value)
    elif isinstance(value, hint) and not (isinstance(value, bool) and hint is not bool):
        return value
    raise ValueError(f"{where}={value!r} must be {_spell(hint)}")


def _convert_union(value: Any, inner: tuple[Any, ...], where: str) -> Any:
    errors = []
    # Exact matches first, so that 1 stays an int under float | int.
    for hint in sorted(inner, key=lambda h: type(value) is not h):
        try:
            return _convert(value, hint, where)
        except ValueError as error:
            errors.append((hint, error))
    literal = [error for hint, error in errors if typing.get_origin(hint) is Literal and isinstance(value, str)]
    if literal:
        raise literal[0]
    raise ValueError(f"{where}={value!r} must be {' or '.join(_spell(hint) for hint in inner)}")


def _convert_sequence(value: Any, hint: Any, where: str) -> Any:
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise ValueError(f"{where}={value!r} must be {_spell(hint)}")
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and inner and inner[-1] is not Ellipsis:
        if len(value) != len(inner):
            raise ValueError(f"{where}={value!r} must have {len(inner)} entries")
        return tuple(_convert(v, h, f"{where}[{i}]") for i, (v, h) in enumerate(zip(value, inner, strict=True)))
    items = [_convert(v, inner[0] if inner else Any, f"{where}[{i}]") for i, v in enumerate(value)]
    return tuple(items) if origin is tuple else items


def _spell(hint: Any) -> str:
    """A type as a user would say it."""
    names = {int: "a whole number", float: "a finite number", bool: "true or false", str: "a text", type(None): "null"}
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint in names:
        return names[hint]
    if origin is Literal:
        return "one of " + ", ".join(map(str, inner))
    if origin in (list, tuple, Sequence):
        return "a list" + (f" of {_spell(inner[0]).removeprefix('a ')}s" if inner and inner[0] in names else "")
    return "a mapping" if origin in (dict, Mapping) else str(hint)
