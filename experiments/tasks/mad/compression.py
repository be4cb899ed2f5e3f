"""MAD's compression: a whole row, decoded from the hidden state of its last token."""

from __future__ import annotations

import numpy as np
from torch import Tensor
from torch.nn import functional as F

from arch.language_model import LanguageModel
from experiments.tasks.base import NOT_SCORED, Row, SuiteSplit, Sums, SyntheticTask, at_least
from experiments.tasks.draws import unscored

_PARTS = 4


class Compression(SyntheticTask):
    """Read random symbols and then the sign; at the sign alone, say all of them at once.

    One row of symbols 4 (0..2, sign 3), length 5; the answer for the symbol at position i is i * symbols + symbol:

        position    0    1    2    3    4
                                       sign
        tokens      2    0    2    1    3
        labels      .    .    .    .    2, 4 + 0, 8 + 2, 12 + 1    (. is -100)

    All labels stand at the last position, so all that the model knows of the row must be in one vector of its width:
    attention cannot look back for each answer, as it can in copying. The head has `symbols` outputs for each position,
    length - 1 times as many as there are symbols, and the softmax is taken over the symbols of one position.

    Suites: `all`, for validation and test; test has the accuracy by age too, on the quarters of the row: oldest, older,
    newer, newest.

    Args:
        symbols: number of different tokens, one of them the sign.
        length: T, tokens a row, at least 5.
        rows_per_suite: rows of every suite.
    Raises:
        ValueError: an option out of range.
    Source: Poli et al. 2024, arXiv:2403.17844, and the code published with it. There, the last hidden state plus a
        sinusoidal embedding of each position goes through an MLP of two layers, which a language model does not have;
        here, through the head, linear and of its own for each position. There, the sign itself is scored too.
    """

    name = "mad/compression"

    def __init__(self, *, symbols: int = 16, length: int = 32, rows_per_suite: int = 256) -> None:
        self.symbols = at_least("symbols", symbols, 2)
        self.length = at_least("length", length, _PARTS + 1)
        self.rows_per_suite = at_least("rows_per_suite", rows_per_suite, 1)
        self.vocabulary = (self.length - 1) * self.symbols

    def draw(self, rng: np.random.Generator, difficulty: slice | None) -> Row:
        """One row, of whose symbols those of `difficulty` are scored: tokens [T], labels [T, T - 1]."""
        read = rng.integers(self.symbols - 1, size=self.length - 1)
        tokens = np.append(read, self.symbols - 1)
        labels, scored = self._blank(), difficulty or slice(None)
        labels[-1, scored] = self._answers(read)[scored]
        return tokens, labels

    def difficulties(self, split: SuiteSplit) -> dict[str, slice]:
        every = {"all": slice(None)}
        if split == "validation":
            return every
        edges = [(self.length - 1) * part // _PARTS for part in range(_PARTS + 1)]
        return every | {
            name: slice(*edges[part : part + 2]) for part, name in enumerate(("oldest", "older", "newer", "newest"))
        }

    def oracle(self, tokens: np.ndarray) -> np.ndarray:
        """Say every symbol before the sign."""
        labels = self._blank()
        labels[-1] = [place * self.symbols + symbol for place, symbol in enumerate(tokens[:-1])]
        return labels

    def loss(self, model: LanguageModel, hidden: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy over the symbols of each label's position."""
        return F.cross_entropy(*self._within(model.logits(hidden), labels), reduction="sum")

    def metrics(self, logits: Tensor, labels: Tensor, **about: Tensor) -> Sums:
        """`loss` and `accuracy` over the symbols of each label's position."""
        scored = labels != NOT_SCORED
        return super().metrics(*self._within(logits[scored], labels[scored]))

    def _within(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """logits [N, V], labels [N] -> logits [N, symbols] of the position that is asked for, and the symbols [N]."""
        places, symbols = labels.div(self.symbols, rounding_mode="floor"), labels % self.symbols
        grouped = logits.unflatten(-1, (self.length - 1, self.symbols))
        index = places[:, None, None].expand(-1, 1, self.symbols)
        return grouped.gather(1, index)[:, 0], symbols

    def _answers(self, read: np.ndarray) -> np.ndarray:
        return np.arange(len(read)) * self.symbols + read

    def _blank(self) -> np.ndarray:
        return np.tile(unscored(self.length)[:, None], self.length - 1)
