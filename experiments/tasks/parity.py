"""Parity: is the number of ones odd?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from experiments.tasks.base import Row, SuiteSplit, SyntheticTask, at_least
from experiments.tasks.draws import unscored, whole_numbers


class Parity(SyntheticTask):
    """Read bits; at the last one, say whether the number of ones was odd.

    One row of length 7:

        position    0    1    2    3    4    5    6
        tokens      1    0    1    1    0    0    1
        labels      .    .    .    .    .    .    0    (. is -100)
        scored: every
        labels      1    1    0    1    1    1    0

    Bits are even and independent. A training row draws its length evenly from `shortest` to `length`; shorter rows of a
    batch are padded. Training rows and suites are scored alike; guessing is right half of the time. One bit of state
    solves it, and no single bit can be left out.

    Suites are named length40, length80, ...: validation has that of `length`, test those of `test_length`.

    Args:
        shortest, length: fewest and most bits of a training row.
        test_length: lengths to test at; they may go beyond the trained ones.
        scored: last, as published; or every: the parity so far at every bit, which is easier to learn.
        rows_per_suite: rows of every suite.
    Raises:
        ValueError: an option out of range; when the suites are drawn, too few distinct rows to fill them.
    Source: Delétang et al. 2023, arXiv:2207.02098, appendix A; lengths of Grazzi et al. 2024, arXiv:2411.12537.
    """

    name = "parity"
    vocabulary = 2

    def __init__(
        self,
        *,
        shortest: int = 3,
        length: int = 40,
        test_length: Sequence[int] = (40, 80, 160, 256),
        scored: Literal["last", "every"] = "last",
        rows_per_suite: int = 256,
    ) -> None:
        self.shortest, self.length = at_least("shortest", shortest, 1), at_least("length", length, 1)
        if self.shortest > self.length:
            raise ValueError(f"shortest={shortest} must be at most length={length}")
        self.test_length = whole_numbers("test_length", test_length)
        if scored not in ("last", "every"):
            raise ValueError(f"scored={scored!r} must be last or every")
        self.scored = scored
        self.rows_per_suite = at_least("rows_per_suite", rows_per_suite, 1)

    @property
    def longest(self) -> int:
        return max(self.length, *self.test_length)

    def draw(self, rng: np.random.Generator, difficulty: int | None) -> Row:
        """One row of `difficulty` bits."""
        length = rng.integers(self.shortest, self.length + 1) if difficulty is None else difficulty
        tokens, labels = rng.integers(2, size=length), unscored(length)
        where = slice(-1, None) if self.scored == "last" else slice(None)
        labels[where] = (tokens.cumsum() % 2)[where]
        return tokens, labels

    def difficulties(self, split: SuiteSplit) -> dict[str, int]:
        return {f"length{n}": n for n in ((self.length,) if split == "validation" else self.test_length)}

    def oracle(self, tokens: np.ndarray) -> np.ndarray:
        """Turn a switch at every one; say where it stands."""
        labels, odd = unscored(len(tokens)), False
        for at, bit in enumerate(tokens):
            odd ^= bool(bit)
            labels[at] = odd
        return labels
