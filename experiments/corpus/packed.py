"""A text as token ids in a memory map: no process holds it, all that read it share its pages."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from experiments.corpus.cache import once, place
from experiments.corpus.sources import Corpus
from experiments.corpus.tokenisers import Bytes, Subwords, Tokeniser, pieces

# Of text, that is tokenised at once.
_BATCH_BYTES = 2**21
_FORMAT = 1


@dataclass(frozen=True)
class Packed:
    """Tokens of one text.

    Attributes:
        tokens: [tokens] uint8, uint16 or uint32.
        starts: [documents - 1] int64, the tokens that begin the second and later documents.
        cuts: the tokens that begin the second and later parts.
        sizes: [tokens from cuts[0] on] bytes of text that each token stands for; None: one each.
        lossless: the tokens give the text back.
    """

    tokens: np.ndarray
    starts: np.ndarray
    cuts: tuple[int, ...]
    sizes: np.ndarray | None = None
    lossless: bool = True


def dtype_of(vocabulary: int) -> np.dtype:
    """The smaller of uint16 and uint32 that holds all ids.

    Raises:
        ValueError: neither does.
    """
    for dtype in (np.uint16, np.uint32):
        if vocabulary - 1 <= np.iinfo(dtype).max:
            return np.dtype(dtype)
    raise ValueError(f"a vocabulary of {vocabulary:,} does not fit in uint32, the largest type of packed tokens")


def pack(corpus: Corpus, cuts: Sequence[int], tokeniser: Tokeniser, cache: str | None) -> Packed:
    """The tokens of a text, from the cache where it has them; bytes are their own tokens and need none.

    Args:
        cuts: the bytes that begin the second and later parts; no token crosses one, nor a document's beginning.
    Raises:
        ValueError: a text that is not UTF-8, a vocabulary that is too large, a cache that is damaged or read-only.
    """
    if isinstance(tokeniser, Bytes):
        return Packed(corpus.text, corpus.starts, tuple(cuts))
    dtype = dtype_of(tokeniser.vocabulary)
    asked = json.dumps([_FORMAT, corpus.digest, list(cuts), tokeniser.digest])
    folder = place(cache) / f"tokens-{hashlib.sha256(asked.encode()).hexdigest()[:16]}"
    once(folder, lambda new: _write(new, corpus, cuts, tokeniser, dtype))
    try:
        about = json.loads((folder / "about.json").read_text())
        tokens = np.memmap(folder / "tokens", dtype=dtype, mode="r", shape=about["tokens"])
        starts, sizes = np.load(folder / "starts.npy"), np.load(folder / "sizes.npy", mmap_mode="r")
        return Packed(tokens, starts, tuple(about["cuts"]), sizes, about["lossless"])
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{folder} is damaged: {error}; remove it, and it is made again") from None


def _write(folder: Path, corpus: Corpus, cuts: Sequence[int], tokeniser: Subwords, dtype: np.dtype) -> None:
    """All that `Packed` has, in files."""
    edges, counts = [0, *cuts, len(corpus.text)], []
    starts: list[int] = []
    held_out: list[tuple[np.ndarray, bool]] = []
    with (folder / "tokens").open("wb") as file:
        for part, (begin, end) in enumerate(pairwise(edges)):
            counts.append(file.tell() // dtype.itemsize)
            for batch in _batches(pieces(corpus, begin, end)):
                found = _encode(file, corpus, batch, tokeniser, dtype, starts)
                # Training has no use for the sizes.
                held_out += [_sizes(text, one, tokeniser) for (_, text), one in zip(batch, found, strict=True) if part]
        total = file.tell() // dtype.itemsize
    sizes = [size for size, _ in held_out]
    np.save(folder / "starts.npy", np.array(starts, dtype=np.int64))
    np.save(folder / "sizes.npy", np.concatenate([np.zeros(0, dtype=np.uint32), *sizes]))
    about = {"tokens": total, "cuts": counts[1:], "lossless": all(same for _, same in held_out)}
    (folder / "about.json").write_text(json.dumps(about))


def _encode(
    file: BinaryIO, corpus: Corpus, batch: list[tuple[int, str]], tokeniser: Subwords, dtype: np.dtype,
    starts: list[int],
) -> list[Any]:
    """Write the tokens of some pieces; note in `starts` where documents begin. The library's answers."""
    found = tokeniser.inner.encode_batch([text for _, text in batch], add_special_tokens=False)
    for (begin, _), one in zip(batch, found, strict=True):
        if begin in corpus.starts[np.searchsorted(corpus.starts, begin) :][:1]:
            starts.append(file.tell() // dtype.itemsize)
        file.write(np.array(one.ids, dtype=dtype).tobytes())
    return found


def _sizes(text: str, one: Any, tokeniser: Subwords) -> tuple[np.ndarray, bool]:
    """[tokens] uint32, the bytes from where a token begins to where the next one does; do they give the text back?"""
    characters = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    lengths = 1 + (characters > 0x7F) + (characters > 0x7FF) + (characters > 0xFFFF)
    at = np.concatenate([[0], np.cumsum(lengths)])
    begins = np.array([begin for begin, _ in one.offsets], dtype=np.int64)
    # What stands in front of the first token, such as a space that the tokeniser drops, is the first one's.
    begins[:1] = 0
    places = np.maximum.accumulate(at[begins])
    sizes = np.diff(np.append(places, at[-1])).astype(np.uint32) if len(places) else np.zeros(0, dtype=np.uint32)
    return sizes, tokeniser.decode(one.ids) == text


def _batches(parts: Iterator[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    """Lists of pieces of about _BATCH_BYTES in all."""
    batch: list[tuple[int, str]] = []
    size = 0
    for begin, text in parts:
        batch.append((begin, text))
        size += len(text)
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
