"""MAD's memorization: a fixed table of keys and values, learnt by heart."""

from __future__ import annotations

import numpy as np

from experiments.tasks.base import Row, Streams, SuiteSplit, SyntheticTask, at_least
from experiments.tasks.draws import unscored


class Memorization(SyntheticTask):
    """Read a key and the sign; at the sign, say the key's value, which is the same in every row and never shown.

    One row of vocabulary 8 (keys 0..2, values 3..6, sign 7), length 6, where the table says 0 -> 5, 1 -> 3, 2 -> 6:

        position    0    1    2    3    4    5
                    key  sign key  sign key  sign
        tokens      1    7    0    7    1    7
        labels      .    3    .    5    .    3    (. is -100)

    Keys are drawn evenly and with replacement. The table gives each key a value of its own; it is a function of
    `table` alone, so training and suites, and runs of all seeds, have the same. Nothing needs to be read off the row
    but the key before the sign. Training rows and suites are scored alike; the one suite is named table. What is hard
    is the size of the table, (V - 1) // 2 facts: compare runs of task.vocabulary=256,512,1024,...

    Args:
        vocabulary: V; V - 1 is the sign, of the rest the lower half are keys, the upper half values.
        length: T, tokens a row, even.
        table: the seed of the table.
        rows_per_suite: rows of every suite.
    Raises:
        ValueError: an option out of range.
    Source: Poli et al. 2024, arXiv:2403.17844, and the code published with it.
    """

    name = "mad/memorization"

    def __init__(self, *, vocabulary: int = 256, length: int = 32, table: int = 0, rows_per_suite: int = 256) -> None:
        self.vocabulary = at_least("vocabulary", vocabulary, 3)
        self.length = at_least("length", length, 2)
        if self.length % 2:
            raise ValueError(f"length={length} must be even: a row is made of keys, each with a sign")
        self.rows_per_suite = at_least("rows_per_suite", rows_per_suite, 1)
        self.sign = self.vocabulary - 1
        keys = self.sign // 2
        values = Streams(self.name, "table", at_least("table", table, 0))(0).permutation(np.arange(keys, self.sign))
        # [keys] the value of each key
        self.table = values[:keys]

    def draw(self, rng: np.random.Generator, difficulty: str | None) -> Row:
        """One row; there is one difficulty."""
        keys = rng.integers(len(self.table), size=self.length // 2)
        labels = unscored(self.length)
        labels[1::2] = self.table[keys]
        return np.stack([keys, np.full_like(keys, self.sign)], 1).reshape(-1), labels

    def difficulties(self, split: SuiteSplit) -> dict[str, str]:
        return {"table": "table"}

    def oracle(self, tokens: np.ndarray) -> np.ndarray:
        """Look the key before each sign up in the table."""
        labels = unscored(len(tokens))
        for at in np.flatnonzero(tokens == self.sign):
            labels[at] = self.table[tokens[at - 1]]
        return labels
