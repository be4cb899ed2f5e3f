"""Mixers by name: `register` a class and it is an option everywhere."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

from mixers.base import Mixer
from mixers.options import call, defaults, nearest

_BUILT_IN = ("mha", "gqa", "mqa", "window", "linear", "based")
RESERVED = ("mlp", "with", "at", "before", "mixer")

C = TypeVar("C", bound=type[Mixer])

_classes: dict[str, type[Mixer]] = {}


def register(name: str) -> Callable[[C], C]:
    """Class decorator: the class is the mixer `name` from now on.

    Raises:
        ValueError: the name is taken or reserved, or the class is no Mixer.
    """

    def add(cls: C) -> C:
        if not (isinstance(cls, type) and issubclass(cls, Mixer)):
            raise ValueError(f"mixer {name!r}: {cls!r} is no subclass of mixers.base.Mixer")
        if not name.isidentifier() or name in RESERVED:
            raise ValueError(f"mixer name {name!r} must be an identifier and none of {', '.join(RESERVED)}")
        if _classes.get(name, cls) is not cls:
            raise ValueError(
                f"mixer name {name!r} is taken by {_classes[name].__module__}.{_classes[name].__qualname__}"
            )
        _classes[name] = cls
        return cls

    return add


def names() -> list[str]:
    """All registered names, ours first."""
    _load()
    return [*_BUILT_IN, *sorted(set(_classes) - set(_BUILT_IN))]


def get(name: str) -> type[Mixer]:
    """The class of a name.

    Raises:
        ValueError: unknown name; says the closest.
    """
    _load()
    if name not in _classes:
        raise ValueError(f"unknown mixer {name!r}{nearest(name, names())}; registered: {', '.join(names())}")
    return _classes[name]


def options(name: str) -> dict[str, Any]:
    """Option -> default of a mixer: its constructor's signature, d_model aside."""
    return {option: value for option, value in defaults(get(name)).items() if option != "d_model"}


def build(name: str, d_model: int, **chosen: Any) -> Mixer:
    """A mixer of that name and width.

    Raises:
        ValueError: unknown name, unknown or ill-typed option, or a value that the mixer refuses.
    """
    return call(get(name), chosen, f"mixer {name!r}", d_model=d_model)


def _load() -> None:
    for name in _BUILT_IN:
        import_module(f"mixers.{name}")
