"""Mixers by name: `register` a class and it is an option everywhere. Plug-ins (`mixers.plugins`) are read once."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, TypeVar, get_type_hints

from mixers import plugins
from mixers.base import Mixer
from mixers.options import call, defaults, nearest

_log = logging.getLogger(__name__)

_BUILT_IN = (
    *("mha", "gqa", "mqa", "window", "linear", "based", "retention", "gated_linear", "mamba", "mamba2"),
    *("additive", "nsa"),
)
RESERVED = ("mlp", "with", "at", "before", "mixer")
# Of a mixer without the option `causal`, after its name.
ONE_WAY = "has no bidirectional form: allowed causal=True, which goes without saying"

C = TypeVar("C", bound=type[Mixer])

_classes: dict[str, type[Mixer]] = {}
_plugins_read = False
# Mixers of plug-ins -> the label of theirs.
_plugged: dict[str, str] = {}
# What was left out: a plug-in or one of its mixers, and why.
_left_out: list[str] = []


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
        missing = "".join(f"; {line}" for line in _left_out)
        raise ValueError(f"unknown mixer {name!r}{nearest(name, names())}; registered: {', '.join(names())}{missing}")
    return _classes[name]


def options(name: str) -> dict[str, Any]:
    """Option -> default of a mixer: its constructor's signature, d_model aside."""
    return {option: value for option, value in defaults(get(name)).items() if option != "d_model"}


def build(name: str, d_model: int, **chosen: Any) -> Mixer:
    """A mixer of that name and width.

    Raises:
        ValueError: unknown name, unknown or ill-typed option, or a value that the mixer refuses.
    """
    what = f"mixer {name!r}"
    return call(get(name), one_way(name, chosen, what), what, d_model=d_model)


def one_way(name: str, chosen: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Options without a `causal=True` that the mixer does not have because it has no other form.

    Raises:
        ValueError: another value of it.
    """
    if "causal" not in chosen or "causal" in options(name):
        return dict(chosen)
    if chosen["causal"] is not True:
        raise ValueError(f"{what} {ONE_WAY}; got causal={chosen['causal']!r}")
    return {option: value for option, value in chosen.items() if option != "causal"}


def withdraw(name: str, why: str) -> bool:
    """Take a plug-in's mixer out again, with a warning that says why; False where `name` is no plug-in's."""
    if name not in _plugged:
        return False
    del _classes[name]
    _leave_out(f"mixer {name!r} of the plug-in {_plugged.pop(name)}", why)
    return True


def _load() -> None:
    for name in _BUILT_IN:
        import_module(f"mixers.{name}")
    global _plugins_read
    if not _plugins_read:
        # Before the first import: a plug-in may ask for names itself.
        _plugins_read = True
        for source in plugins.sources():
            _plug_in(source)


def _plug_in(source: plugins.Source) -> None:
    """Add the mixers of one plug-in. Whatever is wrong with it, the others go on."""
    before = set(_classes)
    try:
        found = source.load()
        if not any(_is_of(cls, found) for cls in _classes.values()) and before == set(_classes):
            _leave_out(f"plug-in {source.label}", "it registers no mixer; see mixers.registry.register")
    except (Exception, SystemExit) as error:
        _leave_out(f"plug-in {source.label}", f"{type(error).__name__}: {error}")
    for name in set(_classes) - before:
        if _classes[name].__module__ not in sys.modules:
            # Its module failed after the line that registers it.
            del _classes[name]
            continue
        _plugged[name] = source.label
        try:
            _check_constructor(_classes[name])
        except ValueError as error:
            withdraw(name, str(error))


def _is_of(cls: type[Mixer], found: Any) -> bool:
    """Was the class registered by what a plug-in names? It may have been imported by another plug-in before."""
    module = getattr(found, "__name__", "") if inspect.ismodule(found) else getattr(found, "__module__", "")
    return cls is found or f"{cls.__module__}.".startswith(f"{module}.")


def _check_constructor(cls: type[Mixer]) -> None:
    """The signature is the config: every option has a default, and one that YAML can say."""
    given = defaults(cls)
    try:
        get_type_hints(cls.__init__)
    except Exception as error:
        raise ValueError(f"the types of its options cannot be read: {error}") from None
    for name in inspect.signature(cls).parameters:
        if name not in given and name != "d_model":
            raise ValueError(f"its option {name!r} needs a default")
    if "d_model" not in inspect.signature(cls).parameters:
        raise ValueError("its constructor needs d_model")
    for name, value in given.items():
        if not _is_plain(value):
            raise ValueError(f"its option {name}={value!r} must be a number, a text, true, false, null or a list")


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _leave_out(what: str, why: str) -> None:
    _left_out.append(f"{what} is left out: {why}")
    _log.warning("%s", _left_out[-1])
