"""The synthetic tasks against their definitions: rows worked out by hand, and the laws that rows are drawn by."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch.nn import functional as F

from experiments import tasks
from experiments.tasks.base import NOT_SCORED


class Script:
    """A generator whose every draw is the next one that a test wrote down."""

    def __init__(self, *draws):
        self.draws = list(draws)

    def __getattr__(self, name):
        return lambda *size, **sizes: np.array(self.draws.pop(0))


def order(*orders):
    """Random numbers whose argsort is each of the orders."""
    return [np.argsort(row) for row in orders]


ANY, UP = [0, 1, 2, 3], [2] * 8
FUZZY = (
    # Sizes are all 2 in a suite. Key 0 is the probe, (2, 0); key 2 is (1, 2).
    order([2, 0, 1, 3], ANY, [1, 2, 0, 3], ANY, ANY, ANY, ANY, ANY), UP,
    # Values from the last key to the first: the probe's is (5, 4), that of key 2 is (6).
    order(ANY, ANY, ANY, ANY, ANY, [2, 0, 1, 3], ANY, [1, 0, 2, 3]), [2, 2, 2, 2, 2, 1, 2, 2], 0,
)
# Task, options, difficulty, what is drawn in this order, and the length of the row.
ROWS = [
    ("induction", {"vocabulary": 8, "length": 10}, 10, ([3, 0, 3, 0, 5, 1, 0, 6, 5, 0], 3)),
    ("copying", {"vocabulary": 8}, 3, ([2, 0, 2],)),
    ("parity", {}, 7, ([1, 0, 1, 1, 0, 0, 1],)),
    # Slots 2 and 3 of 5, keys 1 and 2 of 3, values, noise, the order of the questions.
    ("needle", {"vocabulary": 12, "facts": 2, "length": 12}, (12, 0),
     ([0.4, 0.6, 0, 0], [0.4, 0.7, 0, 0], [5, 5], [6, 6, 8, 10, 6, 6, 6, 6, 9, 11, 6, 6], [1, 0])),
    # Two more writes of key 0; starts and steps of values 1, 3, 0, 3; questions; keys 2 and 0 of 4.
    ("forgetting", {"vocabulary": 8, "keys": 2, "writes": [4], "test_writes": [4]}, 4,
     ([0, 0], [0, 1, 0, 0], [0, 2], [1, 1, 3, 3], [1, 0], [0.5, 0, 0, 0])),
    # Keys, the value of each key, nothing is noise, the last key.
    ("mad/in_context_recall", {"vocabulary": 8, "length": 12}, 12,
     ([2, 0, 2, 3, 0, 0], [7, 4, 5, 5], [0.9] * 6, 0, 3, np.empty((0, 2)))),
    ("mad/noisy_recall", {"vocabulary": 12, "noise_vocabulary": 4, "length": 12}, 0.2,
     ([2, 1, 2, 3, 1, 0], [7, 4, 5, 5], [0.1, 0.1, 0.9, 0.9, 0.1, 0.1], 0, 3, [[0.25, 0.3], [0, 0.9]])),
    ("mad/fuzzy_recall", {"vocabulary": 9, "key_size": 2, "value_size": 2, "length": 14}, 14, FUZZY),
    # Tokens; one blank before the first, two before the second, one before the third.
    ("mad/selective_copying", {"vocabulary": 6, "length": 11, "copies": [3], "test_copies": [3]}, 3,
     ([2, 0, 2], [0, 1, 1, 2])),
    ("mad/memorization", {"vocabulary": 8, "length": 6}, "table", ([1, 0, 1],)),
    ("mad/compression", {"symbols": 4, "length": 5}, slice(None), ([2, 0, 2, 1],)),
    ("transduction", {"rule": "sort", "vocabulary": 8}, 3, ([5, 0, 2],)),
]


@pytest.mark.parametrize(("name", "options", "difficulty", "draws"), ROWS, ids=[row[0] for row in ROWS])
def test_the_row_in_the_docstring_is_what_its_draws_make(name, options, difficulty, draws):
    task = tasks.get(name)(**options)
    if name == "mad/memorization":
        task.table = np.array([5, 3, 6])
    script = Script(*draws)
    tokens, labels = task.draw(script, difficulty)
    assert not script.draws
    told = written(task)
    assert tokens.tolist() == told["tokens"]
    assert labels.tolist() == told["labels"]
    scored = labels != NOT_SCORED
    assert (task.oracle(tokens)[scored] == labels[scored]).all()
    if "training" in told:
        assert [*tokens[1:], NOT_SCORED] == told["training"]


def written(task):
    """The lines of the first row that a docstring draws, a number for each position."""
    lines = {}
    for line in type(task).__doc__.splitlines():
        first = (line.split() or [""])[0]
        if first in ("tokens", "labels", "training"):
            lines.setdefault(first, line.partition(first)[2].partition("(.")[0])
    if task.name == "mad/compression":
        *before, last = lines["labels"].split(None, task.length - 1)
        answers = [sum(int(n) for n in answer.split("+")) for answer in last.split(",")]
        none = [NOT_SCORED] * (task.length - 1)
        return {"tokens": numbers(lines["tokens"]), "labels": [none for _ in before] + [answers]}
    return {name: numbers(line) for name, line in lines.items()}


def numbers(line):
    return [NOT_SCORED if word == "." else int(word) for word in line.split()]


def drawn(name, difficulty=None, rows=300, seed=0, **options):
    task, rng = tasks.get(name)(**options), np.random.default_rng(seed)
    return task, [task.draw(rng, difficulty) for _ in range(rows)]


def even(values, count):
    return chisquare(np.bincount(values, minlength=count)).pvalue > 1e-3


def test_every_bit_is_scored_where_that_is_asked_for():
    _, labels = tasks.get("parity")(scored="every").draw(Script([1, 0, 1, 1, 0, 0, 1]), 7)
    assert labels.tolist() == [1, 1, 0, 1, 1, 1, 0]


def test_a_fact_in_the_place_of_the_scored_one_changes_places_with_it():
    task = tasks.get("needle")(vocabulary=12, facts=2, length=12)
    script = Script([0.4, 0, 0, 0], [0.4, 0.7, 0, 0], [3, 4], [6] * 12, [0, 1])
    tokens, labels = task.draw(script, (12, 0))
    assert tokens.tolist() == [1, 3, 6, 6, 2, 4, 6, 6, 6, 6, 1, 2]
    assert labels.tolist() == [NOT_SCORED] * 10 + [3, NOT_SCORED]


@pytest.mark.parametrize(("depth", "place"), [(0, 0), (25, 16), (50, 30), (75, 44), (100, 60)])
def test_the_scored_fact_is_at_its_depth(depth, place):
    """64 tokens, 2 questions: slots 0 to 30 of two tokens; 7.5 becomes 8 and 22.5 becomes 22, halves to even."""
    task, rows = drawn("needle", (64, depth), facts=2)
    for tokens, labels in rows:
        asked, = np.flatnonzero(labels != NOT_SCORED)
        assert tokens[place] == tokens[asked] and tokens[place + 1] == labels[asked]
        assert (tokens < task.clean).sum() == 2 * 2 + 2


def test_training_facts_are_anywhere_and_all_are_asked_for():
    _, rows = drawn("needle", facts=4, length=24, rows=2000)
    places = np.concatenate([np.flatnonzero(tokens[:20] < 16) for tokens, _ in rows])
    assert even(places // 2, 10) and not (places % 2).any()
    assert {int((labels != NOT_SCORED).sum()) for _, labels in rows} == {4}


def test_the_trigger_stands_anywhere():
    _, rows = drawn("induction", length=12, rows=2000)
    first = [tokens.tolist().index(15) for tokens, _ in rows]
    assert even(first, 10) and max(first) == 9
    assert {(tokens == 15).sum() for tokens, _ in rows} == {2}


@pytest.mark.parametrize(("name", "options", "lengths"), [
    ("parity", {"shortest": 3, "length": 9}, range(3, 10)),
    ("copying", {"shortest": 2, "letters": 6}, range(6, 15, 2)),
    ("forgetting", {"writes": [4, 6, 9]}, (12, 16, 22)),
])
def test_lengths_of_training_rows_are_even(name, options, lengths):
    _, rows = drawn(name, rows=1500, **options)
    found = [lengths.index(len(tokens)) for tokens, _ in rows]
    assert even(found, len(lengths))


def test_a_key_is_never_written_with_the_value_that_it_has():
    task, rows = drawn("forgetting", 12, vocabulary=8, keys=2, rows=500)
    values, first = [], []
    for tokens, labels in rows:
        body = tokens[:24].reshape(12, 2)
        for key in set(body[:, 0]):
            history = body[body[:, 0] == key, 1]
            assert (history[1:] != history[:-1]).all()
            assert labels[24:][tokens[24:] == key] == history[-1]
            values.append(history[-1] - 4)
            first.append(history[0] - 4)
        assert sorted(tokens[24:]) == sorted(set(body[:, 0])) and len(set(body[:, 0])) == 2
    assert even(values, 4) and even(first, 4)
    assert task.length == 2 * 16 + 2


@pytest.mark.parametrize(("name", "difficulty", "noise"), [
    ("mad/in_context_recall", 64, 0.0), ("mad/noisy_recall", 0.0, 0.0), ("mad/noisy_recall", 0.4, 0.4)])
def test_recall_is_scored_exactly_where_a_key_was_shown_before(name, difficulty, noise):
    task, rows = drawn(name, difficulty, length=64)
    noisy = 0
    for tokens, labels in rows:
        shown = {}
        for at in range(0, 64, 2):
            if tokens[at] >= 16:
                noisy += 1
                assert tokens[at + 1] >= 16 and labels[at] == NOT_SCORED
                continue
            assert tokens[at] < 8 <= tokens[at + 1] < 16
            assert labels[at] == shown.get(tokens[at], NOT_SCORED)
            assert shown.setdefault(tokens[at], tokens[at + 1]) == tokens[at + 1]
        assert (labels[1::2] == NOT_SCORED).all()
        assert labels[62] == tokens[63]
    # 30 of the 32 pairs may be noise; five standard deviations.
    assert abs(noisy - 30 * 300 * noise) <= 5 * (30 * 300 * noise * (1 - noise)) ** 0.5
    assert task.length == 64


@pytest.mark.parametrize("training", [True, False])
def test_fuzzy_pairs_have_the_lengths_of_the_definition(training):
    _, rows = drawn("mad/fuzzy_recall", None if training else 128)
    sizes = {"key": [], "value": []}
    for tokens, _ in rows:
        pads = int((tokens == 15).sum())
        assert (tokens[:pads] == 15).all() and pads < 12
        kinds = "".join("k" if token < 7 else "v" for token in tokens[pads:])
        pairs = kinds.replace("vk", "v k").split()
        keys = [pair.count("k") for pair in pairs]
        # The last pair is the first one to fit the place that is left: not as evenly drawn as the others.
        sizes["key"] += keys[:10]
        sizes["value"] += [pair.count("v") for pair in pairs[:10]]
        parts = np.split(tokens[pads:], np.cumsum([len(pair) for pair in pairs])[:-1])
        assert any(np.array_equal(parts[-1], part) for part in parts[:-1])
        assert all(len(set(part)) == len(part) for part in parts)
    assert set(sizes["key"]) == ({1, 2, 3} if training else {3})
    assert set(sizes["value"]) == {1, 2, 3}
    assert abs(np.mean(sizes["value"]) - 2) < 0.1


def test_blanks_go_in_front_of_the_tokens_evenly():
    _, rows = drawn("mad/selective_copying", 4, length=20, copies=[4], test_copies=[4], rows=400)
    before = []
    for tokens, _ in rows:
        read = tokens[:15].tolist()
        places = [at for at, token in enumerate(read) if token != 14]
        assert len(places) == 4 and places[-1] == 14 and tokens[15] == 15 and (tokens[16:] == 14).all()
        before += [j for j, gap in enumerate(np.diff([-1, *places])) for _ in range(gap - 1)]
    assert len(before) == 400 * 11 and even(before, 4)


def test_the_table_is_the_same_for_all_seeds_and_rows():
    task = tasks.get("mad/memorization")()
    said = {}
    for seed in (0, 1):
        for item in task.train_dataset(seed, 100):
            for key, value in zip(item["tokens"][0::2].tolist(), item["labels"][1::2].tolist(), strict=True):
                assert said.setdefault(key, value) == value
    assert len(said) == 127 == len(set(said.values()))
    assert max(said) == 126 and min(said.values()) >= 127 and max(said.values()) <= 254
    assert tasks.get("mad/memorization")(table=1).table.tolist() != task.table.tolist()


def test_compression_compares_the_symbols_of_one_position():
    task = tasks.get("mad/compression")(symbols=4, length=5)
    torch.manual_seed(0)
    logits = torch.randn(6, 16, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 5, 10, 12, 7, NOT_SCORED])
    truth = [F.cross_entropy(logits[n, place * 4 : place * 4 + 4][None], torch.tensor([symbol]))
             for n, (place, symbol) in enumerate([(0, 0), (1, 1), (2, 2), (3, 0), (1, 3)])]
    total, count = task.metrics(logits, labels)["loss"]
    assert count == 5 and total == pytest.approx(sum(truth).item(), abs=1e-12)
    # A model whose head is the identity.
    task.loss(SimpleNamespace(logits=lambda hidden: hidden), logits[:5], labels[:5]).backward()
    gradient = logits.grad.clone()
    logits.grad = None
    sum(truth).backward()
    assert torch.allclose(gradient, logits.grad, atol=1e-12)
    right = torch.zeros(1, 16)
    right[0, 5], right[0, 14] = 1, 9
    assert task.metrics(right, torch.tensor([5]))["accuracy"] == (1, 1)


def test_the_quarters_of_compression_score_every_symbol_once():
    task = tasks.get("mad/compression")(length=32)
    quarters = task.difficulties("test")
    whole = quarters.pop("all")
    places = [place for part in quarters.values() for place in range(31)[part]]
    assert places == list(range(31)) == list(range(31)[whole])
    assert list(quarters) == ["oldest", "older", "newer", "newest"]
