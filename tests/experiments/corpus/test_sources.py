"""Text is read whole, in one order, or the reason is said."""

from __future__ import annotations

import json
import os
import sys
import types
from itertools import pairwise

import pytest

from experiments.corpus import sources
from experiments.corpus.sources import hub, local


@pytest.fixture
def folder(tmp_path):
    files = {"b.txt": "two", "a/z.txt": "one", "a.md": "zero", "c.txt": "", ".git/x.txt": "no", "d/.x.txt": "no"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def documents(corpus):
    edges = [0, *corpus.starts, len(corpus.text)]
    return [corpus.text[first:last].tobytes().decode() for first, last in pairwise(edges)]


@pytest.mark.parametrize(
    ("glob", "expected"),
    [(None, ["zero", "one", "two"]), ("*.txt", ["one", "two"]), ("a/*", ["one"]), ("*.md", ["zero"])],
)
def test_the_files_of_a_folder_are_documents_in_the_order_of_their_names(folder, glob, expected):
    assert documents(local(str(folder), glob)) == expected


def test_the_digest_stands_for_text_and_documents(folder, tmp_path_factory):
    whole = tmp_path_factory.mktemp("other") / "all.txt"
    whole.write_text("zeroonetwo")
    one, other = local(str(folder), None), local(str(whole), None)
    assert (one.text == other.text).all() and one.digest != other.digest
    (folder / "a.md").rename(folder / "a.rst")
    assert local(str(folder), None).digest == one.digest


def test_a_separator_cuts_further(folder):
    assert documents(local(str(folder), None).cut("o")) == ["zero", "o", "ne", "two"]


def test_a_large_file_is_mapped_and_not_read(folder, monkeypatch):
    small = local(str(folder / "b.txt"), None)
    monkeypatch.setattr(sources, "IN_MEMORY", 2)
    large = local(str(folder / "b.txt"), None)
    assert type(large.text).__name__ == "memmap" and large.digest == small.digest


@pytest.mark.parametrize(
    ("glob", "message"),
    [("*.py", r"path='.*' has no file with text in it that matches glob='\*.py'"), ("/x", "glob='/x' is no pattern"),
     ("c.txt", "has no file with text")],
)
def test_a_folder_without_text_is_named(folder, glob, message):
    with pytest.raises(ValueError, match=message):
        local(str(folder), glob)


def test_an_empty_folder_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"path='.*' has no file with text in it$"):
        local(str(tmp_path), None)


def test_a_file_of_a_folder_that_cannot_be_read_is_named(folder, monkeypatch):
    def refuse(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.read_bytes", refuse)
    with pytest.raises(ValueError, match=r"path='.*': a.md cannot be read: Permission denied"):
        local(str(folder), None)


@pytest.fixture
def library(monkeypatch):
    """A stand-in for the library `datasets`; what was asked of it."""
    asked = []

    def use(rows):
        def load_dataset(name, subset, *, split, streaming):
            asked.append((name, subset, split, streaming))
            yield from rows()

        monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
        return asked

    return use


def rows(*texts):
    return lambda: ({"id": i, "text": text} for i, text in enumerate(texts))


def test_the_rows_of_a_data_set_are_documents_and_streamed_once(library, tmp_path):
    asked = library(rows("one", "", "zwei ü", "three", "four"))
    for _ in range(2):
        corpus = hub("some/name", "small", "train", "text", 10, str(tmp_path))
        # The row that reaches 10 bytes is the last one.
        assert documents(corpus) == ["one", "zwei ü"]
    assert asked == [("some/name", "small", "train", True)]


def dead():
    yield {"text": "one"}
    raise ConnectionError("Couldn't reach the Hub\nfor many reasons")


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (dead, r"dataset='some/name' cannot be read from the hub: ConnectionError: Couldn't reach the Hub$"),
        (lambda: [{"body": "x", "id": 1}], r"column='text' of dataset='some/name' holds .*; its columns are body, id$"),
        (lambda: [{"text": 3}], r"column='text' of dataset='some/name' holds no text"),
        (lambda: [], r"dataset='some/name' has no text in column='text'"),
        (rows(""), r"dataset='some/name' has no text in column='text'"),
    ],
)
def test_a_data_set_that_cannot_be_had_is_named_and_leaves_nothing(library, tmp_path, found, message):
    library(found)
    with pytest.raises(ValueError, match=message):
        hub("some/name", None, "train", "text", 10, str(tmp_path))
    assert [name for name in os.listdir(tmp_path) if not name.endswith(".lock")] == []


def test_a_missing_library_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"needs the library datasets: pip install 'mixerlab\[data\]'"):
        hub("some/name", None, "train", "text", 10, str(tmp_path))


def test_the_real_library_streams_a_local_folder(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "data").mkdir()
    lines = [json.dumps({"text": text}) for text in ("one", "two")]
    (tmp_path / "data" / "part.jsonl").write_text("\n".join(lines))
    corpus = hub(str(tmp_path / "data"), None, "train", "text", 100, str(tmp_path / "cache"))
    assert documents(corpus) == ["one", "two"]
