"""Induction heads: say what stood behind the trigger the first time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from experiments.tasks.base import Row, SuiteSplit, SyntheticTask, at_least
from experiments.tasks.draws import unscored, whole_numbers


class Induction(SyntheticTask):
    """Read random tokens, among them one trigger; when the trigger comes again, at the end, say what followed it.

    One row of vocabulary 8 (tokens 0..6, trigger 7), length 10:

        position    0    1    2    3    4    5    6    7    8    9
                                 trig                         trig
        tokens      3    0    3    7    5    1    0    6    5    7
        labels      .    .    .    .    .    .    .    .    .    5    (. is -100)

    Tokens are drawn evenly and with replacement. The first trigger stands at a place drawn evenly from 0 to length - 3,
    the second one at the end; its label is the only one of the row. Training rows and suites are scored alike; guessing
    is right once in V - 1.

    Suites are named length64, length128, ...: validation has that of `length`, test those of `test_length`.

    Args:
        vocabulary: V; V - 1 is the trigger.
        length: T, tokens a training row.
        test_length: lengths to test at; they may go far beyond the trained one.
        rows_per_suite: rows of every suite.
    Raises:
        ValueError: an option out of range.
    Source: Olsson et al. 2022, arXiv:2209.11895, for the mechanism; the task of Gu and Dao 2023, arXiv:2312.00752,
        section 4.1.2 (vocabulary 16, trained at 256, tested at 64 to 2 ** 20), after Fu et al. 2023, arXiv:2212.14052.
    """

    name = "induction"

    def __init__(
        self,
        *,
        vocabulary: int = 16,
        length: int = 256,
        test_length: Sequence[int] = (64, 128, 256, 512),
        rows_per_suite: int = 256,
    ) -> None:
        self.vocabulary = at_least("vocabulary", vocabulary, 3)
        self.length = at_least("length", length, 3)
        self.test_length = whole_numbers("test_length", test_length, 3)
        self.rows_per_suite = at_least("rows_per_suite", rows_per_suite, 1)
        self.trigger = self.vocabulary - 1

    @property
    def longest(self) -> int:
        return max(self.length, *self.test_length)

    def draw(self, rng: np.random.Generator, difficulty: int | None) -> Row:
        """One row of `difficulty` tokens."""
        length = difficulty or self.length
        tokens, labels = rng.integers(self.trigger, size=length), unscored(length)
        first = rng.integers(length - 2)
        tokens[[first, -1]] = self.trigger
        labels[-1] = tokens[first + 1]
        return tokens, labels

    def difficulties(self, split: SuiteSplit) -> dict[str, int]:
        return {f"length{n}": n for n in ((self.length,) if split == "validation" else self.test_length)}

    def oracle(self, tokens: np.ndarray) -> np.ndarray:
        """Look for the trigger; at the end, say the token behind it."""
        labels = unscored(len(tokens))
        labels[-1] = tokens[tokens.tolist().index(self.trigger) + 1]
        return labels
