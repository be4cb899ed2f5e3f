"""MAD's in-context recall: pairs of a key and a value; where a key comes again, say its value."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from experiments.tasks.base import Row, SuiteSplit, SyntheticTask, at_least
from experiments.tasks.draws import next_tokens, unscored, whole_numbers


class InContextRecall(SyntheticTask):
    """Read pairs of a key and a value; at each key that was shown before in the row, say its value.

    One row of vocabulary 8 (keys 0..3, values 4..7), length 12:

        position    0    1    2    3    4    5    6    7    8    9   10   11
                    key  val  key  val  key  val  key  val  key  val  key  val
        tokens      2    5    0    7    2    5    3    5    0    7    3    5
        labels      .    .    .    .    5    .    .    .    7    .    5    .    (. is -100)
        training    5    0    7    2    5    3    5    0    7    3    5    .

    Every pair draws its key evenly and with replacement; a key has one value throughout the row, drawn evenly (two keys
    may have the same). The key of the last pair is drawn among those shown. Suites score the values that can be known;
    a training row is scored as language modelling, on every next token, as in the public code.

    Suites are named length64, length128, ...: validation has that of `length`, test those of `test_length`.

    Args:
        vocabulary: V; the lower half are keys, the upper half values.
        length: T, tokens a training row, even.
        test_length: lengths to test at, even; they may go beyond the trained one.
        rows_per_suite: rows of every suite.
    Raises:
        ValueError: an option out of range.
    Source: Poli et al. 2024, arXiv:2403.17844, and the code published with it (multi-query, as in its configs).
    """

    name = "mad/in_context_recall"
    # Answers stand behind the positions that ask for them.
    reads = "past"

    def __init__(
        self,
        *,
        vocabulary: int = 16,
        length: int = 128,
        test_length: Sequence[int] = (64, 128, 256),
        rows_per_suite: int = 256,
    ) -> None:
        self.vocabulary = at_least("vocabulary", vocabulary, 2)
        self.length = even("length", length)
        self.test_length = tuple(even("test_length entry", n) for n in whole_numbers("test_length", test_length))
        self.rows_per_suite = at_least("rows_per_suite", rows_per_suite, 1)

    @property
    def longest(self) -> int:
        return max(self.length, *self.test_length)

    def draw(self, rng: np.random.Generator, difficulty: int | None) -> Row:
        """One row of `difficulty` tokens."""
        tokens, labels = pairs(rng, difficulty or self.length, self.vocabulary, self.vocabulary, 0.0)
        return tokens, next_tokens(tokens) if difficulty is None else labels

    def difficulties(self, split: SuiteSplit) -> dict[str, int]:
        return {f"length{n}": n for n in ((self.length,) if split == "validation" else self.test_length)}

    def oracle(self, tokens: np.ndarray) -> np.ndarray:
        """Remember every pair; at a key, say what stood behind it the last time."""
        return recalled(tokens, self.vocabulary)


def pairs(rng: np.random.Generator, length: int, clean: int, vocabulary: int, noise: float) -> Row:
    """One row of pairs, and the labels of the values that can be known.

    Args:
        clean: keys are from [0, clean // 2), values from [clean // 2, clean), noise from [clean, vocabulary).
        noise: share of the pairs, the last and another one aside, in whose place stands noise.
    """
    count, half = length // 2, clean // 2
    keys = rng.integers(half, size=count)
    values = rng.integers(half, clean, size=half)
    noisy = rng.random(count) < noise
    # There must be something to ask for.
    noisy[[rng.integers(count - 1), -1]] = False
    keys[-1] = rng.choice(np.unique(keys[:-1][~noisy[:-1]]))
    tokens = np.stack([keys, values[keys]], 1)
    tokens[noisy] = clean + (rng.random((int(noisy.sum()), 2)) * (vocabulary - clean)).astype(np.int64)
    known = ~noisy
    shown = np.flatnonzero(known)
    known[shown[np.unique(keys[shown], return_index=True)[1]]] = False
    labels = unscored(length)
    labels[0::2][known] = values[keys[known]]
    return tokens.reshape(-1), labels


def recalled(tokens: np.ndarray, clean: int) -> np.ndarray:
    """[T] at each key, what stood behind it the last time."""
    labels, values = unscored(len(tokens)), {}
    for at in range(0, len(tokens), 2):
        if tokens[at] < clean // 2:
            labels[at] = values.get(tokens[at], labels[at])
            values[tokens[at]] = tokens[at + 1]
    return labels


def even(option: str, length: int) -> int:
    """`length`, if it is an even integer of at least 4; a ValueError that names the option otherwise."""
    if at_least(option, length, 4) % 2:
        raise ValueError(f"{option}={length} must be even: a row is made of pairs")
    return length
