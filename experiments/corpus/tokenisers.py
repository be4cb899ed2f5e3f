"""Text to token ids and back: bytes, a byte-level BPE trained on the spot, or a file of the library `tokenizers`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from experiments.corpus.cache import once, place
from experiments.corpus.sources import Corpus
from mixers.options import nearest

# What one call of the library gets: its answers take some hundred bytes a token.
PIECE_BYTES = 2**16
# All bytes must have a token.
_LEAST = 256


class Bytes:
    """A byte is a token.

    Attributes:
        vocabulary: number of ids.
        digest: stands for what the ids mean; "" for bytes.
    """

    vocabulary = 256
    digest = ""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids; what is no UTF-8 becomes the replacement character."""
        return bytes(ids).decode(errors="replace")


class Subwords:
    """A tokenizers.Tokenizer, without the special tokens, the truncation and the padding that its file may ask for.

    Args:
        text: its JSON.
        where: what it is called in messages.
    Raises:
        ValueError: it is none, or has no tokens.
    """

    def __init__(self, text: str, where: str) -> None:
        try:
            self.inner: Any = library(where).Tokenizer.from_str(text)
            self.vocabulary = 1 + max(self.inner.get_vocab(with_added_tokens=True).values())
        # The library raises bare Exceptions.
        except Exception as error:
            if "pip install" in str(error):
                raise
            raise ValueError(f"{where} is no tokeniser of the library tokenizers: {error}") from None
        self.inner.no_truncation()
        self.inner.no_padding()
        self.json = text
        self.digest = hashlib.sha256(text.encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        return self.inner.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self.inner.decode(list(ids), skip_special_tokens=False)


Tokeniser = Bytes | Subwords


def library(where: str) -> Any:
    """The library `tokenizers`.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import tokenizers
    except ImportError:
        raise ValueError(f"{where} needs the library tokenizers: pip install 'mixerlab[data]'") from None
    return tokenizers


def load(path: Path, where: str) -> Subwords:
    """The tokeniser in a file.

    Raises:
        ValueError: it is not there, or is none.
    """
    try:
        text = path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        close = nearest(str(path), ("bytes", "bpe"))
        raise ValueError(f"{where} cannot be read: {reason}{close}; allowed: bytes, bpe, or a file") from None
    return Subwords(text, where)


def trained(corpus: Corpus, end: int, vocabulary: int, cache: str | None) -> Subwords:
    """A byte-level BPE of `vocabulary` tokens, trained on the first `end` bytes of a text; kept in the cache.

    Raises:
        ValueError: a vocabulary below 256; a text that is not UTF-8, or too short to give so many tokens.
    """
    if vocabulary < _LEAST:
        raise ValueError(f"vocabulary={vocabulary} must be at least {_LEAST} with tokenizer=bpe: every byte is a token")
    version = library("tokenizer=bpe").__version__
    asked = json.dumps([corpus.digest, end, vocabulary, version])
    folder = place(cache) / f"bpe-{hashlib.sha256(asked.encode()).hexdigest()[:16]}"

    def make(new: Path) -> None:
        (new / "tokenizer.json").write_text(_train(corpus, end, vocabulary), encoding="utf-8")
        (new / "asked.json").write_text(asked)

    return load(once(folder, make) / "tokenizer.json", "tokenizer=bpe")


def _train(corpus: Corpus, end: int, vocabulary: int) -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator((text for _, text in pieces(corpus, 0, end)), trainer)
    got = tokenizer.get_vocab_size()
    if got < vocabulary:
        raise ValueError(f"vocabulary={vocabulary} is too large: the training part of {corpus.where} gives {got}")
    return tokenizer.to_str()


def pieces(corpus: Corpus, begin: int, end: int) -> Iterator[tuple[int, str]]:
    """The documents in text[begin:end], each in pieces of at most PIECE_BYTES, with the byte where each begins.

    A piece is cut behind a line break where it has one, so the tokens are those of the whole text but for some at cuts.
    Raises:
        ValueError: the text is not UTF-8.
    """
    inner = corpus.starts[(corpus.starts > begin) & (corpus.starts < end)]
    edges = [begin, *inner.tolist(), end]
    for first, last in pairwise(edges):
        while first < last:
            piece = corpus.text[first : min(first + PIECE_BYTES, last)].tobytes()
            if first + len(piece) < last:
                piece = piece[: piece.rfind(b"\n") + 1] or piece[: _whole(piece)]
            try:
                yield first, piece.decode()
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{corpus.where} is not UTF-8 at byte {first + error.start:,}; tokenizer=bytes takes any bytes"
                ) from None
            first += len(piece)


def _whole(piece: bytes) -> int:
    """Bytes of `piece` that end with a whole character, for it was cut anywhere."""
    end = len(piece) - 1
    while end > len(piece) - 4 and piece[end] & 0xC0 == 0x80:
        end -= 1
    # Of ASCII, the last byte is whole; of the rest, the last character is left to the next piece.
    return len(piece) if piece[-1] < 0x80 else end


def boundary(text: np.ndarray, place: int) -> int:
    """`place`; or the end of the character of UTF-8 that lies across it. Of other bytes nothing is asked."""
    for begin in range(max(place - 3, 0), place):
        for end in range(place + 1, min(place + 4, len(text) + 1)):
            try:
                if len(text[begin:end].tobytes().decode()) == 1:
                    return end
            except UnicodeDecodeError:
                continue
    return place
