"""Next-byte prediction on a text: the embedded one, or any local file."""

from __future__ import annotations

import bz2
import hashlib
import math
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from experiments.tasks.base import NOT_SCORED, Item, Streams, SuiteSplit, Sums, Task, at_least

EMBEDDED = files("experiments.tasks") / "data" / "shakespeare.txt.bz2"
# Parts of the text, in twentieths: the first 18 are for training, one each for validation and test.
_PARTS = {"train": (0, 18), "validation": (18, 19), "test": (19, 20)}


class Text(Task):
    r"""Read bytes and say the next one, at every position.

    One row of length 8 out of the text "In the beginning." from offset 3, here in letters instead of 0..255:

        position  0    1    2    3    4    5    6    7
        tokens    t    h    e    _    b    e    g    i
        labels    h    e    _    b    e    g    i    n

    The text is cut in three: the first 90% are for training, the next 5% for validation, the last 5% for test. A row
    lies in one of them with all its tokens and labels, so no place of the text is in two splits (a sentence that the
    text says twice may be). A training row starts at a random offset. The one suite of a split, `text`, is made of the
    windows that tile its part: each byte but the first is scored exactly once.

    Bytes are taken as they are, whatever the encoding. With a separator the text is several documents, kept apart by
    Packing: none sees another one. The separator is the end of its document and is predicted too; the first byte of a
    document is not.

    Args:
        path: a local file; None: the embedded works of Shakespeare, see data/README.md.
        length: T, bytes a row.
        separator: stands behind every document, as UTF-8, with Python's escapes such as \n, \0 and \xff; None: the text
            is one document.
        rows_per_suite: windows of every suite, evenly spread over its part; None: all of them.
    Raises:
        ValueError: an option out of range; a file that is missing, unreadable, empty or too short, or in which the
            separator does not occur.
    """

    name = "text"
    vocabulary = 256

    def __init__(
        self,
        *,
        path: str | None = None,
        length: int = 256,
        separator: str | None = None,
        rows_per_suite: int | None = None,
    ) -> None:
        self.length = at_least("length", length, 1)
        self.rows_per_suite = None if rows_per_suite is None else at_least("rows_per_suite", rows_per_suite, 1)
        self.where = "the embedded text" if path is None else f"path={path!r}"
        self.bytes = _embedded() if path is None else _read(path)
        self._check()
        self.starts = np.zeros(0, dtype=np.int64) if separator is None else self._starts(separator)

    def _check(self) -> None:
        # A row needs one byte more than it has tokens: the last label.
        needed = 20 * (self.length + 1)
        if len(self.bytes) < needed:
            fits = len(self.bytes) // 20 - 1
            advice = f"; length={fits} would fit" if fits > 0 else ""
            raise ValueError(
                f"{self.where} has {len(self.bytes):,} bytes; length={self.length} needs at least {needed:,}: a "
                f"twentieth of the text, kept for validation, must hold one row of {self.length + 1} bytes{advice}"
            )

    def _starts(self, separator: str) -> np.ndarray:
        """[documents - 1] where the second and later documents begin, rising."""
        mark, text = _unescape(separator), self.bytes.tobytes()
        starts, found = [], text.find(mark)
        while found >= 0:
            starts.append(found + len(mark))
            found = text.find(mark, found + len(mark))
        if not starts:
            raise ValueError(f"separator={separator!r} does not occur in {self.where}; null: the text is one document")
        return np.array(starts, dtype=np.int64)

    def fingerprint(self) -> str:
        """SHA-256 of the text."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        return hashlib.sha256(self.bytes.tobytes()).hexdigest()

    def part(self, split: str) -> range:
        """The places in the text that belong to `split`."""
        first, end = (len(self.bytes) * twentieth // 20 for twentieth in _PARTS[split])
        return range(first, end)

    def train_dataset(self, seed: int, rows: int) -> Dataset[Item]:
        return TrainingRows(self, seed, rows)

    def suites(self, split: SuiteSplit) -> dict[str, Dataset[Item]]:
        if split not in ("validation", "test"):
            raise ValueError(f"split={split!r} has no suites; validation and test have")
        return {"text": Windows(self, split)}

    def row(self, start: int) -> Item:
        """tokens and labels [T] of the row at offset `start` of the text; documents [T] with a separator."""
        piece = torch.from_numpy(self.bytes[start : start + self.length + 1].astype(np.int64))
        item = {"tokens": piece[:-1], "labels": piece[1:].clone()}
        if len(self.starts):
            places = np.arange(start, start + self.length + 1)
            # How many documents began up to each place, counted from 1 at the row's first.
            documents = np.searchsorted(self.starts, places, side="right").astype(np.int32)
            ids = torch.from_numpy(documents - documents[0] + 1)
            item["documents"] = ids[:-1]
            item["labels"][ids[1:] != ids[:-1]] = NOT_SCORED
        return item

    def metrics(self, logits: Tensor, labels: Tensor) -> Sums:
        """`loss` (nats a byte) and `bits_per_byte`."""
        loss, scored = super().metrics(logits, labels)["loss"]
        return {"loss": (loss, scored), "bits_per_byte": (loss / math.log(2), scored)}


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
        return self.task.row(int(self.streams(row).integers(self.offsets)))


class Windows(Dataset[Item]):
    """The windows that tile a part, one behind the other; the last one reaches back and scores only what is left."""

    def __init__(self, task: Text, split: SuiteSplit) -> None:
        self.task, self.part = task, task.part(split)
        # The first byte is no label.
        self.scored = len(self.part) - 1
        self.all = -(-self.scored // task.length)
        self.rows = min(task.rows_per_suite or self.all, self.all)

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> Item:
        if not 0 <= row < self.rows:
            raise IndexError(f"row {row} of {self.rows}")
        wanted = row * self.all // self.rows * self.task.length
        first = min(wanted, self.scored - self.task.length)
        item = self.task.row(self.part.start + first)
        item["labels"][: wanted - first] = NOT_SCORED
        return item


@cache
def _embedded() -> np.ndarray:
    """The embedded text, [bytes] uint8."""
    return np.frombuffer(bz2.decompress(EMBEDDED.read_bytes()), dtype=np.uint8)


def _read(path: str) -> np.ndarray:
    """A file, [bytes] uint8, in memory: what is trained on is what the fingerprint stands for."""
    try:
        text = Path(path).expanduser().read_bytes()
    except FileNotFoundError:
        raise ValueError(f"path={path!r} does not exist (looked for {Path(path).expanduser().absolute()})") from None
    except OSError as error:
        raise ValueError(f"path={path!r} cannot be read: {error.strerror}") from None
    if not text:
        raise ValueError(f"path={path!r} is empty")
    return np.frombuffer(text, dtype=np.uint8)


def _unescape(separator: str) -> bytes:
    """The separator's bytes."""
    try:
        # The command line has no other way to write a line break.
        mark = separator.encode().decode("unicode_escape").encode("latin-1")
    except UnicodeError as error:
        raise ValueError(f"separator={separator!r} has an escape that stands for no byte: {error}") from None
    if not mark:
        raise ValueError("separator='' must have at least one character; null: the text is one document")
    return mark
