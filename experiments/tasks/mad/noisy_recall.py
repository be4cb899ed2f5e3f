"""MAD's noisy in-context recall: recall with noise between the pairs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from experiments.tasks.base import Row, SuiteSplit, SyntheticTask, at_least
from experiments.tasks.draws import next_tokens
from experiments.tasks.mad.in_context_recall import even, pairs, recalled


class NoisyRecall(SyntheticTask):
    """Read pairs of a key and a value, some of them noise; at each key that was shown before, say its value.

    One row of vocabulary 12, noise_vocabulary 4 (keys 0..3, values 4..7, noise 8..11), length 12:

        position    0    1    2    3    4    5    6    7    8    9   10   11
                    key  val  noise     key  val  key  val  noise     key  val
        tokens      2    5    9    9    2    5    3    5    8   11    3    5
        labels      .    .    .    .    5    .    .    .    .    .    5    .    (. is -100)
        training    5    9    9    2    5    3    5    8   11    3    5    .

    As `mad/in_context_recall`, but each pair is with probability `noise` two tokens of noise instead. The last pair is
    none, nor is one of the others, drawn evenly: there is always something to ask for.

    Suites are named noise0, noise20, ... in percent: validation has that of `noise`, test those of `test_noise`.

    Args:
        vocabulary: V, noise included; of the rest, the lower half are keys, the upper half values.
        noise_vocabulary: number of tokens that are noise.
        length: T, tokens a row, even.
        noise: share of noise in training, at least 0 and below 1.
        test_noise: shares to test at.
        rows_per_suite: rows of every suite.
    Raises:
        ValueError: an option out of range.
    Source: Poli et al. 2024, arXiv:2403.17844, and the code published with it (multi-query, as in its configs).
    """

    name = "mad/noisy_recall"
    # Answers stand behind the positions that ask for them.
    reads = "past"

    def __init__(
        self,
        *,
        vocabulary: int = 32,
        noise_vocabulary: int = 16,
        length: int = 128,
        noise: float = 0.2,
        test_noise: Sequence[float] = (0.0, 0.2, 0.4, 0.6, 0.8),
        rows_per_suite: int = 256,
    ) -> None:
        self.vocabulary = at_least("vocabulary", vocabulary, 3)
        self.clean = self.vocabulary - at_least("noise_vocabulary", noise_vocabulary, 1)
        if self.clean < 2:
            raise ValueError(
                f"noise_vocabulary={noise_vocabulary} must leave at least 2 of vocabulary={vocabulary}: a key, a value"
            )
        self.length = even("length", length)
        self.noise = _share("noise", noise)
        self.test_noise = _shares(test_noise)
        self.rows_per_suite = at_least("rows_per_suite", rows_per_suite, 1)

    def draw(self, rng: np.random.Generator, difficulty: float | None) -> Row:
        """One row with a share of `difficulty` noise."""
        noise = self.noise if difficulty is None else difficulty
        tokens, labels = pairs(rng, self.length, self.clean, self.vocabulary, noise)
        return tokens, next_tokens(tokens) if difficulty is None else labels

    def difficulties(self, split: SuiteSplit) -> dict[str, float]:
        return {f"noise{100 * n:.6g}": n for n in ((self.noise,) if split == "validation" else self.test_noise)}

    def oracle(self, tokens: np.ndarray) -> np.ndarray:
        """Remember every pair that is no noise; at a key, say what stood behind it the last time."""
        return recalled(tokens, self.clean)


def _share(option: str, value: float) -> float:
    if not 0 <= value < 1:
        raise ValueError(f"{option}={value!r} must be at least 0 and below 1")
    return value


def _shares(values: Sequence[float]) -> tuple[float, ...]:
    if isinstance(values, str) or not isinstance(values, Sequence) or not values or len(set(values)) < len(values):
        raise ValueError(f"test_noise={values!r} must be a list of different shares such as [0.2, 0.4]")
    return tuple(_share("test_noise entry", value) for value in values)
