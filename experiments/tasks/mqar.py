"""Multi-query associative recall: many key-value pairs to remember, each asked for once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Literal

import numpy as np

from experiments.tasks.base import Row, SuiteSplit, SyntheticTask, at_least
from experiments.tasks.draws import different, unscored, whole_numbers


class MQAR(SyntheticTask):
    """Read kv pairs of a key and a value; then, at each key that comes again, say its value.

    One row of vocabulary 12 (keys 1..5, values 6..11), kv 2, length 16:

        position  0    1    2    3    4    5    6    7    8    9   10   11   12   13   14   15
                  key  val  key  val  gap 0     gap 1     gap 2     gap 3     gap 4     gap 5
        tokens    2    8    4    7    0    0    4    0    0    0    0    0    2    0    0    0
        labels    .    .    .    .    .    .    7    .    .    .    .    .    8    .    .    .      (. is -100)

    Keys are drawn from [1, V/2) and values from [V/2, V), both without replacement. The context k v k v ... takes the
    first 2 kv positions. What follows is cut into gaps of two positions, (T - 2 kv) // 2 of them; the keys, in the
    order of the context, draw theirs one after the other without replacement, gap i (from 1) with p(i) ~ i^(alpha - 1):
    most queries come soon after the context. A query is the first position of its gap and carries the label; the value
    is never shown again. All other positions hold filler, 0.

    A training row draws its kv evenly from `kv`, from its own stream, so every batch mixes them. Suites are named kv4,
    kv8, ...: validation has those of `kv`; test has those of `test_kv`, in rows of max(length, 4 kv) tokens, or under
    `test_length` length256, length512, ...: the same number of pairs in longer and longer rows.

    Args:
        vocabulary: V, even; the largest kv needs V/2 - 1 keys.
        length: T, tokens a training row, at least 4 times the largest of `kv`.
        kv: numbers of pairs to train on.
        test_kv: numbers of pairs to test on; they may go beyond the trained ones.
        test_length: tokens of the test rows, a suite each, all of the one number in `test_kv`; None: as above.
        alpha: the power law of the gaps, 0 < alpha <= 1; 1 is uniform.
        filler: zero, as in the published experiments, or random: any token of [0, V). That is harder: a key of the
            context may stand there by chance, before a wrong token. The label stays the value of the context.
        rows_per_suite: rows of every suite.
    Raises:
        ValueError: an option out of range; when the suites are drawn, too few distinct rows to fill them.
    Source: Arora, Eyuboglu et al. 2023, arXiv:2312.04927, and the generator published with it.
    """

    name = "mqar"

    def __init__(
        self,
        *,
        vocabulary: int = 256,
        length: int = 64,
        kv: Sequence[int] = (4, 8, 16),
        test_kv: Sequence[int] = (4, 8, 16, 32),
        test_length: Sequence[int] | None = None,
        alpha: float = 0.01,
        filler: Literal["zero", "random"] = "zero",
        rows_per_suite: int = 256,
    ) -> None:
        self.kv = whole_numbers("kv", kv)
        self.test_kv = whole_numbers("test_kv", test_kv)
        self.test_length = () if test_length is None else whole_numbers("test_length", test_length)
        self.length = at_least("length", length, 1)
        self.vocabulary = at_least("vocabulary", vocabulary, 1)
        self.rows_per_suite = at_least("rows_per_suite", rows_per_suite, 1)
        self.alpha = alpha
        self.filler = filler
        self._check()

    @property
    def longest(self) -> int:
        return max(self.length, *self.test_length, 4 * max(self.kv + self.test_kv))

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys((self.length, *self.test_length)))

    def _check(self) -> None:
        most = max(self.kv + self.test_kv)
        if self.vocabulary % 2 or self.vocabulary < 2 * (most + 1):
            raise ValueError(
                f"vocabulary={self.vocabulary} must be even and at least {2 * (most + 1)}: the keys are from 1 to "
                f"vocabulary / 2 - 1, and {most} pairs (the most of kv and test_kv) need one each"
            )
        if self.length < 4 * max(self.kv):
            raise ValueError(
                f"length={self.length} must be at least 4 * kv = {4 * max(self.kv)} (kv={list(self.kv)}): "
                f"a pair takes 2 tokens, its query 2 more"
            )
        if self.test_length and len(self.test_kv) > 1:
            raise ValueError(
                f"test_kv={list(self.test_kv)} must be one number of pairs under test_length={list(self.test_length)}"
            )
        if self.test_length and min(self.test_length) < 4 * self.test_kv[0]:
            raise ValueError(
                f"test_length={list(self.test_length)} must be at least 4 * test_kv = {4 * self.test_kv[0]} each"
            )
        if not 0 < self.alpha <= 1:
            raise ValueError(f"alpha={self.alpha!r} must be above 0 and at most 1")
        if self.filler not in ("zero", "random"):
            raise ValueError(f"filler={self.filler!r} must be zero or random")

    def draw(self, rng: np.random.Generator, difficulty: tuple[int, int] | None) -> Row:
        """One row, of `difficulty` pairs and tokens: tokens, labels [T] int64."""
        kv, length = difficulty or (self.kv[int(rng.random() * len(self.kv))], self.length)
        half = self.vocabulary // 2
        keys = different(rng, kv, 1, half)
        values = different(rng, kv, half, self.vocabulary)
        queries = 2 * kv + 2 * _gaps(rng, kv, (length - 2 * kv) // 2, self.alpha)
        tokens = self._fill(rng, length)
        tokens[0 : 2 * kv : 2] = keys
        tokens[1 : 2 * kv : 2] = values
        tokens[queries] = keys
        labels = unscored(length)
        labels[queries] = values
        return tokens, labels

    def oracle(self, tokens: np.ndarray) -> np.ndarray:
        """Remember what stands behind every key the first time; say it where the key comes again."""
        labels, values = unscored(len(tokens)), {}
        # Pairs and gaps alike begin at even positions.
        for at in range(0, len(tokens) - 1, 2):
            labels[at] = values.setdefault(tokens[at], tokens[at + 1])
        return labels

    def difficulties(self, split: SuiteSplit) -> dict[str, tuple[int, int]]:
        """Pairs and tokens of the rows of each suite."""
        if split == "test" and self.test_length:
            return {f"length{length}": (self.test_kv[0], length) for length in self.test_length}
        numbers = self.kv if split == "validation" else self.test_kv
        return {f"kv{kv}": (kv, max(self.length, 4 * kv)) for kv in numbers}

    def _fill(self, rng: np.random.Generator, length: int) -> np.ndarray:
        if self.filler == "zero":
            return np.zeros(length, dtype=np.int64)
        # Three times as fast as rng.integers at this size.
        return (rng.random(length) * self.vocabulary).astype(np.int64)


def _gaps(rng: np.random.Generator, kv: int, gaps: int, alpha: float) -> np.ndarray:
    """[kv] different gaps, counted from 0, the j-th is key j's: drawn one after the other without replacement."""
    # A race of exponential clocks with rates p(i): the order of arrival is that of successive draws.
    arrivals: np.ndarray = rng.standard_exponential(gaps) * _mean_arrivals(gaps, alpha)
    return arrivals.argsort()[:kv]


@cache
def _mean_arrivals(gaps: int, alpha: float) -> np.ndarray:
    """[gaps] 1 / p(i) up to a factor: i ** (1 - alpha), i from 1."""
    return np.arange(1, gaps + 1) ** (1 - alpha)
