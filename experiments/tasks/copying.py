"""Copying: read a text of random letters, then say it again, letter by letter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from experiments.tasks.base import Row, SuiteSplit, SyntheticTask, at_least
from experiments.tasks.draws import unscored, whole_numbers


class Copying(SyntheticTask):
    """Read a string of letters and the sign to copy; then say the string, reading what was said, and the end.

    One row of vocabulary 8 (letters 0..4, begin 5, copy 6, end 7), letters 3, length 8:

        position    0    1    2    3    4    5    6    7
                  begin               copy
        tokens      5    2    0    2    6    2    0    2
        labels      .    .    .    .    2    0    2    7    (. is -100)

    Letters are drawn evenly and with replacement. A training row draws their number evenly from `shortest` to
    `letters`; shorter rows of a batch are padded. Training rows and suites are scored alike. A letter may come several
    times, so what to say next is known from the place in the string, or from the last few letters.

    Suites are named letters16, letters32, ...: validation has that of `letters`, test those of `test_letters`.

    Args:
        vocabulary: V; the last three are begin, copy and end. 29: as many letters as the alphabet has.
        shortest, letters: fewest and most letters of a training row.
        test_letters: numbers of letters to test at; they may go beyond the trained ones.
        rows_per_suite: rows of every suite.
    Raises:
        ValueError: an option out of range; when the suites are drawn, too few distinct rows to fill them.
    Source: Jelassi et al. 2024, arXiv:2402.01032, section 3.2 (26 letters, uniform lengths, next-token loss on the
        copy). There, a training row holds as many examples as fit; here, one.
    """

    name = "copying"
    # Answers stand behind the positions that ask for them.
    reads = "past"

    def __init__(
        self,
        *,
        vocabulary: int = 29,
        shortest: int = 4,
        letters: int = 16,
        test_letters: Sequence[int] = (8, 16, 24, 32),
        rows_per_suite: int = 256,
    ) -> None:
        self.vocabulary = at_least("vocabulary", vocabulary, 4)
        self.shortest, self.letters = at_least("shortest", shortest, 1), at_least("letters", letters, 1)
        if self.shortest > self.letters:
            raise ValueError(f"shortest={shortest} must be at most letters={letters}")
        self.test_letters = whole_numbers("test_letters", test_letters)
        self.rows_per_suite = at_least("rows_per_suite", rows_per_suite, 1)
        self.length = 2 * self.letters + 2
        self.begin, self.copy, self.end = range(self.vocabulary - 3, self.vocabulary)

    @property
    def longest(self) -> int:
        return 2 * max(self.letters, *self.test_letters) + 2

    def draw(self, rng: np.random.Generator, difficulty: int | None) -> Row:
        """One row of `difficulty` letters."""
        count = rng.integers(self.shortest, self.letters + 1) if difficulty is None else difficulty
        text = rng.integers(self.begin, size=count)
        tokens, labels = np.array([self.begin, *text, self.copy, *text]), unscored(2 * count + 2)
        labels[count + 1 :] = [*text, self.end]
        return tokens, labels

    def difficulties(self, split: SuiteSplit) -> dict[str, int]:
        return {f"letters{n}": n for n in ((self.letters,) if split == "validation" else self.test_letters)}

    def oracle(self, tokens: np.ndarray) -> np.ndarray:
        """Write down the letters before the sign to copy; say them from there on, then the end."""
        sign = tokens.tolist().index(self.copy)
        labels = unscored(len(tokens))
        labels[sign:] = [*tokens[1:sign], self.end]
        return labels
