"""A mixer class under test, and what properties are made of.

A property gives trials, smallest input first: a description of the input, and a call that returns a deviation or raises
`Broken`. Truth is float64: each document alone through `forward`, a definition where one is declared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from mixers.base import Mixer, Packing, State
from mixers.conformance.definitions import Conformance, declared
from mixers.options import call, defaults

LONG = 150  # past two blocks of 64, and no multiple of anything
TINY = 1e-10

Trials = Iterator[tuple[str, Callable[[], float]]]


class Broken(Exception):
    """A property does not hold, in words where a deviation says nothing."""


class NotApplicable(Exception):
    """A property has no meaning for this mixer; the text goes on after "because"."""


@dataclass(frozen=True)
class Property:
    """A name, the trials of a subject, and the largest deviation that passes."""

    name: str
    trials: Callable[[Subject], Trials]
    tolerance: float = TINY


class Subject:
    """A mixer class under test: builds its settings and their inputs, the same every time.

    Raises:
        Broken: the class cannot be built from d_model and its declared options.
    """

    def __init__(self, cls: Any):
        if not (isinstance(cls, type) and issubclass(cls, Mixer)):
            raise Broken(f"{getattr(cls, '__name__', cls)!r} is no subclass of mixers.base.Mixer")
        self.cls = cls
        self.declared: Conformance = declared(cls)
        try:
            known = defaults(cls)
        except ValueError as error:
            raise Broken(str(error)) from error
        # Two heads where nothing is said, or mistakes in their order could not be seen.
        self.options = {"n_heads": 2} if known.get("n_heads", 0) is None else {}
        self.options |= self.declared.options
        self.names = [name for name in known if name != "d_model"]
        try:
            causal = self.build().causal
        except Exception as error:
            raise Broken(f"cannot be built: {said(error)}") from error
        changes = self.declared.changes()
        if causal and "causal" in self.names and "causal" not in self.declared.alternatives:
            changes.append({"causal": False})
        self.settings: list[dict[str, Any]] = [{}, *changes]

    def build(self, dtype: torch.dtype = torch.float64, seed: int = 0, **changes: Any) -> Mixer:
        """A new mixer in eval mode; the same weights for the same seed."""
        torch.manual_seed(seed)
        options = {**self.options, **changes}
        return call(self.cls, options, self.cls.__name__, d_model=self.declared.d_model).to(dtype).eval()

    def input(self, rows: int, time: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
        """[rows, time, D], a normal sample."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(rows, time, self.declared.d_model, generator=generator, dtype=torch.float64).to(dtype)

    def each(self, causal: bool | None = None, **fixed: Any) -> Iterator[tuple[str, Mixer]]:
        """A label and a mixer of every setting with the fixed options; only causal ones, only others, or all."""
        for changes in self.settings:
            mixer = self.build(**changes | fixed)
            if causal is None or mixer.causal == causal:
                yield spelled(changes), mixer

    def causal(self) -> Iterator[tuple[str, Mixer]]:
        """Every causal setting.

        Raises:
            NotApplicable: there is none.
        """
        found = list(self.each(causal=True))
        if not found:
            raise NotApplicable("every token sees the later ones")
        yield from found


def spelled(changes: dict[str, Any]) -> str:
    """Options behind a description; nothing for none."""
    return "".join(f" {name}={value}" for name, value in changes.items())


def said(error: BaseException) -> str:
    """An exception in one line."""
    return f"raises {type(error).__name__}: {(str(error).strip() or 'without a text').splitlines()[0]}"


def gap(got: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest expected entry where that is above 1."""
    if got.shape != expected.shape:
        raise Broken(f"shape {list(got.shape)} instead of {list(expected.shape)}")
    if not got.numel():
        return 0.0
    got, expected = got.detach().double(), expected.detach().double()
    return ((got - expected).abs().max() / expected.abs().max().clamp(min=1)).item()


def same(got: Tensor, expected: Tensor, what: str) -> float:
    """0 for bitwise equal tensors."""
    if not torch.equal(got, expected):
        raise Broken(f"{what}: off by {gap(got, expected):.1e} where nothing may differ")
    return 0.0


def alone(mixer: Mixer, x: Tensor, ids: Tensor) -> Tensor:
    """The definition of a packed call: each document extracted, run alone, scattered back."""
    y = torch.zeros_like(x)
    for row, documents in enumerate(ids.tolist()):
        for document in set(documents) - {0}:
            where = [i for i, other in enumerate(documents) if other == document]
            y[row, where] = mixer(x[row : row + 1, where])[0]
    return y


def piecewise(mixer: Mixer, x: Tensor, cuts: tuple[int, ...], ids: Tensor | None = None) -> tuple[Tensor, State]:
    """`extend` piece by piece."""
    state, pieces = mixer.start(len(x), x), []
    for a, b in pairwise(cuts):
        y, state = mixer.extend(x[:, a:b], state, None if ids is None else Packing(ids[:, a:b]))
        pieces.append(y)
    return torch.cat(pieces, 1), state


def documents(rows: tuple[tuple[int, ...], ...]) -> Tensor:
    """Ids [B, T]."""
    return torch.tensor(rows, dtype=torch.int32)
