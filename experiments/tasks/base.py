"""What a task is: seeded rows for training, frozen suites for evaluation, and the sums that metrics are made of.

Shapes: B rows, T positions, V vocabulary, N positions of any shape. Every batch is a dict of

    tokens     [B, T] int64   what the model reads
    labels     [B, T] int64   the target *at* this position; -100: this position is not scored
               [B, T, S]      where one position has several targets
    documents  [B, T] int32   only where rows are packed or padded: the document of each position, 0 is padding
    source     [B, S] int64   only of tasks with `sources`: what the encoder reads, with source_documents [B, S]

A synthetic task writes three methods, `draw` (one row from a random generator), `difficulties` (its suites) and
`oracle` (the exact solver of a suite's row, which proves that the row can be solved), and gets from `SyntheticTask`,
by construction:

  - Row i depends on the seed and on i alone: it has a counter-based stream of its own, whatever the batch size, the
    workers or the ranks, and any row is reached at once, so that an interrupted run goes on where it stopped.
  - No sequence is in two splits. The content of a row decides its split (`split_of`, a hash of the tokens); a row that
    falls into another split is drawn again from the same stream. 6 of 8 sequences belong to training, 1 to validation,
    1 to test. That costs a training row 1.33 draws and a suite's row 8 draws.
  - Suites are frozen: the run's seed does not enter. The suites of a split share no sequence, and none has one twice.
  - A task with too few distinct rows says so, instead of drawing for ever.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from hashlib import blake2b
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.random.bit_generator import ISeedSequence
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Sampler

if TYPE_CHECKING:
    from arch.language_model import LanguageModel

NOT_SCORED = -100
Split = Literal["train", "validation", "test"]
SuiteSplit = Literal["validation", "test"]
# tokens [T] and labels [T] or [T, S], int64
Row = tuple[np.ndarray, np.ndarray]
Item = dict[str, Tensor]
# name -> (sum, number of things summed)
Sums = dict[str, tuple[float, float]]

# At 1 accepted draw in 8, a split that has rows misses this often in a row with a probability of 1e-580.
_DRAWS_BEFORE_GIVING_UP = 10_000


def at_least(option: str, value: Any, least: int) -> int:
    """`value`, if it is an integer of at least `least`; a ValueError that names the option otherwise."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ValueError(f"{option}={value!r} must be a whole number of at least {least}")
    return int(value)


def fingerprint(tokens: np.ndarray) -> bytes:
    """16 bytes that stand for the sequence `tokens` [T], the same on every machine."""
    return blake2b(np.asarray(tokens, dtype="<i8").tobytes(), digest_size=16).digest()


def split_of(tokens: np.ndarray) -> Split:
    """The one split that the sequence `tokens` [T] may appear in, by its content."""
    eighth = fingerprint(tokens)[0] % 8
    return "validation" if eighth == 0 else "test" if eighth == 1 else "train"


class Streams(ISeedSequence):
    """The random streams of all rows of one part of a task: `Streams("mqar", "train", seed)(row)` is a generator.

    A stream is a Philox counter of its own, so any row is reached at once. The key is a hash of everything in `parts`:
    all digits of a seed count, not only its low 32 bits.
    """

    def __init__(self, *parts: str | int) -> None:
        self.key = np.frombuffer(blake2b(repr(parts).encode(), digest_size=16).digest(), dtype="<u8").astype(np.uint64)

    def __call__(self, row: int) -> np.random.Generator:
        # The row is the highest word of the counter: a stream counts up in the lowest and never reaches its neighbour.
        philox = np.random.Philox(self, counter=[0, 0, 0, row])  # type: ignore[arg-type]  # takes any ISeedSequence
        return np.random.Generator(philox)

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> np.ndarray:
        """The key, asked for by Philox. Given as `key=`, Philox would read the system's entropy too: 10 us a row."""
        return self.key


class Task(ABC):
    """Data and metrics of one problem, the same for every stack. The constructor's keyword arguments are its config.

    Attributes:
        name: the task's name in configs, params and streams.
        vocabulary: V, tokens and labels are in [0, V).
        length: T of a training row.
        reads: "past": a stack that sees later tokens would see the labels; "both": one that does not could not know
            them; "any".
        located: options that say where the data lie or come from; `fingerprint` stands for them in a run's key.
        about: further [T] fields of a suite's items; `metrics` gets them at the scored positions, by name.
        sources: rows have a source apart, which an encoder reads.
        signs: of a task with sources, the ids that an answer begins with and ends with.
        vocabulary_digest: stands for what the ids mean, where that is not fixed: a trained tokeniser's hash.
    """

    name: str
    vocabulary: int
    length: int
    reads: Literal["past", "both", "any"] = "any"
    located: tuple[str, ...] = ("path",)
    about: tuple[str, ...] = ()
    sources: bool = False
    signs: tuple[int, int] | None = None
    vocabulary_digest: str = ""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of a row at which a run's cost is counted, the training rows' first."""
        return (self.length,)

    @property
    def longest(self) -> int:
        """Tokens of the longest row, of all suites too."""
        return self.length

    @abstractmethod
    def train_dataset(self, seed: int, rows: int) -> Dataset[Item]:
        """`rows` rows of training data, map-style; row i is a function of (seed, i) alone.

        Items: {"tokens": [T] int64, "labels": [T] int64}, and {"documents": [T] int32} where rows are packed.
        Raises:
            ValueError: rows < 1, or there is no training data to draw.
        """

    @abstractmethod
    def suites(self, split: SuiteSplit) -> Mapping[str, Dataset[Item]]:
        """The named suites of a split, in order, items as in training. They are made here, so keep the result.

        Raises:
            ValueError: another split, or a suite that cannot be filled.
        """

    def loss(self, model: LanguageModel, hidden: Tensor, labels: Tensor) -> Tensor:
        """The training loss, summed over N scored labels: what the head reads [N, D], labels [N]; in nats."""
        return model.loss(hidden, labels)

    def metrics(self, logits: Tensor, labels: Tensor, **about: Tensor) -> Sums:
        """The sums that this task's metrics are made of, of one batch: `loss` (nats a token) and `accuracy`.

        A task with more to measure extends the dict: a metric is the sum of the sums over the sum of the counts.
        Args:
            logits: [N, V] or [B, T, V]; labels: [N] or [B, T], -100 where nothing is scored.
            about: the fields named by `about` that the suite has, shaped as labels.
        """
        return token_sums(logits, labels)

    def fingerprint(self) -> str:
        """What stands for the data in a run's key: a hash of a file's bytes; "" where the options say it all.

        With one, the options in `located` are left out of the key: it counts what the data is, not where it lies.
        """
        return ""

    def keep(self, folder: Path) -> None:  # noqa: B027  # most tasks have nothing to keep
        """Write what the trained model cannot be used without into its run's folder, such as a tokeniser."""

    def scores(self) -> Scores:
        """An empty accumulator of this task's metrics."""
        return Scores(self.metrics)


class SyntheticTask(Task):
    """A task that draws its rows. Subclasses set name, vocabulary, length, rows_per_suite; see the module's text."""

    rows_per_suite: int

    @abstractmethod
    def draw(self, rng: np.random.Generator, difficulty: Any) -> Row:
        """One row, all randomness from `rng`.

        Args:
            difficulty: a value of `difficulties`; None: a training row, which draws its difficulty too.
        Returns:
            tokens [T], labels [T], int64 (T may depend on the difficulty). Labels [T, S] score up to S answers at one
            position.
        """

    @abstractmethod
    def oracle(self, tokens: np.ndarray) -> np.ndarray:
        """The answers of an exact solver that is told the rules and the tokens [T] of a suite's row, no labels.

        Returns:
            Shaped as the labels, and equal to them wherever they are scored; elsewhere anything.
        """

    @abstractmethod
    def difficulties(self, split: SuiteSplit) -> Mapping[str, Any]:
        """The difficulty of each suite of a split, by the suite's name (letters, digits, `_`, `-`, `.`)."""

    def item(self, row: Row) -> Item:
        """What `draw` gave as the fields of an item."""
        return {"tokens": torch.from_numpy(row[0]), "labels": torch.from_numpy(row[1])}

    def train_dataset(self, seed: int, rows: int) -> Dataset[Item]:
        return TrainingRows(self, seed, rows)

    def suites(self, split: SuiteSplit) -> dict[str, Dataset[Item]]:
        if split not in ("validation", "test"):
            raise ValueError(f"split={split!r} has no suites; validation and test have")
        # One set for the whole split: its suites share no sequence.
        seen: set[bytes] = set()
        return {name: Suite(self, split, name, hard, seen) for name, hard in self.difficulties(split).items()}

    def draw_of_split(
        self, rng: np.random.Generator, difficulty: Any, split: Split, seen: Collection[bytes] = ()
    ) -> Row:
        """The first row drawn from `rng` that belongs to `split` and whose fingerprint is not in `seen`.

        Raises:
            ValueError: there was none among very many.
        """
        for _ in range(_DRAWS_BEFORE_GIVING_UP):
            row = self.draw(rng, difficulty)
            if split_of(row[0]) == split and (not seen or fingerprint(row[0]) not in seen):
                return row
        raise ValueError(
            f"the task {self.name} has too few distinct rows: {_DRAWS_BEFORE_GIVING_UP} draws gave no "
            f"{'new ' if seen else ''}one for {split}; a longer sequence or a larger vocabulary has more"
        )


class TrainingRows(Dataset[Item]):
    """Training rows of a synthetic task, drawn when they are asked for. Workers and processes need no seeding."""

    def __init__(self, task: SyntheticTask, seed: int, rows: int) -> None:
        self.task = task
        self.rows = at_least("rows", rows, 1)
        self.streams = Streams(task.name, "train", at_least("seed", seed, 0))

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> Item:
        if not 0 <= row < self.rows:
            raise IndexError(f"row {row} of {self.rows}")
        return self.task.item(self.task.draw_of_split(self.streams(row), None, "train"))


class Suite(Dataset[Item]):
    """A frozen evaluation suite, drawn once. `seen` holds the fingerprints that are taken, and gets this suite's."""

    def __init__(self, task: SyntheticTask, split: SuiteSplit, name: str, difficulty: Any, seen: set[bytes]) -> None:
        rows = at_least("rows_per_suite", task.rows_per_suite, 1)
        streams = Streams(task.name, split, name)
        self.items: list[Item] = []
        for i in range(rows):
            try:
                row = task.draw_of_split(streams(i), difficulty, split, seen)
            except ValueError as error:
                raise ValueError(f"rows_per_suite={rows} but {split} suite {name} has no row {i}: {error}") from None
            seen.add(fingerprint(row[0]))
            self.items.append(task.item(row))

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, row: int) -> Item:
        return self.items[row]


def loader(
    dataset: Dataset[Item], batch_size: int, start_row: int = 0, workers: int = 0, *, rank: int = 0, ranks: int = 1
) -> DataLoader[Item]:
    """Batches in the order of the rows, from `start_row` on; the last one may be smaller. len() counts them all.

    Batch k of `ranks` processes together is rows start_row + k * batch_size * ranks and following, each row once.
    Args:
        batch_size: rows a batch of one process.
        start_row: where to go on, counted in rows of all ranks.
        workers: processes that draw rows ahead; they change no row.
    Raises:
        ValueError: a count that is out of range.
    """
    at_least("batch_size", batch_size, 1)
    at_least("workers", workers, 0)
    rows = len(dataset)  # type: ignore[arg-type]
    if not 0 <= start_row <= rows:
        raise ValueError(f"start_row={start_row} must be from 0 to the number of rows, {rows}")
    if not 0 <= rank < ranks:
        raise ValueError(f"rank={rank} must be from 0 to ranks - 1 = {ranks - 1}")
    order = _Order(start_row + rank, len(range(rank, rows, ranks)), rows, ranks)
    # A generator of its own: else each pass over a loader draws from torch's global stream, and a resumed run would
    # have other dropout masks than an uninterrupted one.
    own = torch.Generator()
    return DataLoader(dataset, batch_size, sampler=order, num_workers=workers, collate_fn=collate, generator=own)


class _Order(Sampler[int]):
    """Rows from `start` on. Its length is that of all rows: a trainer that goes on counts those behind it too."""

    def __init__(self, start: int, length: int, rows: int, ranks: int) -> None:
        self.rows, self.length = range(start, rows, ranks), length

    def __iter__(self) -> Iterator[int]:
        return iter(self.rows)

    def __len__(self) -> int:
        return self.length


def collate(items: list[Item]) -> Item:
    """Rows to a batch. Shorter rows are padded at their end: token 0, label -100, document 0; sources likewise.

    Returns:
        tokens, labels [B, T] int64; documents [B, T] int32 where a row has them or was padded; other fields, 0 at pads.
    """
    batch = {
        "tokens": _stack([item["tokens"] for item in items], 0),
        "labels": _stack([item["labels"] for item in items], NOT_SCORED),
    }
    # What a task says about its tokens, see `Task.about`.
    others = items[0].keys() - batch.keys() - {"documents", "source_documents"}
    batch |= {name: _stack([item[name] for item in items], 0) for name in sorted(others)}
    batch |= _documents(items, "tokens", "documents")
    return batch | (_documents(items, "source", "source_documents") if "source" in batch else {})


def _documents(items: list[Item], field: str, name: str) -> Item:
    """The documents of a field, where a row has them or was padded."""
    lengths = [len(item[field]) for item in items]
    if len(set(lengths)) == 1 and not any(name in item for item in items):
        return {}
    one = [item.get(name, torch.ones(n, dtype=torch.int32)) for item, n in zip(items, lengths, strict=True)]
    return {name: _stack(one, 0)}


def _stack(rows: list[Tensor], fill: int) -> Tensor:
    if len({len(row) for row in rows}) == 1:
        return torch.stack(rows)
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill)


def token_sums(logits: Tensor, labels: Tensor) -> Sums:
    """Cross-entropy in nats and hits, summed in float64 over the scored tokens; see `token_losses`."""
    losses, hits = token_losses(logits, labels)
    return {"loss": (losses.sum().item(), len(hits)), "accuracy": (hits.sum().item(), len(hits))}


def token_losses(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy in nats [n] float64 and hits [n] bool of the n scored tokens, in their order.

    Args:
        logits: [..., V], any float dtype; half precision is taken to float32 first.
        labels: [...] int64, -100 where nothing is scored.
    Raises:
        ValueError: the shapes do not fit each other.
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(f"logits {tuple(logits.shape)} must be labels {tuple(labels.shape)} and one more dimension, V")
    scored = labels != NOT_SCORED
    logits, labels = logits[scored].detach(), labels[scored]
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(exact, labels, reduction="none").double(), logits.argmax(-1) == labels


class Scores:
    """Metrics over many batches: the sum over all scored tokens divided once, at the end.

    10 tokens of loss 2 and 90 of loss 1 are 1.1, however they were batched and padded. Python floats (float64).
    """

    def __init__(self, metrics: Callable[..., Sums] = token_sums) -> None:
        self.metrics = metrics
        self.sums: Sums = {}

    def add(self, logits: Tensor, labels: Tensor, **about: Tensor) -> None:
        """Count one batch: logits [..., V], labels [...], -100 where nothing is scored; `about`: see `Task.metrics`."""
        self.count(self.metrics(logits, labels, **about))

    def merge(self, other: Scores) -> None:
        """Count everything that `other` counted: suites into a whole, ranks into one."""
        self.count(other.sums)

    def result(self) -> dict[str, float]:
        """The mean of each metric over what was counted, such as {"loss": nats a token, "accuracy": 0 to 1}.

        Raises:
            ValueError: nothing was scored.
        """
        if not self.sums or any(count == 0 for _, count in self.sums.values()):
            raise ValueError("no token was scored: every label was -100, or no batch was added")
        return {name: total / count for name, (total, count) in self.sums.items()}

    def count(self, sums: Sums) -> None:
        """Count what a batch, a suite or a process has summed."""
        for name, (total, count) in sums.items():
            before, counted = self.sums.get(name, (0.0, 0))
            self.sums[name] = (before + total, counted + count)
