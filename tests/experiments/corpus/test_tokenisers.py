"""Tokenisers give text back, and texts that they cannot take are named."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import tokenizers
from tokenizers import models

from experiments.corpus import tokenisers
from experiments.corpus.sources import Corpus
from experiments.corpus.tokenisers import Bytes, Subwords, boundary, load, pieces, trained

POEM = "Über allen Gipfeln\nIst Ruh,\nIn allen Wipfeln\nSpürest du 🌲\nKaum einen Hauch;\n"


def corpus(text: str | bytes, starts=()) -> Corpus:
    data = text.encode() if isinstance(text, str) else text
    return Corpus("path='x'", np.frombuffer(data, dtype=np.uint8), np.array(starts, dtype=np.int64))


def test_bytes_are_their_own_tokens():
    assert Bytes().encode("aü") == [97, 195, 188] and Bytes().decode([97, 195, 188]) == "aü"
    assert Bytes().decode([97, 195]) == "a\ufffd"


def test_a_bpe_gives_any_text_back_and_merges_what_is_frequent(tmp_path):
    found = trained(corpus(POEM * 20), len(POEM.encode()) * 20, 300, str(tmp_path))
    assert found.vocabulary == 300
    assert len(found.encode("allen")) < 5
    for text in (POEM, " a  b\r\n\t", "日本語", "\0", "never seen"):
        assert found.decode(found.encode(text)) == text


def test_only_the_training_part_is_trained_on(tmp_path):
    found = trained(corpus("ab" * 50 + "xyz" * 400), 100, 257, str(tmp_path))
    assert len(found.encode("abab")) == 2 and len(found.encode("xyz")) == 3


def test_a_bpe_is_trained_once_for_one_text_and_vocabulary(tmp_path, monkeypatch):
    text = corpus(POEM * 20)
    first = trained(text, 1000, 280, str(tmp_path))
    monkeypatch.setattr(tokenisers, "_train", lambda *_: pytest.fail("trained again"))
    assert trained(text, 1000, 280, str(tmp_path)).digest == first.digest
    for other in ((text, 900, 280), (text, 1000, 281), (corpus(POEM * 21), 1000, 280)):
        with pytest.raises(pytest.fail.Exception):
            trained(*other, str(tmp_path))


@pytest.mark.parametrize(
    ("text", "vocabulary", "message"),
    [
        (POEM, 5000, r"vocabulary=5000 is too large: the training part of path='x' gives \d+$"),
        (POEM.encode() + b"\xff" + b"a" * 9, 300, "path='x' is not UTF-8 at byte 81; tokenizer=bytes takes any bytes"),
    ],
)
def test_a_text_that_cannot_be_trained_on_is_named_and_leaves_nothing(tmp_path, text, vocabulary, message):
    text = corpus(text)
    with pytest.raises(ValueError, match=message):
        trained(text, len(text.text), vocabulary, str(tmp_path))
    assert [path for path in tmp_path.iterdir() if path.suffix != ".lock"] == []


def test_a_file_is_what_it_is_without_its_special_tokens_truncation_and_padding(tmp_path):
    inner = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "[CLS]": 9}, unk_token="a"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    inner.post_processor = tokenizers.processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 9)])
    inner.enable_truncation(2)
    inner.enable_padding(length=5)
    inner.save(str(tmp_path / "t.json"))
    found = load(tmp_path / "t.json", "tokenizer='t.json'")
    assert found.encode("a b b b") == [0, 1, 1, 1]
    # Ids need not follow each other.
    assert found.vocabulary == 10


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "tokenizer='t.json' cannot be read: No such file or directory; allowed: bytes, bpe, or a file"),
        (b"\xff", "tokenizer='t.json' cannot be read: it is not UTF-8"),
        (b"{}", "tokenizer='t.json' is no tokeniser of the library tokenizers: "),
        (b"", "tokenizer='t.json' is no tokeniser of the library tokenizers: "),
    ],
)
def test_a_file_that_is_none_is_named(tmp_path, content, message):
    if content is not None:
        (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "t.json", "tokenizer='t.json'")


def test_a_tokeniser_without_tokens_is_named():
    with pytest.raises(ValueError, match="is no tokeniser"):
        Subwords(tokenizers.Tokenizer(models.BPE()).to_str(), "tokenizer='t.json'")


def test_a_missing_library_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"tokenizer=bpe needs the library tokenizers: pip install 'mixerlab\[data\]'"):
        trained(corpus(POEM), 50, 300, str(tmp_path))
    with pytest.raises(ValueError, match=r"tokenizer='t' needs the library tokenizers"):
        Subwords("{}", "tokenizer='t'")


@pytest.mark.parametrize("most", [5, 6, 7, 8, 16, 1000])
def test_pieces_are_the_text_and_end_at_lines_and_characters(monkeypatch, most):
    monkeypatch.setattr(tokenisers, "PIECE_BYTES", most)
    text = corpus(POEM, starts=[4, 20, 21])
    found = list(pieces(text, 0, len(text.text)))
    assert "".join(piece for _, piece in found) == POEM
    assert all(len(piece.encode()) <= most for _, piece in found)
    begins = [begin for begin, _ in found]
    # No piece reaches over the beginning of a document, and each says where it is.
    assert {0, 4, 20, 21} <= set(begins)
    assert begins == np.cumsum([0, *(len(piece.encode()) for _, piece in found)])[:-1].tolist()
    if most == 1000:
        assert len(found) == 4


def test_bytes_that_are_no_text_are_named_by_their_place(monkeypatch):
    monkeypatch.setattr(tokenisers, "PIECE_BYTES", 8)
    broken = corpus(b"good text, then " + b"\x80" * 20)
    with pytest.raises(ValueError, match="is not UTF-8 at byte 16;"):
        list(pieces(broken, 0, 36))
    # A character that the end of the text cuts off.
    with pytest.raises(ValueError, match="is not UTF-8 at byte 2;"):
        list(pieces(corpus("ab🌲".encode()[:-1]), 0, 5))


@pytest.mark.parametrize(
    ("text", "place", "expected"),
    [
        ("aüb".encode(), 1, 1), ("aüb".encode(), 2, 3), ("a🌲b".encode(), 2, 5), ("a🌲b".encode(), 4, 5),
        (b"abc", 1, 1), (b"abc", 0, 0), (b"abc", 3, 3), (b"\x80\x80\x80\x80", 2, 2), (b"a\xc3", 2, 2),
        (b"\xf0\x9f", 1, 1),
    ],
)  # fmt: skip
def test_no_cut_is_inside_of_a_character(text, place, expected):
    assert boundary(np.frombuffer(text, dtype=np.uint8), place) == expected
