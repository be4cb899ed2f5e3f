"""MAD's selective copying: tokens among blanks, to be said again in their order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from experiments.tasks.base import Row, SuiteSplit, SyntheticTask, at_least
from experiments.tasks.draws import unscored, whole_numbers


class SelectiveCopying(SyntheticTask):
    """Read tokens with blanks between them, then the sign to copy; then say the tokens in their order.

    One row of vocabulary 6 (tokens 0..3, blank 4, sign 5), copies 3, length 11:

        position    0    1    2    3    4    5    6    7    8    9   10
                                                         sign
        tokens      4    2    4    4    0    4    2    5    4    4    4
        labels      .    .    .    .    .    .    .    .    2    0    2    (. is -100)

    The tokens to copy are drawn evenly and with replacement. Each of the length - 2 copies - 1 blanks goes in front of
    one of them, drawn evenly: the last one always stands at the sign. The answer is said on blanks, one a token; no
    answer is read. Training rows and suites are scored alike.

    A training row draws its number of tokens evenly from `copies`. Suites are named copies8, copies16, ...: validation
    has those of `copies`, test those of `test_copies`.

    Args:
        vocabulary: V; V - 2 is the blank, V - 1 the sign.
        length: T, tokens a row, at least 2 copies + 2.
        copies: numbers of tokens to copy in training.
        test_copies: numbers to test at; they may go beyond the trained ones.
        rows_per_suite: rows of every suite.
    Raises:
        ValueError: an option out of range.
    Source: Poli et al. 2024, arXiv:2403.17844, and the code published with it.
    """

    name = "mad/selective_copying"

    def __init__(
        self,
        *,
        vocabulary: int = 16,
        length: int = 256,
        copies: Sequence[int] = (16,),
        test_copies: Sequence[int] = (4, 8, 16, 32),
        rows_per_suite: int = 256,
    ) -> None:
        self.vocabulary = at_least("vocabulary", vocabulary, 3)
        self.copies = whole_numbers("copies", copies)
        self.test_copies = whole_numbers("test_copies", test_copies)
        self.rows_per_suite = at_least("rows_per_suite", rows_per_suite, 1)
        self.blank, self.sign = self.vocabulary - 2, self.vocabulary - 1
        self.length = at_least("length", length, 1)
        least = 2 * max(self.copies + self.test_copies) + 2
        if self.length < least:
            raise ValueError(
                f"length={length} must be at least {least}: the most of copies and test_copies stand there twice, with "
                "a blank and the sign"
            )

    def draw(self, rng: np.random.Generator, difficulty: int | None) -> Row:
        """One row with `difficulty` tokens to copy."""
        count = self.copies[rng.integers(len(self.copies))] if difficulty is None else difficulty
        copied = rng.integers(self.blank, size=count)
        before = np.bincount(rng.integers(count, size=self.length - 2 * count - 1), minlength=count)
        tokens, labels = np.full(self.length, self.blank), unscored(self.length)
        tokens[np.arange(count) + before.cumsum()] = copied
        tokens[self.length - count - 1] = self.sign
        labels[self.length - count :] = copied
        return tokens, labels

    def difficulties(self, split: SuiteSplit) -> dict[str, int]:
        return {f"copies{n}": n for n in (self.copies if split == "validation" else self.test_copies)}

    def oracle(self, tokens: np.ndarray) -> np.ndarray:
        """Write down all that is no blank before the sign; say it behind the sign."""
        sign = int(np.flatnonzero(tokens == self.sign)[0])
        labels = unscored(len(tokens))
        labels[sign + 1 :] = [token for token in tokens[:sign] if token != self.blank]
        return labels
