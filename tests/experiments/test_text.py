from __future__ import annotations

import bz2
import hashlib
import math
import os
import re

import numpy as np
import pytest
import torch

from experiments import cli, config
from experiments.corpus.sources import EMBEDDED
from experiments.tasks.base import NOT_SCORED, loader
from experiments.tasks.text import Text
from mixers.base import Packing


def alphabet(size: int) -> bytes:
    """Bytes whose neighbours tell the place: every pair differs from its surroundings."""
    return bytes(i % 251 for i in range(size))


@pytest.fixture
def write(tmp_path):
    def write(content: bytes, name: str = "text.txt") -> str:
        (tmp_path / name).write_bytes(content)
        return str(tmp_path / name)

    return write


def by_place(size: int, path: str, **options) -> Text:
    """A task whose bytes are replaced by their own places in the text: items tell where they were read."""
    task = Text(path=path, **options)
    task.tokens = np.arange(size)
    return task


def letters(row: torch.Tensor) -> str:
    return bytes(row.tolist()).decode().replace(" ", "_")


def test_the_row_in_the_docstring_is_that_row(write):
    text = b"In the beginning.".ljust(180)
    row = Text(path=write(text), length=8).row(3)
    for name in ("tokens", "labels"):
        drawn = re.search(rf"^ +{name}( +\S){{8}}$", Text.__doc__, re.MULTILINE)[0].split()[1:]
        assert letters(row[name]) == "".join(drawn)


def test_labels_are_the_next_bytes_and_shapes_those_of_the_contract(write):
    task = Text(path=write(alphabet(2000)), length=9)
    suites = {split: task.suites(split)["text"] for split in ("validation", "test")}
    about = {"train": set(), "validation": {"bytes"}, "test": {"bytes", "context"}}
    for split, dataset in ({"train": task.train_dataset(0, 5)} | suites).items():
        for item in dataset:
            assert set(item) == {"tokens", "labels"} | about[split]
            assert {(value.dtype, tuple(value.shape)) for value in item.values()} == {(torch.int64, (9,))}
            assert torch.equal(item["tokens"][1:], item["labels"][:-1]) or NOT_SCORED in item["labels"]


@pytest.mark.parametrize("size", [200, 201, 1000, 1019])
def test_no_place_of_the_text_is_in_two_splits(write, size):
    task = by_place(size, write(alphabet(size)), length=9)
    seen = {"train": set(), "validation": set(), "test": set()}
    for split in ("validation", "test"):
        for item in task.suites(split)["text"]:
            seen[split] |= {*item["tokens"].tolist(), *item["labels"].tolist()} - {NOT_SCORED}
    for item in task.train_dataset(0, 3000):
        seen["train"] |= {*item["tokens"].tolist(), *item["labels"].tolist()}
    # Every place is in one split, and the training rows reach all of theirs, to the last byte.
    assert sorted(place for part in seen.values() for place in part) == list(range(size))
    assert min(seen["validation"]) == size * 18 // 20 and min(seen["test"]) == size * 19 // 20


@pytest.mark.parametrize("size", [200, 219, 220, 300, 399, 400, 2000])
def test_suites_score_every_byte_of_their_part_but_the_first_exactly_once(write, size):
    task = by_place(size, write(alphabet(size)), length=9)
    for split in ("validation", "test"):
        labels = torch.cat([item["labels"] for item in task.suites(split)["text"]])
        assert labels[labels != NOT_SCORED].tolist() == list(task.part(split))[1:]


def test_fewer_windows_are_spread_over_the_part(write):
    task = by_place(4000, write(alphabet(4000)), length=9, rows_per_suite=4)
    suite = task.suites("test")["text"]
    assert len(suite) == 4 and len(Text(path=write(alphabet(4000)), length=9).suites("test")["text"]) == 23
    assert [int(item["tokens"][0]) - 3800 for item in suite] == [0, 5 * 9, 11 * 9, 17 * 9]
    assert len(Text(path=write(alphabet(200)), length=9, rows_per_suite=50).suites("test")["text"]) == 1


def test_a_training_row_depends_on_seed_and_index_alone(write):
    task = Text(path=write(os.urandom(3000)), length=30)
    few, many = task.train_dataset(3, 8), task.train_dataset(3, 500)
    backwards = [few[i]["tokens"] for i in reversed(range(8))][::-1]
    assert all(torch.equal(many[i]["tokens"], backwards[i]) for i in range(8))
    loaded = torch.cat([batch["tokens"] for batch in loader(few, 3, workers=2)])
    assert torch.equal(loaded, torch.stack(backwards))
    other = task.train_dataset(3 + 2**32, 8)
    assert not torch.equal(torch.stack([item["tokens"] for item in other]), loaded)


def test_offsets_are_even(write):
    task = by_place(1000, write(alphabet(1000)), length=9)
    offsets = [int(item["tokens"][0]) for item in task.train_dataset(0, 4000)]
    assert min(offsets) == 0 and max(offsets) == 900 - 10
    # Five standard deviations of the mean of 4000 even draws.
    assert abs(np.mean(offsets) - 445) < 5 * 891 / math.sqrt(12 * 4000)


@pytest.mark.parametrize("row", [-1, 1])
def test_rows_outside_a_dataset_do_not_exist(write, row):
    task = Text(path=write(alphabet(200)), length=9)
    for dataset in (task.train_dataset(0, 1), task.suites("test")["text"]):
        with pytest.raises(IndexError):
            dataset[row]


def test_any_bytes_are_a_text(write):
    task = Text(path=write(b"\xff\x00\xfe" * 100), length=9)
    assert set(torch.stack([item["tokens"] for item in task.train_dataset(0, 50)]).unique().tolist()) == {0, 254, 255}


def test_documents_are_kept_apart_and_the_first_byte_of_one_is_not_scored(write):
    task = Text(path=write(b"one;two;;three" + b"." * 400), length=14, separator=";", rows_per_suite=1)
    row = task.row(0)
    assert letters(row["tokens"]) == "one;two;;three"
    assert row["documents"].tolist() == [1, 1, 1, 1, 2, 2, 2, 2, 3, 4, 4, 4, 4, 4]
    assert row["documents"].dtype == torch.int32
    scored = row["labels"] != NOT_SCORED
    assert scored.tolist() == [True] * 3 + [False] + [True] * 3 + [False] * 2 + [True] * 5
    assert letters(row["labels"][scored]) == "ne;wo;hree."
    # Ids count from the first document of the row.
    assert task.row(6)["documents"].tolist() == [1, 1, 2] + [3] * 11
    assert task.row(10)["documents"].tolist() == [1] * 14
    assert int(task.row(3)["labels"][0]) == NOT_SCORED


@pytest.mark.parametrize(
    ("separator", "mark"),
    [(r"\n\n", b"\n\n"), (r"\0", b"\0"), (r"\xff", b"\xff"), ("<|end|>", b"<|end|>"), ("é", "é".encode())],
)
def test_separators_may_be_any_bytes(write, separator, mark):
    task = Text(path=write(b"ab" + mark + b"c" * 200), length=9, separator=separator)
    assert task.row(0)["documents"].tolist() == [1] * (2 + len(mark)) + [2] * (7 - len(mark))


@pytest.mark.parametrize("spelled", [r"task.separator=\n\n", r"task.separator='\n\n'"])
def test_a_separator_with_a_line_break_can_be_written_on_the_command_line(write, spelled):
    path = write(b"one\n\ntwo" + b"." * 200)
    plan = config.plan(cli.composed("train", ["task=text", f"task.path={path}", "task.length=9", spelled]))
    assert plan.task.row(0)["documents"].tolist() == [1] * 5 + [2] * 4


def test_documents_of_a_row_do_not_see_each_other(write, plan_of):
    model = plan_of("stack=gqa").model()
    one, other = (
        Text(path=write(first + b";" + alphabet(31)[1:] * 20), length=20, separator=";").row(0)
        for first in (b"abcd", b"wxyz")
    )
    hidden = [model.hidden(row["tokens"][None] % 32, Packing(row["documents"][None])) for row in (one, other)]
    assert torch.equal(hidden[0][:, 5:], hidden[1][:, 5:]) and not torch.equal(hidden[0][:, :4], hidden[1][:, :4])


def test_metrics_are_the_loss_and_its_bits_per_byte(write):
    task = Text(path=write(alphabet(200)), length=9)
    scores = task.scores()
    labels = torch.tensor([[1, 2, 3, 4, NOT_SCORED], [5, 6, NOT_SCORED, 7, 8]])
    scores.add(torch.zeros(2, 5, 256), labels, bytes=torch.full((2, 5), 4))
    assert scores.result() == {"loss": pytest.approx(math.log(256)), "bits_per_byte": pytest.approx(2.0)}


def test_the_embedded_text_is_the_one_of_its_readme():
    readme = (EMBEDDED.parent / "README.md").read_text()
    text = bz2.decompress(EMBEDDED.read_bytes())
    digest = hashlib.sha256(text).hexdigest()
    assert digest in readme and f"{len(text):,} bytes" in readme and f"{len(set(text))} distinct" in readme
    assert text.count(b"\nby William Shakespeare\n") == 42 and "42 works" in readme
    assert Text().fingerprint() == digest and bytes(Text().tokens) == text
    # The works that the README names: three begin in the held-out part, and the end of another one opens it.
    held_out = text[Text().part("validation").start :]
    assert held_out.count(b"\nby William Shakespeare\n") == 3 and b"CRESSIDA." in held_out[:500]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 0}, "length=0 must be a whole number of at least 1"),
        ({"rows_per_suite": 0}, "rows_per_suite=0 must be"),
        ({"separator": ""}, "separator='' must have at least one character"),
        ({"separator": "\\x"}, r"separator='.*' has an escape that stands for no byte"),
        ({"separator": "\\u20ac"}, r"separator='.*' has an escape that stands for no byte"),
        ({"separator": "~"}, "separator='~' does not occur in path='.*text.txt'"),
        ({"length": 10}, r"has 200 bytes, 10 of them for validation; length=10 needs 11 there; length=9 would fit"),
        ({"length": 10_000}, "length=10000 needs 10,001 there; length=9 would fit"),
        ({"length": 5, "factors": [1, 2]}, "10 of them for test; length=5 times factor 2 needs 11 there; length=4"),
        ({"factors": []}, r"factors=\[\] must be a list of integers"),
        ({"factors": [2, 4]}, r"factors=\[2, 4\] must begin with 1"),
        ({"factors": [1, 2, 2]}, r"factors=\[1, 2, 2\] must .* name none twice"),
        ({"factors": [1, 0]}, "factors entry=0 must be"),
        ({"objective": "nxt"}, "objective='nxt' must be next or mlm"),
        ({"dataset": "some/name"}, "path='.*' and dataset='some/name': set one of them"),
        ({"path": None, "glob": "*.txt"}, r"glob='\*.txt' is for a folder, and path is null"),
        ({"glob": "*.txt"}, r"glob='\*.txt' is for a folder, and path='.*text.txt' is a file"),
        ({"dataset_bytes": 0}, "dataset_bytes=0 must be"),
        ({"vocabulary": 1000}, "vocabulary=1000 must be null with tokenizer='bytes', which has 256"),
        ({"tokenizer": "bpe", "vocabulary": 255}, "vocabulary=255 must be at least 256 with tokenizer=bpe"),
        ({"tokenizer": "byte"}, r"tokenizer='byte' cannot be read: No such file or directory \(did you mean 'bytes'"),
    ],
)
def test_options_that_cannot_be_are_named(write, options, message):
    path = write(bytes(range(65, 75)) * 20)
    with pytest.raises(ValueError, match=message):
        Text(**({"path": path, "length": 9} | options))


def test_files_that_cannot_be_are_named(write, tmp_path):
    with pytest.raises(ValueError, match=r"path='nowhere.txt' does not exist \(looked for /.*nowhere.txt\)"):
        Text(path="nowhere.txt")
    with pytest.raises(ValueError, match=r"path='.*empty.txt' is empty"):
        Text(path=write(b"", "empty.txt"))
    with pytest.raises(ValueError, match=r"has 5 bytes, 0 of them for validation; length=256 needs 257 there$"):
        Text(path=write(b"short"))


def test_a_file_without_permission_is_named(write, monkeypatch):
    def refuse(self):
        raise PermissionError(13, "Permission denied", str(self))

    path = write(alphabet(200))
    monkeypatch.setattr("pathlib.Path.read_bytes", refuse)
    with pytest.raises(ValueError, match="cannot be read: Permission denied"):
        Text(path=path)


def test_the_key_stands_for_the_data_and_not_for_its_place(write, plan_of):
    """The path is left out of the key, what the file holds is in it; other options stay in."""
    tree = {"task": {"name": "text", "length": 9}}

    def key(path, **options):
        task = tree["task"] | {"path": path} | options
        return config.plan(base | {"task": task}).key

    base = {**plan_of("stack=gqa").config, "stack": "gqa", "sweep": None, "runs": "runs", "mlflow": False}
    one = write(alphabet(200))
    before = key(one)
    assert key(write(alphabet(200), "moved.txt")) == before
    assert key(one, length=8) != before and key(one, rows_per_suite=3) != before
    assert key(write(alphabet(201))) != before
    params = config.plan(base | {"task": tree["task"] | {"path": one}}).params
    assert params["data"] == hashlib.sha256(alphabet(201)).hexdigest()
    assert "data" not in plan_of("stack=gqa").params


def test_a_run_on_a_text_logs_bits_per_byte(command_line, write, tmp_path):
    path = write(b"to be or not to be, " * 40)
    code, out, _ = command_line(
        "stack=gqa", "task=text", f"task.path={path}", "task.length=16", "model.d_model=8", "model.mlp=none",
        "trainer.steps=2", "trainer.batch_size=2", "trainer.threads=1", "mlflow=false", tiny=False,
    )
    assert code == 0 and "val/bits_per_byte" in out
    lines = next((tmp_path / "runs").glob("*/metrics.jsonl")).read_text()
    assert "eval/text/bits_per_byte" in lines and "val/bits_per_byte" in lines


def test_a_wrong_file_is_one_line_on_the_command_line(command_line):
    code, _, err = command_line("stack=gqa", "task=text", "task.path=nowhere.txt", tiny=False)
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1
    assert "path='nowhere.txt' does not exist" in err
