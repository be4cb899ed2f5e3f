"""Language modelling on a text: the embedded one, local files, or a data set; the next token, or masked ones."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from experiments.corpus import sources, tokenisers
from experiments.corpus.masking import mask
from experiments.corpus.packed import pack
from experiments.tasks.base import NOT_SCORED, Item, Streams, SuiteSplit, Sums, Task, at_least, token_losses

_log = logging.getLogger(__name__)
# Where the parts of the text begin, in twentieths: 18 are for training, one each for validation and test.
_CUTS = (18, 19)
_PARTS = ("train", "validation", "test")


class Text(Task):
    r"""Read tokens and say the next one, at every position; or, with objective=mlm, say those that were masked.

    One row of length 8 out of the text "In the beginning." from offset 3, here in letters instead of 0..255:

        position  0    1    2    3    4    5    6    7
        tokens    t    h    e    _    b    e    g    i
        labels    h    e    _    b    e    g    i    n

    The text is cut in three: the first 90% of its bytes are for training, the next 5% for validation, the last 5% for
    test, whatever the tokeniser. A row lies in one of them with all its tokens and labels, so no place of the text is
    in two splits (a sentence that the text says twice may be). A training row starts at a random offset, a function of
    the seed and its index alone. The suite of a split, `text`, is made of the windows that tile its part: each token
    but the first is scored exactly once. Test has one more suite, `text_xF`, for every further factor F: the same part
    in windows of F times the length, which says what a model does past the length that it was trained at.

    Tokens are bytes as they are, whatever the encoding; or those of a tokeniser, for which the text must be UTF-8. The
    files of a folder and the rows of a data set are documents, and so is what a separator cuts: Packing keeps them
    apart, none sees another one. The separator is the end of its document and is predicted too; the first token of a
    document is not.

    Metrics: `loss` is nats a token. `bits_per_byte` is comparable across tokenisers: the nats of the scored tokens over
    ln 2 and the bytes of the text that they stand for; a tokeniser that does not give the text back has none. The test
    suites have `loss_at_C` too, the loss of the tokens that C / 2 < n <= C tokens of their document precede in the row.
    Perplexity is exp(loss).

    With objective=mlm, 15% of a row's tokens are asked for: 8 of 10 of them are replaced by the mask, which is the last
    id of the vocabulary, 1 of 10 by a random token, and 1 of 10 stays; see `experiments.corpus.masking`. The choice is
    a function of the seed and the row, and frozen in suites. Its metrics are `loss` and `accuracy`.

    Args:
        path: a local file, or a folder, with all files below it; None, without a dataset: the embedded works of
            Shakespeare, see data/README.md.
        glob: which files of a folder, such as *.txt; None: all but hidden ones.
        dataset: instead of a path, the name of a data set on the Hugging Face hub, or a local folder of parquet or
            jsonl files; its rows are streamed once into the cache.
        subset, dataset_split, column, dataset_bytes: of a data set: its configuration, its split, the column that holds
            the text, and how many bytes of text to take.
        tokenizer: bytes, bpe (byte-level, trained on the training part), or a file of the library tokenizers.
        vocabulary: tokens of a bpe, 1,024 by default; else None, or what the tokeniser has.
        length: T, tokens a row.
        factors: of the test suites: lengths of their rows, in T; the first is 1.
        separator: stands behind every document, as UTF-8, with Python's escapes such as \n, \0 and \xff; None: nothing.
        rows_per_suite: windows of every suite, evenly spread over its part; None: all of them.
        objective: next, for causal stacks, or mlm, for bidirectional ones.
        cache: a folder for tokens, trained tokenisers and data sets; None: mixerlab in $XDG_CACHE_HOME or ~/.cache.
    Raises:
        ValueError: an option out of range; a text that is missing, unreadable, empty, too short or, with a tokeniser,
            not UTF-8, or without the separator; a tokeniser that is none; a data set that cannot be had.
    """

    name = "text"
    located = (
        "path", "glob", "dataset", "subset", "dataset_split", "column", "dataset_bytes", "tokenizer", "vocabulary",
        "cache",
    )
    about = ("bytes", "context")

    def __init__(
        self,
        *,
        path: str | None = None,
        glob: str | None = None,
        dataset: str | None = None,
        subset: str | None = None,
        dataset_split: str = "train",
        column: str = "text",
        dataset_bytes: int = 100_000_000,
        tokenizer: str = "bytes",
        vocabulary: int | None = None,
        length: int = 256,
        factors: Sequence[int] = (1,),
        separator: str | None = None,
        rows_per_suite: int | None = None,
        objective: Literal["next", "mlm"] = "next",
        cache: str | None = None,
    ) -> None:
        self.length = at_least("length", length, 1)
        self.rows_per_suite = None if rows_per_suite is None else at_least("rows_per_suite", rows_per_suite, 1)
        self.factors = _factors(factors)
        if objective not in ("next", "mlm"):
            raise ValueError(f"objective={objective!r} must be next or mlm")
        self.masked = objective == "mlm"
        self.reads = "both" if self.masked else "past"
        most = at_least("dataset_bytes", dataset_bytes, 1)
        corpus = _corpus(path, glob, dataset, lambda: sources.hub(dataset, subset, dataset_split, column, most, cache))
        self.corpus = corpus if separator is None else corpus.cut(separator)
        size = len(corpus.text)
        cuts = [tokenisers.boundary(corpus.text, size * twentieths // 20) for twentieths in _CUTS]
        self.tokeniser = _tokeniser(tokenizer, vocabulary, self.corpus, cuts[0], cache)
        self.vocabulary = self.tokeniser.vocabulary + self.masked
        self.vocabulary_digest = self.tokeniser.digest
        packed = pack(self.corpus, cuts, self.tokeniser, cache)
        self.tokens, self.starts, self.sizes = packed.tokens, packed.starts, packed.sizes
        self.edges = (0, *packed.cuts, len(packed.tokens))
        self.comparable = packed.lossless and not self.masked
        if not packed.lossless:
            _log.warning("note: tokenizer=%r does not give the text back, so there is no bits_per_byte", tokenizer)
        self._check()

    def _check(self) -> None:
        # A row needs one token more than it has: the last label.
        longest = {"train": 1, "validation": 1, "test": max(self.factors)}
        fits = {split: (len(self.part(split)) - 1) // factor for split, factor in longest.items()}
        split = min(fits, key=lambda split: fits[split])
        if self.length > fits[split]:
            unit, factor = "bytes" if self.sizes is None else "tokens", longest[split]
            times = f" times factor {factor}" if factor > 1 else ""
            advice = f"; length={fits[split]} would fit" if fits[split] > 0 else ""
            raise ValueError(
                f"{self.corpus.where} has {len(self.tokens):,} {unit}, {len(self.part(split)):,} of them for {split}; "
                f"length={self.length}{times} needs {factor * self.length + 1:,} there{advice}"
            )

    @property
    def longest(self) -> int:
        return self.length * max(self.factors)

    def fingerprint(self) -> str:
        """SHA-256 of the text, and of the tokeniser where there is one."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        text, tokeniser = self.corpus.digest, self.tokeniser.digest
        return hashlib.sha256(f"{text} {tokeniser}".encode()).hexdigest() if tokeniser else text

    def keep(self, folder: Path) -> None:
        if isinstance(self.tokeniser, tokenisers.Subwords):
            (folder / "tokenizer.json").write_text(self.tokeniser.json, encoding="utf-8")

    def part(self, split: str) -> range:
        """The tokens that belong to `split`."""
        first = _PARTS.index(split)
        return range(self.edges[first], self.edges[first + 1])

    def train_dataset(self, seed: int, rows: int) -> Dataset[Item]:
        return TrainingRows(self, seed, rows)

    def suites(self, split: SuiteSplit) -> dict[str, Dataset[Item]]:
        if split not in ("validation", "test"):
            raise ValueError(f"split={split!r} has no suites; validation and test have")
        factors = self.factors if split == "test" else (1,)
        return {"text" if factor == 1 else f"text_x{factor}": Windows(self, split, factor) for factor in factors}

    def row(self, start: int, length: int | None = None, rng: np.random.Generator | None = None) -> Item:
        """tokens and labels [length] of the row at offset `start` of the text; documents [length] where it has several.

        Args:
            length: None: that of a training row.
            rng: decides what is masked, under objective=mlm.
        """
        length = length or self.length
        piece = self.tokens[start : start + length + 1].astype(np.int64)
        tokens, labels = piece[:-1], piece[1:].copy()
        ids = None
        if len(self.starts):
            # How many documents began up to each place, counted from 1 at the row's first.
            ids = np.searchsorted(self.starts, np.arange(start, start + length + 1), side="right").astype(np.int32)
            ids += 1 - ids[0]
            labels[ids[1:] != ids[:-1]] = NOT_SCORED
        if self.masked:
            right = tokens
            tokens, chosen = mask(right, self.tokeniser.vocabulary, rng)
            labels = np.where(chosen, right, NOT_SCORED)
        item = {"tokens": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}
        return item if ids is None else item | {"documents": torch.from_numpy(ids[:-1])}

    def label_bytes(self, start: int, length: int) -> Tensor:
        """[length] bytes of text that the labels of a held-out row stand for."""
        if self.sizes is None:
            return torch.ones(length, dtype=torch.int64)
        first = start + 1 - self.edges[1]
        return torch.from_numpy(self.sizes[first : first + length].astype(np.int64))

    def metrics(self, logits: Tensor, labels: Tensor, **about: Tensor) -> Sums:
        """`loss` and, of masked tokens, `accuracy`; else `bits_per_byte` and `loss_at_C`, where `about` has them."""
        if self.masked:
            return super().metrics(logits, labels)
        losses, _ = token_losses(logits, labels)
        total, scored = losses.sum().item(), labels != NOT_SCORED
        sums: Sums = {"loss": (total, len(losses))}
        if "bytes" in about:
            sums["bits_per_byte"] = (total / math.log(2), about["bytes"][scored].sum().item())
        if "context" in about:
            # 1, 2, 3 to 4, 5 to 8, ...
            places = torch.ceil(torch.log2(about["context"][scored].double())).long()
            for place in places.unique().tolist():
                here = losses[places == place]
                sums[f"loss_at_{2**place}"] = (here.sum().item(), len(here))
        return sums


class TrainingRows(Dataset[Item]):
    """Rows at random offsets of the training part, all of them equally likely."""

    def __init__(self, task: Text, seed: int, rows: int) -> None:
        self.task = task
        self.rows = at_least("rows", rows, 1)
        self.streams = Streams(task.name, "train", at_least("seed", seed, 0))
        self.offsets = len(task.part("train")) - task.length

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> Item:
        if not 0 <= row < self.rows:
            raise IndexError(f"row {row} of {self.rows}")
        rng = self.streams(row)
        return self.task.row(int(rng.integers(self.offsets)), self.task.length, rng)


class Windows(Dataset[Item]):
    """The windows that tile a part, one behind the other; the last one reaches back and scores only what is left."""

    def __init__(self, task: Text, split: SuiteSplit, factor: int) -> None:
        self.task, self.part, self.length = task, task.part(split), task.length * factor
        self.by_context = split == "test"
        self.streams = Streams(task.name, split, factor)
        # The first token is no label.
        self.scored = len(self.part) - 1
        self.all = -(-self.scored // self.length)
        # So that all suites are over about as many tokens.
        wanted = None if task.rows_per_suite is None else -(-task.rows_per_suite // factor)
        self.rows = min(wanted or self.all, self.all)

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> Item:
        if not 0 <= row < self.rows:
            raise IndexError(f"row {row} of {self.rows}")
        wanted = row * self.all // self.rows * self.length
        first = min(wanted, self.scored - self.length)
        start = self.part.start + first
        item = self.task.row(start, self.length, self.streams(row))
        item["labels"][: wanted - first] = NOT_SCORED
        if self.task.comparable:
            item["bytes"] = self.task.label_bytes(start, self.length)
        if not self.task.masked and self.by_context:
            item["context"] = _context(item.get("documents"), self.length)
        return item


def _context(documents: Tensor | None, length: int) -> Tensor:
    """[T] tokens of its own document that a row has read at each position, this one included."""
    place = torch.arange(length)
    if documents is None:
        return place + 1
    new = torch.ones_like(documents, dtype=torch.bool)
    new[1:] = documents[1:] != documents[:-1]
    return place - torch.where(new, place, 0).cummax(0).values + 1


def _corpus(path: str | None, glob: str | None, dataset: str | None, hub) -> sources.Corpus:
    """The text that the options name.

    Raises:
        ValueError: they contradict each other.
    """
    if dataset is not None and path is not None:
        raise ValueError(f"path={path!r} and dataset={dataset!r}: set one of them, the other one to null")
    if glob is not None and path is None:
        raise ValueError(f"glob={glob!r} is for a folder, and path is null")
    if dataset is not None:
        return hub()
    return sources.embedded() if path is None else sources.local(path, glob)


def _tokeniser(
    wanted: str, vocabulary: int | None, corpus: sources.Corpus, end: int, cache: str | None
) -> tokenisers.Tokeniser:
    """The tokeniser that the options name; a BPE is trained on the first `end` bytes.

    Raises:
        ValueError: it cannot be had, or has another vocabulary.
    """
    if wanted == "bpe":
        return tokenisers.trained(corpus, end, 1024 if vocabulary is None else vocabulary, cache)
    where = f"tokenizer={wanted!r}"
    found = tokenisers.Bytes() if wanted == "bytes" else tokenisers.load(Path(wanted), where)
    if vocabulary not in (None, found.vocabulary):
        raise ValueError(f"vocabulary={vocabulary} must be null with {where}, which has {found.vocabulary}")
    return found


def _factors(factors: Sequence[int]) -> tuple[int, ...]:
    """`factors` as a tuple of different integers, the first 1."""
    if isinstance(factors, str) or not isinstance(factors, Sequence) or not factors:
        raise ValueError(f"factors={factors!r} must be a list of integers such as [1, 2, 4]")
    found = tuple(at_least("factors entry", factor, 1) for factor in factors)
    if found[0] != 1 or len(set(found)) < len(found):
        raise ValueError(f"factors={list(found)} must begin with 1 and name none twice")
    return found
