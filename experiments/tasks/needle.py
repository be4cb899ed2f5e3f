"""Needle in a haystack: facts among noise, asked for at the end; accuracy by the depth of the fact and the length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from experiments.tasks.base import NOT_SCORED, Row, SuiteSplit, SyntheticTask, at_least
from experiments.tasks.draws import different, unscored, whole_numbers


class Needle(SyntheticTask):
    """Read facts, a key and its value each, among noise; at the end every key comes again: say its value.

    One row of a suite of depth 0, vocabulary 12 (keys 0..2, values 3..5, noise 6..11), facts 2, length 12:

        position    0    1    2    3    4    5    6    7    8    9   10   11
                    fact                          fact                key  key
        tokens      1    5    8   10    6    6    2    5    9   11    2    1
        labels      .    .    .    .    .    .    .    .    .    .    .    5    (. is -100)

    What is before the questions is cut into slots of two tokens, (length - facts) // 2 of them; facts take different
    slots, noise is everywhere else. Keys differ, values need not; the questions come in a random order. A training row
    draws all slots evenly and is scored at every question.

    A row of a suite is drawn alike, but one of its facts is put at a depth, and only that one is scored: 0 is the first
    slot, 100 the last one, between them the nearest to so many percent. Suites are named length256_depth50, ...:
    validation has all depths of `length`, test those of `test_length`. Noise never is a key, so what makes a row
    hard is how far the fact is away, and how many others there are.

    Args:
        vocabulary: V, a multiple of 4; the first quarter are keys, the second values, the rest noise.
        length: T, tokens a training row, at least 3 facts.
        facts: number of facts, at most V / 4.
        test_length: lengths to test at, at least 3 facts; they may go beyond the trained one.
        depth: depths to test at, in percent.
        rows_per_suite: rows of every suite, and there are many suites.
    Raises:
        ValueError: an option out of range.
    Source: the depth by length grid is Kamradt's needle-in-a-haystack test (2023), several facts are the multi-key task
        of Hsieh et al. 2024, arXiv:2404.06654; here in tokens instead of English, so that small models can learn it.
    """

    name = "needle"

    def __init__(
        self,
        *,
        vocabulary: int = 64,
        length: int = 128,
        facts: int = 1,
        test_length: Sequence[int] = (64, 128, 256),
        depth: Sequence[int] = (0, 25, 50, 75, 100),
        rows_per_suite: int = 64,
    ) -> None:
        self.facts = at_least("facts", facts, 1)
        self.vocabulary = at_least("vocabulary", vocabulary, 4)
        if self.vocabulary % 4 or self.vocabulary < 4 * self.facts:
            raise ValueError(f"vocabulary={vocabulary} must be a multiple of 4 and at least 4 * facts = {4 * facts}")
        self.length = at_least("length", length, 3 * self.facts)
        self.test_length = whole_numbers("test_length", test_length, 3 * self.facts)
        self.depth = whole_numbers("depth", depth, 0)
        if max(self.depth) > 100:
            raise ValueError(f"depth={list(depth)} must be percents, from 0 to 100")
        self.rows_per_suite = at_least("rows_per_suite", rows_per_suite, 1)
        self.keys, self.clean = self.vocabulary // 4, self.vocabulary // 2

    @property
    def longest(self) -> int:
        return max(self.length, *self.test_length)

    def draw(self, rng: np.random.Generator, difficulty: tuple[int, int] | None) -> Row:
        """One row of (length, depth); the fact at that depth is the first one drawn."""
        length, depth = difficulty or (self.length, None)
        slots = (length - self.facts) // 2
        places = 2 * different(rng, self.facts, 0, slots)
        if depth is not None:
            _put_first(places, 2 * round(depth / 100 * (slots - 1)))
        keys = different(rng, self.facts, 0, self.keys)
        values = rng.integers(self.keys, self.clean, size=self.facts)
        tokens, labels = rng.integers(self.clean, self.vocabulary, size=length), unscored(length)
        tokens[places], tokens[places + 1] = keys, values
        order = rng.permutation(self.facts)
        tokens[length - self.facts :] = keys[order]
        labels[length - self.facts :] = np.where((order == 0) | (depth is None), values[order], NOT_SCORED)
        return tokens, labels

    def difficulties(self, split: SuiteSplit) -> dict[str, tuple[int, int]]:
        lengths = (self.length,) if split == "validation" else self.test_length
        return {f"length{n}_depth{depth}": (n, depth) for n in lengths for depth in self.depth}

    def oracle(self, tokens: np.ndarray) -> np.ndarray:
        """Remember what stands behind every key; say it where the key comes again."""
        labels, values = unscored(len(tokens)), {}
        for at in np.flatnonzero(tokens < self.keys):
            key = tokens[at]
            labels[at] = values.get(key, NOT_SCORED)
            values.setdefault(key, tokens[min(at + 1, len(tokens) - 1)])
        return labels


def _put_first(places: np.ndarray, wanted: int) -> None:
    """Move the first fact to a place; a fact that is there takes the first one's."""
    places[places == wanted] = places[0]
    places[0] = wanted
