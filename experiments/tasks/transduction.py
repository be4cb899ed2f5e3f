"""Transduction: read a source, say what a rule makes of it: the task of encoder-decoders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from experiments.tasks.base import NOT_SCORED, Item, Row, Scores, SuiteSplit, SyntheticTask, at_least, token_losses
from experiments.tasks.draws import unscored, whole_numbers

# Ids of the rule `digits`: the digits themselves, then these words.
_NAMES = """
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
    eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand million billion trillion
"""
WORDS = tuple(_NAMES.split())
_ZERO, _TWENTY, _HUNDRED, _THOUSAND = (10 + WORDS.index(word) for word in ("zero", "twenty", "hundred", "thousand"))
MOST_DIGITS = 15


class Transduction(SyntheticTask):
    """Read a source; then, behind a sign, say what the rule makes of it, reading what was said, and the end.

    One row of rule=sort, vocabulary 8 (letters 0..5, begin 6, end 7) and size 3, in one piece:

        position    0    1    2    3    4    5    6
                               begin
        tokens      5    0    2    6    0    2    5
        labels      .    .    .    0    2    5    7    (. is -100)

    and apart:

        source      5    0    2
        tokens      6    0    2    5
        labels      0    2    5    7

    Rules: `reverse` says the source from its end; `sort` its letters in order; `digits` reads the words of a number and
    says its digits: "two hundred four" is 2 0 4 (American, without "and"; ids 0..9 are the digits, `WORDS` follow).
    Letters are drawn evenly and with replacement, numbers evenly among those of so many digits.

    In one piece any causal stack reads a row; apart the source goes to the encoder of `model=encoder_decoder`. The
    answer of a training row has a size drawn evenly from `shortest` to `size`; shorter rows of a batch are padded.
    Suites are named size8, size16, ...: validation has that of `size`, test those of `test_size`. Tokens are counted by
    `accuracy`, whole answers, which greedy generation would say without a fault, by `sequence_accuracy`.

    Args:
        rule: reverse, sort or digits.
        apart: the source goes to an encoder.
        vocabulary: V; the last two are begin and end. None: 28, as many letters as the alphabet has, or 45 for digits,
            which has no other.
        shortest, size: least and most tokens of a training row's answer, its end aside.
        test_size: sizes to test at; they may go beyond the trained ones. digits: at most 15.
        rows_per_suite: rows of every suite.
    Raises:
        ValueError: an option out of range; when the suites are drawn, too few distinct rows to fill them.
    Source: our own, in the manner of Sutskever et al. 2014, arXiv:1409.3215 (section 3.3 reverses sources), and of the
        sorting of Vinyals et al. 2015, arXiv:1511.06391, section 4.
    """

    name = "transduction"
    # Answers stand behind the positions that ask for them.
    reads = "past"

    def __init__(
        self,
        *,
        rule: Literal["reverse", "sort", "digits"] = "reverse",
        apart: bool = False,
        vocabulary: int | None = None,
        shortest: int = 1,
        size: int = 16,
        test_size: Sequence[int] = (8, 16, 24, 32),
        rows_per_suite: int = 256,
    ) -> None:
        if rule not in ("reverse", "sort", "digits"):
            raise ValueError(f"rule={rule!r} must be reverse, sort or digits")
        fixed = 10 + len(WORDS) + 2
        if rule == "digits" and vocabulary not in (None, fixed):
            raise ValueError(f"vocabulary={vocabulary} must be null or {fixed} with rule=digits")
        natural = fixed if rule == "digits" else 28
        self.vocabulary = natural if vocabulary is None else at_least("vocabulary", vocabulary, 4)
        self.rule, self.sources = rule, apart
        self.shortest, self.size = at_least("shortest", shortest, 1), at_least("size", size, 1)
        if self.shortest > self.size:
            raise ValueError(f"shortest={shortest} must be at most size={size}")
        self.test_size = whole_numbers("test_size", test_size)
        if rule == "digits" and max(self.size, *self.test_size) > MOST_DIGITS:
            raise ValueError(f"size={size}, test_size={list(test_size)}: rule=digits has at most {MOST_DIGITS} digits")
        self.rows_per_suite = at_least("rows_per_suite", rows_per_suite, 1)
        self.begin, self.end = self.signs = self.vocabulary - 2, self.vocabulary - 1
        self.length = self._length(self.size)

    @property
    def longest(self) -> int:
        return self._length(max(self.size, *self.test_size))

    def draw(self, rng: np.random.Generator, difficulty: int | None) -> Row:
        """One row with an answer of `difficulty` tokens, in one piece."""
        size = int(rng.integers(self.shortest, self.size + 1) if difficulty is None else difficulty)
        if self.rule == "digits":
            # A number does not begin with 0, unless it is 0.
            answer = [int(rng.integers(size > 1, 10)), *rng.integers(10, size=size - 1).tolist()]
            source = words(answer)
        else:
            source = rng.integers(self.begin, size=size).tolist()
            answer = source[::-1] if self.rule == "reverse" else sorted(source)
        labels = unscored(len(source) + size + 1)
        labels[len(source) :] = [*answer, self.end]
        return np.array([*source, self.begin, *answer]), labels

    def item(self, row: Row) -> Item:
        """The source, and what is read and said behind it, where they are apart."""
        found = super().item(row)
        if not self.sources:
            return found
        cut = found["tokens"].tolist().index(self.begin)
        return {"source": found["tokens"][:cut], "tokens": found["tokens"][cut:], "labels": found["labels"][cut:]}

    def difficulties(self, split: SuiteSplit) -> dict[str, int]:
        return {f"size{n}": n for n in ((self.size,) if split == "validation" else self.test_size)}

    def oracle(self, tokens: np.ndarray) -> np.ndarray:
        """Apply the rule to what stands before the sign; of a row in one piece."""
        sign = tokens.tolist().index(self.begin)
        source, labels = tokens[:sign].tolist(), unscored(len(tokens))
        rules = {"reverse": lambda: reversed(source), "sort": lambda: sorted(source), "digits": lambda: number(source)}
        labels[sign:] = [*rules[self.rule](), self.end]
        return labels

    def scores(self) -> Scores:
        return AnswerScores(self.end)

    def _length(self, size: int) -> int:
        """Tokens of the longest row with an answer of that size."""
        source = size
        if self.rule == "digits":
            # Of a group of three digits "nine hundred ninety nine", behind all but the last a scale.
            groups, first = divmod(size - 1, 3)
            source = (1, 2, 4)[first] + 5 * groups
        return size + 1 + (0 if self.sources else source)


class AnswerScores(Scores):
    """Token metrics, and the share of answers in which every token is right.

    Scored tokens come row by row, each answer up to its end; a batch may be cut inside of one.
    """

    def __init__(self, end: int) -> None:
        super().__init__()
        self.end = end
        self.right = True  # so far, in the answer that has not ended

    def add(self, logits: Tensor, labels: Tensor, **about: Tensor) -> None:
        super().add(logits, labels, **about)
        _, hits = token_losses(logits, labels)
        ended = labels[labels != NOT_SCORED] == self.end
        # The answer that each token is of: 0 began in an earlier batch, the last one has not ended.
        place, answers = ended.cumsum(0) - ended.long(), int(ended.sum())
        right = torch.zeros(answers + 1, dtype=torch.int64, device=hits.device).index_add(0, place, (~hits).long()) == 0
        right[0] &= self.right
        self.right = bool(right[-1])
        self.count({"sequence_accuracy": (int(right[:-1].sum()), answers)})


def words(digits: Sequence[int]) -> list[int]:
    """The words of a number of at most 15 digits, as ids: [2, 0, 4] -> two hundred four."""
    if list(digits) == [0]:
        return [_ZERO]
    said: list[int] = []
    padded = [0] * (-len(digits) % 3) + list(digits)
    for place in range(0, len(padded), 3):
        hundreds, tens, ones = padded[place : place + 3]
        group = [_ZERO + hundreds, _HUNDRED] if hundreds else []
        if tens >= 2:
            group.append(_TWENTY + tens - 2)
            tens = 0
        if tens or ones:
            group.append(_ZERO + 10 * tens + ones)
        scale = (len(padded) - place) // 3 - 2
        said += group + [_THOUSAND + scale] * bool(group and scale >= 0)
    return said


def number(said: Sequence[int]) -> list[int]:
    """The digits of the number that words of `WORDS` name."""
    total = group = 0
    for word in said:
        if word >= _THOUSAND:
            total, group = total + group * 1000 ** (word - _THOUSAND + 1), 0
        elif word == _HUNDRED:
            group *= 100
        else:
            group += word - _ZERO if word < _TWENTY else 10 * (word - _TWENTY + 2)
    return [int(digit) for digit in str(total + group)]
