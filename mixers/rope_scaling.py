"""Rotary positions past the trained length: the published ways to slow the turning down.

Glossary: R channels turn, in pairs i = 0 .. R/2 - 1; pair i turns by theta_i = base^(-2i/R) a token, once in
2 pi / theta_i tokens (its wavelength); L is the length trained for, s the factor by which it grows. The options are
called what published config.json files call them, where `none` is called `default`.

`frequencies` gives theta_i in float64, [R/2] or, where they change with the length, [.., R/2]; `amplitude` is what the
turned channels of queries and keys are both multiplied by.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from mixers.options import call, nearest


@dataclass(frozen=True)
class Scaling:
    """None: theta_i as trained."""

    by_length: ClassVar[bool] = False

    @property
    def amplitude(self) -> float:
        """Factor of the turned channels."""
        return 1.0

    def check(self, base: float, turned: int) -> None:
        """Raise ValueError where `turned` channels of that base are no use."""

    def frequencies(self, base: float, turned: int, length: Tensor) -> Tensor:
        """theta_i, for documents of that length [..]."""
        return base ** -_exponents(turned, length)


@dataclass(frozen=True)
class Linear(Scaling):
    """Position interpolation: positions are divided by s (Chen et al. 2023, arXiv:2306.15595, section 2.3)."""

    factor: float

    def __post_init__(self) -> None:
        _at_least(1, factor=self.factor)

    def frequencies(self, base: float, turned: int, length: Tensor) -> Tensor:
        """theta_i / s."""
        return base ** -_exponents(turned, length) / self.factor


@dataclass(frozen=True)
class Ntk(Scaling):
    """NTK-aware: a larger base, so that the slowest pair slows down by s and the fastest not at all.

    Source: Peng et al. 2023, arXiv:2309.00071, section 3.1 (bloc97's method).
    """

    factor: float

    def __post_init__(self) -> None:
        _at_least(1, factor=self.factor)

    def check(self, base: float, turned: int) -> None:
        """One pair is both the slowest and the fastest."""
        _at_least(4, **{"turning channels": turned})

    def frequencies(self, base: float, turned: int, length: Tensor) -> Tensor:
        """theta_i of the base b s^(R / (R - 2))."""
        return (base * self.factor ** (turned / (turned - 2))) ** -_exponents(turned, length)


@dataclass(frozen=True)
class Dynamic(Scaling):
    """NTK-aware with a factor that grows with the length n past L: s n / L - (s - 1).

    Source: Peng et al. 2023, arXiv:2309.00071, section 3.3; with s as transformers has it.
    """

    factor: float
    original_max_position_embeddings: int
    by_length: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _at_least(1, factor=self.factor, original_max_position_embeddings=self.original_max_position_embeddings)

    def check(self, base: float, turned: int) -> None:
        """One pair is both the slowest and the fastest."""
        _at_least(4, **{"turning channels": turned})

    def frequencies(self, base: float, turned: int, length: Tensor) -> Tensor:
        """theta_i of a base that grows with the length."""
        longer = length.to(torch.float64).clamp(min=self.original_max_position_embeddings)
        factor = self.factor * longer / self.original_max_position_embeddings - (self.factor - 1)
        return (base * factor ** (turned / (turned - 2)))[..., None] ** -_exponents(turned, length)


@dataclass(frozen=True)
class Yarn(Scaling):
    """YaRN: pairs that turn beta_fast times in L or more stay, up to beta_slow they are interpolated, a ramp between.

    Source: Peng et al. 2023, arXiv:2309.00071, section 3.2 and equation 22 (the attention factor). As published models
    do, the ramp is linear in i instead of in the number of turns, and `truncate` rounds its ends outwards.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        _at_least(1, factor=self.factor, original_max_position_embeddings=self.original_max_position_embeddings)
        _ordered("beta_slow", self.beta_slow, "beta_fast", self.beta_fast)
        _positive(attention_factor=self.attention_factor)

    @property
    def amplitude(self) -> float:
        """0.1 ln(s) + 1."""
        return 0.1 * math.log(self.factor) + 1 if self.attention_factor is None else self.attention_factor

    def frequencies(self, base: float, turned: int, length: Tensor) -> Tensor:
        """theta_i from as trained to theta_i / s."""
        first, last = (self._pair(turns, base, turned) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, turned - 1)
        pairs = torch.arange(turned // 2, device=length.device, dtype=torch.float64)
        ramp = ((pairs - first) / max(last - first, 0.001)).clamp(0, 1)
        return base ** -_exponents(turned, length) * (1 - ramp + ramp / self.factor)

    def _pair(self, turns: float, base: float, turned: int) -> float:
        """The pair, with a fraction, that turns so many times in L tokens."""
        return turned * math.log(self.original_max_position_embeddings / (2 * math.pi * turns)) / (2 * math.log(base))


@dataclass(frozen=True)
class LongRope(Scaling):
    """LongRoPE: a factor a pair, one list up to L and one past it (Ding et al. 2024, arXiv:2402.13753, section 3).

    The factors are given; the search that finds them is not here. Say s as `factor`, or the attention factor itself.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    factor: float | None = None
    attention_factor: float | None = None
    by_length: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if (self.factor is None) == (self.attention_factor is None):
            raise ValueError(
                f"give one of factor={self.factor} (the longest length over the original one) and "
                f"attention_factor={self.attention_factor}"
            )
        _at_least(2, original_max_position_embeddings=self.original_max_position_embeddings)
        _at_least(1, factor=1 if self.factor is None else self.factor)
        _positive(attention_factor=self.attention_factor)

    @property
    def amplitude(self) -> float:
        """sqrt(1 + ln(s) / ln(L))."""
        if self.attention_factor is not None:
            return self.attention_factor
        assert self.factor is not None
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_position_embeddings))

    def check(self, base: float, turned: int) -> None:
        """A factor above 0 for every pair."""
        for name, factors in (("short_factor", self.short_factor), ("long_factor", self.long_factor)):
            if len(factors) != turned // 2 or min(factors) <= 0:
                raise ValueError(f"{name}={list(factors)} must be {turned // 2} numbers above 0, one a pair")

    def frequencies(self, base: float, turned: int, length: Tensor) -> Tensor:
        """theta_i over its factor of the list that the length asks for."""
        long, short = (
            torch.tensor(factors, device=length.device, dtype=torch.float64)
            for factors in (self.long_factor, self.short_factor)
        )
        past = (length > self.original_max_position_embeddings)[..., None]
        return base ** -_exponents(turned, length) / torch.where(past, long, short)


@dataclass(frozen=True)
class Llama3(Scaling):
    """Llama 3.1's own: wavelengths past L / low_freq_factor are interpolated, those below L / high_freq_factor stay.

    Between the two, linear in L over the wavelength. Source: the reference code of Llama 3.1 (arXiv:2407.21783 names
    the base only).
    """

    factor: float
    original_max_position_embeddings: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        _at_least(1, factor=self.factor, original_max_position_embeddings=self.original_max_position_embeddings)
        _ordered("low_freq_factor", self.low_freq_factor, "high_freq_factor", self.high_freq_factor)

    def frequencies(self, base: float, turned: int, length: Tensor) -> Tensor:
        """theta_i from theta_i / s to as trained."""
        plain = base ** -_exponents(turned, length)
        turns = self.original_max_position_embeddings * plain / (2 * math.pi)
        kept = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return plain * (kept + (1 - kept) / self.factor)


KINDS: dict[str, type[Scaling]] = {
    "linear": Linear,
    "ntk": Ntk,
    "dynamic": Dynamic,
    "yarn": Yarn,
    "longrope": LongRope,
    "llama3": Llama3,
    "none": Scaling,
    "default": Scaling,
}


def scaling(options: Mapping[str, Any] | None) -> Scaling:
    """The scaling that `rope_scaling={"rope_type": .., ..}` says; None: none.

    Raises:
        ValueError: an unknown kind or option, one that is missing, or a value out of range.
    """
    if options is None:
        return Scaling()
    rest = dict(options)
    kind = rest.pop("rope_type", None)
    if not isinstance(kind, str) or kind not in KINDS:
        close = nearest(kind, KINDS) if isinstance(kind, str) else ""
        raise ValueError(f"rope_scaling.rope_type={kind!r} is not allowed{close}; allowed: {', '.join(KINDS)}")
    return call(KINDS[kind], rest, f"rope_scaling {kind!r}")


def _exponents(turned: int, like: Tensor) -> Tensor:
    """2i / R."""
    return torch.arange(0, turned, 2, device=like.device, dtype=torch.float64) / turned


def _at_least(limit: int, **values: float) -> None:
    for name, value in values.items():
        if value < limit:
            raise ValueError(f"{name}={value} must be at least {limit}")


def _positive(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None and value <= 0:
            raise ValueError(f"{name}={value} must be above 0")


def _ordered(low_name: str, low: float, high_name: str, high: float) -> None:
    if not 0 < low < high:
        raise ValueError(f"{low_name}={low} must be above 0 and below {high_name}={high}")
