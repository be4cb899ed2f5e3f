"""MAD's fuzzy in-context recall: recall of keys and values that are several tokens long."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from experiments.tasks.base import NOT_SCORED, Row, SuiteSplit, SyntheticTask, at_least
from experiments.tasks.draws import next_tokens, unscored, whole_numbers

Motif = tuple[int, ...]


class FuzzyRecall(SyntheticTask):
    """Read pairs of a key and a value, each of several tokens; at the end of a key shown before, say its whole value.

    One row of a suite of vocabulary 9 (keys 0..3, values 4..7, pad 8), key_size 2, value_size 2, length 14:

        position    0    1    2    3    4    5    6    7    8    9   10   11   12   13
                    pad  pad  pad  key ---  val ---  key ---  val  key ---  val ---
        tokens      8    8    8    2    0    5    4    1    2    6    2    0    5    4
        labels      .    .    .    .    .    .    .    .    .    .    .    5    4    .    (. is -100)
        training    8    8    2    0    5    4    1    2    6    2    0    5    4    .

    A key is 1 to key_size different tokens of the lower half, a value 1 to value_size different ones of the upper half;
    lengths are drawn evenly, then the tokens. In suites all keys have key_size tokens, so where one ends is known. A
    key has one value throughout the row. The row ends with the probe, a pair that is drawn first and surely shown once
    before; pairs follow each other until one more might not fit in front of it, and pads fill the row from the left.
    Suites score the values that can be known, all tokens of them; a training row is scored as language modelling, on
    every next token, as in the public code, pads too.

    Suites are named length64, length128, ...: validation has that of `length`, test those of `test_length`.

    Args:
        vocabulary: V; V - 1 is the pad, of the rest the lower half are keys.
        length: T, tokens a training row, at least 3 (key_size + value_size).
        key_size, value_size: most tokens of a key, of a value.
        test_length: lengths to test at; they may go beyond the trained one.
        rows_per_suite: rows of every suite.
    Raises:
        ValueError: an option out of range.
    Source: Poli et al. 2024, arXiv:2403.17844, and the code published with it (multi-query, as in its configs). There,
        a few rows ask for a probe that was never shown; here, its first place is drawn so that it always fits.
    """

    name = "mad/fuzzy_recall"
    # Answers stand behind the positions that ask for them.
    reads = "past"

    def __init__(
        self,
        *,
        vocabulary: int = 16,
        length: int = 128,
        key_size: int = 3,
        value_size: int = 3,
        test_length: Sequence[int] = (64, 128, 256),
        rows_per_suite: int = 256,
    ) -> None:
        self.key_size, self.value_size = at_least("key_size", key_size, 1), at_least("value_size", value_size, 1)
        self.largest = self.key_size + self.value_size
        self.length = at_least("length", length, 3 * self.largest)
        self.test_length = whole_numbers("test_length", test_length, 3 * self.largest)
        self.vocabulary = at_least("vocabulary", vocabulary, 1)
        self.pad, self.keys = self.vocabulary - 1, (self.vocabulary - 1) // 2
        self.rows_per_suite = at_least("rows_per_suite", rows_per_suite, 1)
        least = 1 + max(2 * self.key_size, 2 * self.value_size - 1)
        if self.vocabulary < least:
            raise ValueError(
                f"vocabulary={vocabulary} must be at least {least}: a pad, and key_size={key_size} different tokens in "
                f"the lower half of the rest, value_size={value_size} in the upper"
            )

    @property
    def longest(self) -> int:
        return max(self.length, *self.test_length)

    def draw(self, rng: np.random.Generator, difficulty: int | None) -> Row:
        """One row of `difficulty` tokens."""
        length, training = difficulty or self.length, difficulty is None
        # As many as could fit, and the probe first.
        count = 1 + length // 2
        keys = _motifs(rng, count, 0, self.keys, 1 if training else self.key_size, self.key_size)
        values = dict(zip(keys[::-1], _motifs(rng, count, self.keys, self.pad, 1, self.value_size), strict=True))
        # Another pair begins before `end` only: it fits in front of the last one, whatever its size.
        end = length - len(keys[0]) - len(values[keys[0]]) - self.largest
        due = rng.integers(end - self.largest + 1)
        order: list[Motif] = []
        used = 0
        while used < end:
            order.append(keys[0] if used >= due and keys[0] not in order else keys[1 + len(order)])
            used += len(order[-1]) + len(values[order[-1]])
        tokens, labels = _row([*order, keys[0]], values, length, self.pad)
        return tokens, next_tokens(tokens) if training else labels

    def difficulties(self, split: SuiteSplit) -> dict[str, int]:
        return {f"length{n}": n for n in ((self.length,) if split == "validation" else self.test_length)}

    def oracle(self, tokens: np.ndarray) -> np.ndarray:
        """Cut the row into runs of key and value tokens; where a key comes again, say its value token by token."""
        labels, values = unscored(len(tokens)), {}
        runs = [list(run) for _, run in groupby(enumerate(tokens), lambda at: self._kind(at[1]))]
        runs = [run for run in runs if run[0][1] != self.pad]
        for key, value in zip(runs[0::2], runs[1::2], strict=True):
            motif = tuple(token for _, token in key)
            said = values.setdefault(motif, [token for _, token in value])
            first = key[-1][0]
            labels[first : first + len(said)] = said
        return labels

    def _kind(self, token: int) -> str:
        return "key" if token < self.keys else "pad" if token == self.pad else "value"


def _motifs(rng: np.random.Generator, count: int, low: int, high: int, least: int, most: int) -> list[Motif]:
    """`count` motifs of `least` to `most` different tokens of [low, high)."""
    tokens = low + rng.random((count, high - low)).argsort(1)[:, :most]
    sizes = rng.integers(least, most + 1, size=count)
    return [tuple(motif[:size]) for motif, size in zip(tokens.tolist(), sizes.tolist(), strict=True)]


def _row(keys: Sequence[Motif], values: dict[Motif, Motif], length: int, pad: int) -> Row:
    """The pairs behind each other, pads in front of them; labels where a value can be known."""
    tokens: list[int] = []
    known: list[bool] = []
    for at, key in enumerate(keys):
        tokens += [*key, *values[key]]
        known += [False] * len(key) + [key in keys[:at]] * len(values[key])
    pads = length - len(tokens)
    row = np.array([pad] * pads + tokens)
    answers = np.where([False] * pads + known, row, NOT_SCORED)
    # An answer is the label of the token before it.
    return row, next_tokens(answers)
