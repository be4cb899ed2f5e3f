"""What the synthetic tasks share: draws, labels, and checks of options."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from experiments.tasks.base import NOT_SCORED, at_least


def different(rng: np.random.Generator, count: int, low: int, high: int) -> np.ndarray:
    """[count] different integers of [low, high), evenly, in the order drawn."""
    # Draws with replacement, repeats left out: the cost is that of `count`, not of the vocabulary, as in rng.choice.
    drawn: list[int] = []
    while len(drawn) < count:
        more = (rng.random(2 * count) * (high - low)).astype(np.int64) + low
        drawn = list(dict.fromkeys(drawn + more.tolist()))
    return np.array(drawn[:count])


def unscored(length: int) -> np.ndarray:
    """[length] labels of a row in which nothing is scored."""
    return np.full(length, NOT_SCORED, dtype=np.int64)


def next_tokens(tokens: np.ndarray) -> np.ndarray:
    """[T] labels of language modelling: the token behind each; nothing at the last one."""
    return np.append(tokens[1:], NOT_SCORED)


def whole_numbers(option: str, values: Sequence[int], least: int = 1) -> tuple[int, ...]:
    """`values` as a tuple of different integers >= `least`; a ValueError that names the option otherwise."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence) or not values:
        raise ValueError(f"{option}={values!r} must be a list of integers such as [4, 8, 16]")
    checked = tuple(at_least(f"{option} entry", value, least) for value in values)
    if len(set(checked)) < len(checked):
        raise ValueError(f"{option}={list(checked)} must not name a value twice")
    return checked
