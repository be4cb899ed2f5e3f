"""Forgetting: keys are written again and again; only the last value of each counts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from experiments.tasks.base import NOT_SCORED, Row, SuiteSplit, SyntheticTask, at_least
from experiments.tasks.draws import different, unscored, whole_numbers


class Forgetting(SyntheticTask):
    """Read keys with values, the same keys several times with other values; at the end, say each key's last value.

    One row of vocabulary 8 (keys 0..3, values 4..7), keys 2, writes 4, length 10:

        position    0    1    2    3    4    5    6    7    8    9
                    key  val  key  val  key  val  key  val  key  key
        tokens      2    5    0    7    2    4    2    7    0    2
        labels      .    .    .    .    .    .    .    .    7    7    (. is -100)

    The row's keys are drawn without replacement. Each is written once, and the other writes - keys times a key is drawn
    evenly; all in a random order. A value is drawn evenly among those that its key does not have at that moment, so an
    old value is never right by chance of being repeated at once. Then every key comes once more, in a random order.

    A training row draws its number of writes evenly from `writes`; shorter rows of a batch are padded. Suites are named
    writes8, writes16, ...: validation has those of `writes`, test those of `test_writes`. What makes a row hard is how
    often a key was overwritten, writes / keys - 1 times on average: a state that only adds has all values in it.

    Args:
        vocabulary: V, even; the lower half are keys, the upper half values.
        keys: number of keys of a row.
        writes: numbers of writes to train on, at least `keys`.
        test_writes: numbers of writes to test at; they may go beyond the trained ones.
        rows_per_suite: rows of every suite.
    Raises:
        ValueError: an option out of range.
    Source: our own; the associative recall of Arora et al. 2023, arXiv:2312.04927, with keys that are written again, as
        Schlag et al. 2021, arXiv:2102.11174, section 6.1, setting 2, test an update rule.
    """

    name = "forgetting"

    def __init__(
        self,
        *,
        vocabulary: int = 64,
        keys: int = 4,
        writes: Sequence[int] = (4, 8, 16),
        test_writes: Sequence[int] = (4, 8, 16, 32),
        rows_per_suite: int = 256,
    ) -> None:
        self.keys = at_least("keys", keys, 1)
        self.vocabulary = at_least("vocabulary", vocabulary, 4)
        if self.vocabulary % 2 or self.vocabulary < 2 * self.keys:
            raise ValueError(f"vocabulary={vocabulary} must be even and at least 2 * keys = {2 * self.keys}")
        self.writes = whole_numbers("writes", writes, self.keys)
        self.test_writes = whole_numbers("test_writes", test_writes, self.keys)
        self.rows_per_suite = at_least("rows_per_suite", rows_per_suite, 1)
        self.length = 2 * max(self.writes) + self.keys

    @property
    def longest(self) -> int:
        return 2 * max(self.writes + self.test_writes) + self.keys

    def draw(self, rng: np.random.Generator, difficulty: int | None) -> Row:
        """One row of `difficulty` writes."""
        half = self.vocabulary // 2
        count = self.writes[rng.integers(len(self.writes))] if difficulty is None else difficulty
        # Keys by their number in the row until the end.
        written = rng.permutation([*range(self.keys), *rng.integers(self.keys, size=count - self.keys)])
        last = dict(enumerate(rng.integers(half, size=self.keys).tolist()))
        # 1 to half - 1 steps around the circle of values from what the key had: never the same; at first from anywhere.
        steps = rng.integers(1, half, size=count).tolist()
        values = np.empty(count, dtype=np.int64)
        for at, key in enumerate(written.tolist()):
            values[at] = last[key] = (last[key] + steps[at]) % half
        asked, names = rng.permutation(self.keys), different(rng, self.keys, 0, half)
        tokens = np.append(np.stack([names[written], half + values], 1), names[asked])
        return tokens, np.append(unscored(2 * count), half + np.array([last[key] for key in asked]))

    def difficulties(self, split: SuiteSplit) -> dict[str, int]:
        return {f"writes{n}": n for n in (self.writes if split == "validation" else self.test_writes)}

    def oracle(self, tokens: np.ndarray) -> np.ndarray:
        """Remember what stands behind a key, in place of what stood there before; say it at the end."""
        labels, values = unscored(len(tokens)), {}
        for at in range(len(tokens)):
            if tokens[at] < self.vocabulary // 2:
                labels[at] = values.get(tokens[at], NOT_SCORED)
                if at + 1 < len(tokens) and tokens[at + 1] >= self.vocabulary // 2:
                    values[tokens[at]] = tokens[at + 1]
        return labels
