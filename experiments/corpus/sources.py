"""Where text comes from: the embedded works, a file, the files of a folder, a data set of the Hugging Face hub."""

from __future__ import annotations

import bz2
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path

import numpy as np

from experiments.corpus.cache import once, place

EMBEDDED = files("experiments.tasks") / "data" / "shakespeare.txt.bz2"
# A file of at most so many bytes is read, and may then change; a larger one is memory-mapped and must stay as it is.
IN_MEMORY = 2**28


@dataclass(frozen=True)
class Corpus:
    """A text in bytes.

    Attributes:
        where: what it is called in messages.
        text: [bytes] uint8.
        starts: [documents - 1] int64, where the second and later documents begin, rising.
    """

    where: str
    text: np.ndarray
    starts: np.ndarray

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the text; where there are several documents, of the places where they begin, too."""
        digest = hashlib.sha256(self.text)
        digest.update(np.ascontiguousarray(self.starts, dtype="<i8"))
        return digest.hexdigest()

    def cut(self, separator: str) -> Corpus:
        """The same text, a new document behind every separator too.

        Raises:
            ValueError: the separator stands for no bytes, or does not occur.
        """
        mark, text = _unescape(separator), self.text.tobytes()
        starts, found = [], text.find(mark)
        while found >= 0:
            starts.append(found + len(mark))
            found = text.find(mark, found + len(mark))
        if not starts:
            raise ValueError(f"separator={separator!r} does not occur in {self.where}; null: it cuts nothing")
        behind = np.array([start for start in starts if start < len(text)], dtype=np.int64)
        return Corpus(self.where, self.text, np.union1d(self.starts, behind))


def embedded() -> Corpus:
    """The works of Shakespeare, see experiments/tasks/data/README.md."""
    return Corpus("the embedded text", _embedded(), np.zeros(0, dtype=np.int64))


@cache
def _embedded() -> np.ndarray:
    return np.frombuffer(bz2.decompress(EMBEDDED.read_bytes()), dtype=np.uint8)


def local(path: str, glob: str | None) -> Corpus:
    """A file; or the files below a folder, each a document, in the order of their names with `/` between the parts.

    Hidden files and folders (`.git`) and empty files are left out.
    Args:
        glob: of a folder, only files whose name or path below it matches, such as *.txt; None: all.
    Raises:
        ValueError: there is nothing there, or it cannot be read.
    """
    where, root = f"path={path!r}", Path(path).expanduser()
    if not root.exists():
        raise ValueError(f"{where} does not exist (looked for {root.absolute()})")
    if not root.is_dir():
        if glob is not None:
            raise ValueError(f"glob={glob!r} is for a folder, and {where} is a file")
        text = _read(root, where)
        if not len(text):
            raise ValueError(f"{where} is empty")
        return Corpus(where, text, np.zeros(0, dtype=np.int64))
    found = [_read(root / name, f"{where}: {name}") for name in _names(root, glob or "*")]
    texts = [text for text in found if len(text)]
    if not texts:
        raise ValueError(f"{where} has no file with text in it" + (f" that matches glob={glob!r}" if glob else ""))
    return Corpus(where, np.concatenate(texts), np.cumsum([len(text) for text in texts[:-1]], dtype=np.int64))


def _names(root: Path, glob: str) -> list[str]:
    """The files below a folder, as paths from there, in one order on every machine."""
    try:
        found = [path.relative_to(root) for path in root.rglob(glob) if path.is_file()]
    except (ValueError, NotImplementedError) as error:
        raise ValueError(f"glob={glob!r} is no pattern of names below a folder: {error}") from None
    return sorted(path.as_posix() for path in found if not any(part.startswith(".") for part in path.parts))


def _read(path: Path, where: str) -> np.ndarray:
    """A file, [bytes] uint8."""
    try:
        if path.stat().st_size > IN_MEMORY:
            return np.memmap(path, dtype=np.uint8, mode="r")
        return np.frombuffer(path.read_bytes(), dtype=np.uint8)
    except OSError as error:
        raise ValueError(f"{where} cannot be read: {error.strerror}") from None


def hub(dataset: str, subset: str | None, split: str, column: str, most: int, cache: str | None) -> Corpus:
    """The first rows of a data set, each a document, streamed once and kept in the cache.

    Args:
        dataset: its name on the hub, or a local folder of parquet or jsonl files.
        split, column: which of its parts, and which of its columns holds the text.
        most: bytes of text to take; the last row may go beyond.
    Raises:
        ValueError: the library `datasets` is not installed, the hub does not answer, it has no such data set or column.
    """
    where = f"dataset={dataset!r}"
    asked = json.dumps([dataset, subset, split, column, most])
    folder = place(cache) / f"dataset-{hashlib.sha256(asked.encode()).hexdigest()[:16]}"

    def make(new: Path) -> None:
        lengths = []
        with (new / "text").open("wb") as file:
            for document in _stream(where, dataset, subset, split, column, most):
                lengths.append(file.write(document))
        if not lengths:
            raise ValueError(f"{where} has no text in column={column!r}")
        np.save(new / "starts.npy", np.cumsum(lengths[:-1], dtype=np.int64))
        (new / "asked.json").write_text(asked)

    once(folder, make)
    return Corpus(where, np.memmap(folder / "text", dtype=np.uint8, mode="r"), np.load(folder / "starts.npy"))


def _stream(where: str, dataset: str, subset: str | None, split: str, column: str, most: int) -> Iterator[bytes]:
    """The rows' texts, as UTF-8, until there are `most` bytes of them."""
    try:
        from datasets import load_dataset
    except ImportError:
        raise ValueError(f"{where} needs the library datasets: pip install 'mixerlab[data]'") from None
    taken = 0
    # The libraries below raise all kinds, from wrong names to dead connections.
    try:
        for row in load_dataset(dataset, subset, split=split, streaming=True):
            if not isinstance(row.get(column), str):
                break
            document = row[column].encode()
            if document:
                yield document
            taken += len(document)
            if taken >= most:
                return
        else:
            return
    except Exception as error:
        text = (str(error).splitlines() or [""])[0]
        raise ValueError(f"{where} cannot be read from the hub: {type(error).__name__}: {text}") from None
    raise ValueError(f"column={column!r} of {where} holds no text; its columns are {', '.join(row)}")


def _unescape(separator: str) -> bytes:
    """The separator's bytes."""
    try:
        # The command line has no other way to write a line break.
        mark = separator.encode().decode("unicode_escape").encode("latin-1")
    except UnicodeError as error:
        raise ValueError(f"separator={separator!r} has an escape that stands for no byte: {error}") from None
    if not mark:
        raise ValueError("separator='' must have at least one character; null: it cuts nothing")
    return mark
