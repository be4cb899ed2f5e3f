from __future__ import annotations

import re
from hashlib import sha256
from itertools import chain

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from experiments.metrics import legal, metric
from experiments.tasks.base import NOT_SCORED, fingerprint, loader
from experiments.tasks.mqar import MQAR
from mixers.options import call


def answers(tokens: list[int], kv: int) -> dict[int, int]:
    """The oracle: remember the pairs of the context, look up every key that comes after it."""
    values = dict(zip(tokens[0 : 2 * kv : 2], tokens[1 : 2 * kv : 2], strict=True))
    return {at: values[token] for at, token in enumerate(tokens) if at >= 2 * kv and token in values}


def targets(labels: list[int]) -> dict[int, int]:
    return {at: label for at, label in enumerate(labels) if label != NOT_SCORED}


class Script:
    """A generator that returns what a test wrote down."""

    def __init__(self, uniform: list[float], exponential: list[float]) -> None:
        self.uniform, self.exponential = uniform, exponential

    def random(self, size: int | None = None):
        count = size or 1
        taken, self.uniform = self.uniform[:count], self.uniform[count:]
        return taken[0] if size is None else np.array(taken)

    def standard_exponential(self, size: int):
        assert size == len(self.exponential)
        return np.array(self.exponential)


TOKENS = [2, 8, 4, 7, 0, 0, 4, 0, 0, 0, 0, 0, 2, 0, 0, 0]
LABELS = {6: 7, 12: 8}


def test_a_row_by_hand():
    # Keys 1 + floor(5 u): 2, 2 again, 4, 5. Values 6 + floor(6 u): 8, 7, ... Clocks e * i ** .99: gap 4 before gap 1.
    uniform = [0.2, 0.3, 0.7, 0.9, 0.34, 0.17, 0.99, 0.0]
    rng = Script(uniform, [9.0, 0.5, 9.0, 9.0, 0.01, 9.0])
    tokens, labels = MQAR(vocabulary=12, length=16, kv=(2,), test_kv=(2,)).draw(rng, (2, 16))
    assert tokens.tolist() == TOKENS
    assert targets(labels.tolist()) == LABELS


def test_the_row_in_the_docstring_is_that_row():
    drawn = {line.split()[0]: line.split()[1:17] for line in MQAR.__doc__.splitlines() if line.split()[1:]}
    assert [int(token) for token in drawn["tokens"]] == TOKENS
    assert {at: int(label) for at, label in enumerate(drawn["labels"]) if label != "."} == LABELS


@pytest.mark.parametrize("kv", [1, 2, 5, 16])
def test_the_oracle_answers_every_query(kv):
    dataset = MQAR(kv=(kv,), test_kv=(kv,)).train_dataset(0, 100)
    for item in dataset:
        tokens, labels = item["tokens"].tolist(), item["labels"].tolist()
        assert answers(tokens, kv) == targets(labels)
        assert len(targets(labels)) == kv


def test_the_oracle_scores_1_on_every_suite():
    task = MQAR(test_kv=(4, 8, 16, 32, 5), rows_per_suite=20)
    for name, suite in chain(task.suites("validation").items(), task.suites("test").items()):
        scores = task.scores()
        for batch in loader(suite, 7):
            logits = torch.zeros(*batch["tokens"].shape, task.vocabulary)
            for row, tokens in enumerate(batch["tokens"].tolist()):
                for at, answer in answers(tokens, int(name.removeprefix("kv"))).items():
                    logits[row, at, answer] = 1
            scores.add(logits, batch["labels"])
        assert scores.result()["accuracy"] == 1
        assert scores.sums["accuracy"][1] == 20 * int(name.removeprefix("kv"))


@pytest.mark.parametrize("filler", ["zero", "random"])
@pytest.mark.parametrize(("kv", "length"), [(8, 64), (8, 32), (5, 21), (15, 60)])
def test_rows_are_built_as_defined(kv, length, filler):
    task = MQAR(vocabulary=32, length=length, kv=(kv,), test_kv=(kv,), filler=filler)
    for item in task.train_dataset(1, 50):
        tokens, labels = item["tokens"].numpy(), item["labels"].numpy()
        keys, values = tokens[0 : 2 * kv : 2], tokens[1 : 2 * kv : 2]
        queries = np.flatnonzero(labels != NOT_SCORED)
        assert tokens.shape == labels.shape == (length,)
        assert keys.min() >= 1 and keys.max() < 16 and len(set(keys)) == kv
        assert values.min() >= 16 and values.max() < 32 and len(set(values)) == kv
        assert (queries >= 2 * kv).all() and (queries % 2 == 0).all()
        assert sorted(tokens[queries]) == sorted(keys)
        assert dict(zip(keys, values, strict=True)) == dict(zip(tokens[queries], labels[queries], strict=True))
        rest = np.delete(tokens[2 * kv :], queries - 2 * kv)
        assert not rest.any() if filler == "zero" else rest.min() >= 0 and rest.max() < 32


def test_random_filler_is_any_token():
    rows = MQAR(vocabulary=12, kv=(1,), test_kv=(1,), filler="random").train_dataset(0, 200)
    after = np.concatenate([item["tokens"][2:][item["labels"][2:] == NOT_SCORED].numpy() for item in rows])
    assert chisquare(np.bincount(after, minlength=12)).pvalue > 1e-3


def test_suites_by_name_and_length():
    task = MQAR(rows_per_suite=3)
    validation, test = task.suites("validation"), task.suites("test")
    assert list(validation) == ["kv4", "kv8", "kv16"]
    shapes = {name: tuple(next(iter(loader(suite, 3)))["tokens"].shape) for name, suite in test.items()}
    assert shapes == {"kv4": (3, 64), "kv8": (3, 64), "kv16": (3, 64), "kv32": (3, 128)}
    for name in test:
        assert legal(f"eval/{name}/accuracy")
        assert metric(f"eval/{name}/accuracy").better == "higher"


def test_suites_by_length_hold_the_same_pairs_in_longer_rows():
    task = MQAR(length=128, test_kv=(5,), test_length=(128, 20, 512), rows_per_suite=40)
    assert list(task.suites("validation")) == ["kv4", "kv8", "kv16"]
    assert (task.lengths, task.longest) == ((128, 20, 512), 512)
    for name, suite in task.suites("test").items():
        batch = next(iter(loader(suite, 40)))
        assert batch["tokens"].shape == (40, int(name.removeprefix("length")))
        for tokens, labels in zip(batch["tokens"].tolist(), batch["labels"].tolist(), strict=True):
            assert answers(tokens, 5) == targets(labels) and len(targets(labels)) == 5
        # Queries are drawn from all of the row: 200 at gaps ~ 1 / i reach its last tenth.
        assert (batch["labels"] != NOT_SCORED).any(0).nonzero().max() >= 0.9 * batch["tokens"].shape[1] - 2
    assert list(task.suites("test")) == ["length128", "length20", "length512"]


PINNED = {
    "kv4": "73663f8a65734c3b",
    "kv8": "2efff7fa0570d43b",
    "kv16": "263d5b6688e59e37",
    "kv32": "a94c0a4c79e1cbcf",
}


def test_the_test_suites_are_those_of_earlier_reports():
    """Pinned: numbers of runs before and after a change of the generator could not be compared."""
    found = {name: digest(suite) for name, suite in MQAR(rows_per_suite=16).suites("test").items()}
    assert found == PINNED


def digest(dataset) -> str:
    batch = next(iter(loader(dataset, len(dataset))))
    both = torch.cat([batch["tokens"], batch["labels"]]).numpy().astype("<i8")
    return sha256(both.tobytes()).hexdigest()[:16]


def test_no_sequence_is_shared_by_splits_suites_or_seeds():
    task = MQAR(rows_per_suite=64)
    parts = [task.train_dataset(seed, 300) for seed in (0, 1, 2**32, 2**64)]
    parts += [*task.suites("validation").values(), *task.suites("test").values()]
    found = [fingerprint(item["tokens"].numpy()) for part in parts for item in part]
    assert len(set(found)) == len(found) == 4 * 300 + 7 * 64


def test_rows_do_not_depend_on_batches_workers_or_the_run():
    """Two epochs of two workers, and another batch size in this process: the same rows, bit for bit."""
    dataset = MQAR().train_dataset(3, 40)
    drawn = loader(dataset, 8, workers=2)
    epochs = [torch.cat([torch.stack([b["tokens"], b["labels"]]) for b in batches], 1) for batches in (drawn, drawn)]
    again = loader(MQAR().train_dataset(3, 1000), 5)
    here = torch.cat([torch.stack([b["tokens"], b["labels"]]) for b, _ in zip(again, range(8), strict=False)], 1)
    assert torch.equal(epochs[0], here)
    assert torch.equal(epochs[1], here)


def gap_counts(alpha: float, rows: int) -> np.ndarray:
    """[2, 28] how often the first and the second key of 4 had each gap."""
    task, rng = MQAR(alpha=alpha), np.random.default_rng(12)
    counts = np.zeros((2, 28), dtype=int)
    for _ in range(rows):
        tokens, _ = task.draw(rng, (4, 64))
        for key in range(2):
            counts[key, (np.flatnonzero(tokens[8:] == tokens[2 * key])[0]) // 2] += 1
    return counts


@pytest.mark.parametrize("alpha", [0.01, 0.6, 1.0])
def test_gaps_follow_the_power_law(alpha):
    p = np.arange(1, 29) ** (alpha - 1.0)
    p /= p.sum()
    # The second key draws among the gaps that the first one left.
    second = np.array([sum(p[i] * p[j] / (1 - p[i]) for i in range(28) if i != j) for j in range(28)])
    counts = gap_counts(alpha, 6000)
    for found, law in zip(counts, (p, second), strict=True):
        assert chisquare(found, law * 6000).pvalue > 1e-3
    if alpha != 0.6:
        other = np.arange(1, 29) ** -0.4
        assert chisquare(counts[0], other / other.sum() * 6000).pvalue < 1e-6


def test_keys_values_and_training_difficulties_are_even():
    rng, task = np.random.default_rng(3), MQAR(vocabulary=24, kv=(2, 5, 9), test_kv=(2,))
    keys, values, difficulties = [], [], []
    for _ in range(3000):
        tokens, labels = task.draw(rng, None)
        kv = int((labels != NOT_SCORED).sum())
        keys.append(tokens[2 * (kv - 1)])
        values.append(tokens[2 * kv - 1])
        difficulties.append(kv)
    assert chisquare(np.bincount(keys, minlength=12)[1:]).pvalue > 1e-3
    assert chisquare(np.bincount(values, minlength=24)[12:]).pvalue > 1e-3
    assert chisquare(np.unique(difficulties, return_counts=True)[1]).pvalue > 1e-3


def test_the_smallest_task():
    """One pair: the only key is 1, the values are 2 and 3. 4 rows in all, too few for suites of 256."""
    task = MQAR(vocabulary=4, length=4, kv=(1,), test_kv=(1,), rows_per_suite=256)
    rng = np.random.default_rng(0)
    assert {tuple(task.draw(rng, (1, 4))[0].tolist()) for _ in range(50)} == {(1, 2, 1, 0), (1, 3, 1, 0)}
    with pytest.raises(ValueError, match=r"rows_per_suite=256.*suite kv1 .*mqar has too few distinct rows"):
        task.suites("test")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 63}, "length=63 must be at least 4 * kv = 64 (kv=[4, 8, 16])"),
        ({"length": 0}, "length=0 "),
        ({"length": 64.5}, "length=64.5 "),
        ({"vocabulary": 255}, "vocabulary=255 must be even and at least 66"),
        ({"vocabulary": 64}, "vocabulary=64 must be even and at least 66"),
        ({"vocabulary": 2, "kv": [1], "test_kv": [1]}, "vocabulary=2 must be even and at least 4"),
        ({"vocabulary": -2}, "vocabulary=-2 "),
        ({"kv": []}, "kv=[] must be a list of integers"),
        ({"kv": 4}, "kv=4 must be a list of integers"),
        ({"kv": "48"}, "kv='48' must be a list of integers"),
        ({"kv": [0, 4]}, "kv entry=0 "),
        ({"kv": [4, 2.5]}, "kv entry=2.5 "),
        ({"test_kv": [4, 4]}, "test_kv=[4, 4] must not"),
        ({"test_kv": [-1]}, "test_kv entry=-1 "),
        ({"test_kv": [4], "test_length": []}, "test_length=[] must be a list of integers"),
        ({"test_kv": [4, 8], "test_length": [64]}, "test_kv=[4, 8] must be one number of pairs"),
        ({"test_kv": [8], "test_length": [64, 31]}, "test_length=[64, 31] must be at least 4 * test_kv = 32 each"),
        ({"alpha": 0.0}, "alpha=0.0 must be above 0 and at most 1"),
        ({"alpha": 1.5}, "alpha=1.5 "),
        ({"alpha": float("nan")}, "alpha=nan "),
        ({"filler": "noise"}, "filler='noise' must be zero or random"),
        ({"rows_per_suite": 0}, "rows_per_suite=0 "),
    ],
)
def test_options_that_cannot_be_are_named(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        MQAR(**options)


def test_the_least_that_is_allowed():
    task = MQAR(vocabulary=34, length=64, kv=[16], test_kv=[16], rows_per_suite=1)
    assert task.train_dataset(0, 1)[0]["tokens"].shape == (64,)


def test_the_constructor_is_the_config():
    task = call(MQAR, {"vocabulary": 128, "kv": [2, 3], "test_kv": [2], "alpha": 1}, "task mqar")
    assert (task.vocabulary, task.kv, task.test_kv, task.alpha) == (128, (2, 3), (2,), 1)
    with pytest.raises(ValueError, match="'vocabulary'"):
        call(MQAR, {"vocabulry": 128}, "task mqar")
