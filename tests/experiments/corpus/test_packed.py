"""Packed tokens are those of the tokeniser, with the bytes that they stand for."""

from __future__ import annotations

import json
import multiprocessing

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from experiments.corpus import packed, tokenisers
from experiments.corpus.packed import dtype_of, pack
from experiments.corpus.sources import Corpus
from experiments.corpus.tokenisers import Bytes, Subwords, trained

TEXT = ("The fox, the dog; " * 5 + "süße 🌲 Bäume\n") * 9


@pytest.fixture
def corpus():
    data = np.frombuffer(TEXT.encode(), dtype=np.uint8)
    return Corpus("path='x'", data, np.array([7, 300, 800], dtype=np.int64))


@pytest.fixture
def bpe(corpus, tmp_path):
    return trained(corpus, 500, 270, str(tmp_path / "bpe"))


def words(**options):
    """A tokeniser of the words of TEXT; what it does with the rest is in the options."""
    names = ["[UNK]", "The", "fox", "the", "dog", "süße", "Bäume"]
    inner = tokenizers.Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    for name, value in options.items():
        setattr(inner, name, value)
    return Subwords(inner.to_str(), "tokenizer='words'")


def test_bytes_need_no_cache(corpus, tmp_path):
    found = pack(corpus, (500, 600), Bytes(), str(tmp_path))
    assert found.tokens is corpus.text and found.cuts == (500, 600) and found.sizes is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("batch", [1, 100, 2**21])
def test_the_tokens_give_the_text_back_part_by_part_and_document_by_document(corpus, bpe, tmp_path, monkeypatch, batch):
    monkeypatch.setattr(packed, "_BATCH_BYTES", batch)
    monkeypatch.setattr(tokenisers, "PIECE_BYTES", 64)
    found = pack(corpus, (500, 600), bpe, str(tmp_path))
    data, lossless = TEXT.encode(), found.lossless
    assert lossless and found.tokens.dtype == np.uint16 and isinstance(found.tokens, np.memmap)
    edges = sorted({0, *found.cuts, *found.starts, len(found.tokens)})
    places = sorted({0, 500, 600, 7, 300, 800, len(data)})
    for first, last, begin, end in zip(edges, edges[1:], places, places[1:], strict=False):
        assert bpe.decode(found.tokens[first:last]).encode() == data[begin:end]
    assert len(edges) == len(places)
    # Each byte that is held out belongs to one token: in a byte-level BPE, to the one whose letters stand for it.
    assert len(found.sizes) == len(found.tokens) - found.cuts[0] and found.sizes.sum() == len(data) - 500
    letters = np.array([len(bpe.inner.id_to_token(int(token))) for token in found.tokens[found.cuts[0] :]])
    ascii_only = np.array([bpe.decode([int(token)]).isascii() for token in found.tokens[found.cuts[0] :]])
    assert (found.sizes == letters)[ascii_only].all() and ascii_only.sum() > 100


def test_what_is_packed_is_packed_once(corpus, bpe, tmp_path, monkeypatch):
    first = pack(corpus, (500, 600), bpe, str(tmp_path))
    monkeypatch.setattr(packed, "_write", lambda *_: pytest.fail("packed again"))
    assert np.array_equal(pack(corpus, (500, 600), bpe, str(tmp_path)).tokens, first.tokens)
    others = (Corpus("y", corpus.text[1:], corpus.starts), (500, 600), bpe), (corpus, (500, 601), bpe)
    for other in (*others, (corpus, (500, 600), words())):
        with pytest.raises(pytest.fail.Exception):
            pack(*other, str(tmp_path))


def test_two_processes_at_once_have_the_same_tokens(corpus, bpe, tmp_path):
    context = multiprocessing.get_context("fork")
    arguments = (corpus, (500, 600), words(), str(tmp_path))
    processes = [context.Process(target=pack, args=arguments) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert len([path for path in tmp_path.glob("tokens-*") if path.is_dir()]) == 1


@pytest.mark.parametrize(
    ("options", "lossless"),
    [
        ({}, False),
        ({"normalizer": normalizers.Lowercase()}, False),
        ({"pre_tokenizer": pre_tokenizers.Metaspace(), "decoder": decoders.Metaspace()}, False),
    ],
)
def test_a_tokeniser_that_loses_something_is_found_out_and_its_tokens_still_cover_the_text(
    corpus, tmp_path, options, lossless
):
    found = pack(corpus, (500, 600), words(**options), str(tmp_path))
    assert found.lossless is lossless and found.sizes.sum() == len(TEXT.encode()) - 500


def test_a_tokeniser_that_puts_a_space_in_front_and_takes_it_away_loses_nothing(tmp_path):
    text = Corpus("x", np.frombuffer(b"the fox\nthe dog\n" * 20, dtype=np.uint8), np.zeros(0, dtype=np.int64))
    names = ["▁", *"thefoxdg\n"]
    inner = tokenizers.Tokenizer(models.BPE({name: i for i, name in enumerate(dict.fromkeys(names))}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    found = pack(text, (160, 240), Subwords(inner.to_str(), "x"), str(tmp_path))
    assert found.lossless and found.sizes.sum() == 160


@pytest.mark.parametrize(
    ("vocabulary", "dtype"), [(2, "uint16"), (2**16, "uint16"), (2**16 + 1, "uint32"), (2**32, "uint32")]
)
def test_the_type_is_the_smallest_that_holds_all_ids(vocabulary, dtype):
    assert dtype_of(vocabulary) == np.dtype(dtype)


def test_a_vocabulary_that_fits_no_type_is_refused():
    with pytest.raises(ValueError, match="a vocabulary of 4,294,967,297 does not fit in uint32"):
        dtype_of(2**32 + 1)


def test_ids_beyond_16_bits_are_kept(tmp_path):
    inner = tokenizers.Tokenizer(models.WordLevel({"a": 70_000, "b": 3}, unk_token="b"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    text = Corpus("x", np.frombuffer(b"a b a b", dtype=np.uint8), np.zeros(0, dtype=np.int64))
    found = pack(text, (2, 4), Subwords(inner.to_str(), "x"), str(tmp_path))
    assert found.tokens.tolist() == [70_000, 3, 70_000, 3] and found.tokens.dtype == np.uint32


@pytest.mark.parametrize("damage", ["tokens", "about.json", "sizes.npy"])
def test_a_damaged_cache_is_named_with_the_cure(corpus, tmp_path, damage):
    pack(corpus, (500, 600), words(), str(tmp_path))
    file = next(tmp_path.glob("tokens-*/tokens")).parent / damage
    file.write_bytes(file.read_bytes()[:8])
    with pytest.raises(ValueError, match=r"tokens-\w+ is damaged: .*; remove it, and it is made again"):
        pack(corpus, (500, 600), words(), str(tmp_path))


def test_a_text_that_is_not_utf_8_leaves_nothing_in_the_cache(tmp_path):
    text = Corpus("path='x'", np.frombuffer(b"a" * 99 + b"\xff", dtype=np.uint8), np.zeros(0, dtype=np.int64))
    with pytest.raises(ValueError, match="path='x' is not UTF-8 at byte 99"):
        pack(text, (50, 60), words(), str(tmp_path))
    assert [path for path in tmp_path.iterdir() if path.suffix != ".lock"] == []


def test_about_says_what_the_files_hold(corpus, bpe, tmp_path):
    found = pack(corpus, (500, 600), bpe, str(tmp_path))
    about = json.loads(next(tmp_path.glob("tokens-*/about.json")).read_text())
    assert about == {"tokens": len(found.tokens), "cuts": list(found.cuts), "lossless": True}
