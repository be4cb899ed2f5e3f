from __future__ import annotations

import math
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments import tasks
from experiments.tasks.base import NOT_SCORED, Scores, Streams, SyntheticTask, collate, loader, split_of, token_sums

ROOT = Path(__file__).parents[2]


class Coins(SyntheticTask):
    """`length` coins, heads or tails: 2 ** length distinct rows."""

    name = "coins"
    vocabulary = 2

    def __init__(self, length: int = 64, rows_per_suite: int = 4, suites: tuple[str, ...] = ("fair",)) -> None:
        self.length, self.rows_per_suite, self.names = length, rows_per_suite, suites

    def draw(self, rng, difficulty):
        tokens = rng.integers(2, size=self.length)
        return tokens, tokens.copy()

    def oracle(self, tokens):
        return tokens

    def difficulties(self, split):
        return dict.fromkeys(self.names, 0)


def rows(dataset) -> list[tuple[int, ...]]:
    return [tuple(item["tokens"].tolist()) for item in dataset]


def test_a_row_depends_on_seed_and_index_alone():
    few, many = Coins().train_dataset(3, 8), Coins().train_dataset(3, 500)
    backwards = [few[i]["tokens"] for i in reversed(range(8))][::-1]
    torch.manual_seed(1)
    np.random.seed(1)
    assert all(torch.equal(many[i]["tokens"], backwards[i]) for i in range(8))
    assert len(set(rows(many))) == 500


def test_a_far_row_is_reached_at_once():
    whole = Coins().train_dataset(0, 2**62)
    assert torch.equal(whole[2**61]["tokens"], Coins().train_dataset(0, 2**61 + 1)[2**61]["tokens"])


@pytest.mark.parametrize("other", [0, 2, 1 + 2**32, 1 + 2**64, 10414254601317384193])
def test_no_two_seeds_share_rows(other):
    assert not set(rows(Coins().train_dataset(1, 50))) & set(rows(Coins().train_dataset(other, 50)))


def test_streams_differ_by_every_part_and_row():
    parts = [("a", "train", 1), ("a", "train", 11), ("a", "train1", 1), ("a", "test", "1"), ("b", "train", 1)]
    first = {Streams(*part)(row).random() for part in parts for row in (0, 1, 2, 2**32, 2**63)}
    assert len(first) == 25


def test_a_long_row_does_not_run_into_the_next_stream():
    streams = Streams("a", "train", 0)
    assert not set(streams(0).random(10_000)) & set(streams(1).random(10_000))


@pytest.mark.parametrize("row", [-1, 5])
def test_rows_outside_the_dataset_do_not_exist(row):
    with pytest.raises(IndexError):
        Coins().train_dataset(0, 5)[row]


@pytest.mark.parametrize(
    ("seed", "count", "what"), [(0, 0, "rows=0"), (0, 2.5, "rows=2.5"), (-1, 5, "seed=-1"), (0.5, 5, "seed=0.5")]
)
def test_seeds_and_rows_that_cannot_be(seed, count, what):
    with pytest.raises(ValueError, match=re.escape(what)):
        Coins().train_dataset(seed, count)


T, V, E = "train", "validation", "test"
PINNED_SPLITS = [T, V, T, V, E, E, V, T, T, T, E, T]


def test_the_split_of_a_sequence_never_changes():
    """Pinned: another hash would mix the splits of earlier runs."""
    found = [split_of(np.arange(n)) for n in range(12)]
    assert found == PINNED_SPLITS
    assert [split_of(np.arange(2 * n, dtype=np.int32)[:n]) for n in range(12)] == PINNED_SPLITS
    assert [split_of(np.arange(2 * n)[::2] // 2) for n in range(12)] == PINNED_SPLITS


def test_splits_have_their_shares():
    rng = np.random.default_rng(0)
    found = Counter(split_of(rng.integers(2, size=64)) for _ in range(8000))
    # Five standard deviations of a binomial count.
    assert abs(found["train"] - 6000) < 5 * math.sqrt(8000 * 6 / 8 * 2 / 8)
    assert abs(found["validation"] - 1000) < 5 * math.sqrt(8000 * 1 / 8 * 7 / 8)
    assert abs(found["test"] - 1000) < 5 * math.sqrt(8000 * 1 / 8 * 7 / 8)


def test_splits_share_no_sequence_even_where_rows_are_few():
    task = Coins(length=8, rows_per_suite=12)
    train = set(rows(task.train_dataset(0, 2000)))
    validation, test = (set(rows(task.suites(split)["fair"])) for split in ("validation", "test"))
    assert len(train) > 150
    assert len(validation) == len(test) == 12
    assert not train & validation
    assert not train & test
    assert not validation & test


def test_suites_of_a_split_share_no_sequence():
    suites = Coins(length=8, rows_per_suite=6, suites=("fair", "biased", "bent")).suites("test")
    found = [row for suite in suites.values() for row in rows(suite)]
    assert len(set(found)) == len(found) == 18


def test_suites_are_frozen():
    before = rows(Coins().suites("test")["fair"])
    torch.manual_seed(5)
    np.random.seed(5)
    rows(Coins().train_dataset(5, 5))
    assert rows(Coins().suites("test")["fair"]) == before
    assert rows(Coins(rows_per_suite=9).suites("test")["fair"])[:4] == before
    assert rows(Coins(suites=("fair", "biased")).suites("test")["fair"]) == before
    assert not set(rows(Coins().suites("validation")["fair"])) & set(before)


def test_a_suite_larger_than_its_rows_is_an_error():
    """8 coins have 256 rows; about 32 of them belong to a split."""
    with pytest.raises(ValueError, match=r"rows_per_suite=80 but test suite fair has no row \d\d: .*coins.*distinct"):
        Coins(length=8, rows_per_suite=80).suites("test")


def test_a_split_without_any_row_is_an_error():
    """One coin has two rows: some split has none."""
    task = Coins(length=0, rows_per_suite=1)
    made = 0
    for make in (lambda: task.train_dataset(0, 1)[0], lambda: task.suites("validation"), lambda: task.suites("test")):
        try:
            make()
            made += 1
        except ValueError as error:
            assert "too few distinct rows" in str(error)
    assert made == 1


@pytest.mark.parametrize("split", ["train", "tset"])
def test_other_splits_have_no_suites(split):
    with pytest.raises(ValueError, match=f"split='{split}'.*validation.*test"):
        Coins().suites(split)


@pytest.mark.parametrize("count", [0, -1, 2.0, True])
def test_suites_of_no_rows_are_refused(count):
    with pytest.raises(ValueError, match="rows_per_suite="):
        Coins(rows_per_suite=count).suites("test")


def tokens_of(loaded) -> list[tuple[int, ...]]:
    return [tuple(row.tolist()) for batch in loaded for row in batch["tokens"]]


@pytest.mark.parametrize("batch_size", [1, 3, 10, 64])
def test_batches_are_the_rows_in_order(batch_size):
    dataset = Coins().train_dataset(0, 10)
    batches = list(loader(dataset, batch_size))
    assert tokens_of(batches) == rows(dataset)
    assert {len(batch["tokens"]) for batch in batches[:-1]} <= {batch_size}
    assert all(set(batch) == {"tokens", "labels"} for batch in batches)
    assert all(value.dtype == torch.int64 for batch in batches for value in batch.values())


@pytest.mark.parametrize("start", [0, 4, 7, 10])
def test_a_resumed_loader_goes_on_where_it_stopped(start):
    dataset = Coins().train_dataset(0, 10)
    assert tokens_of(loader(dataset, 2, start_row=start)) == rows(dataset)[start:]


def test_workers_change_no_row():
    dataset = Coins().train_dataset(0, 10)
    drawn = loader(dataset, 3, start_row=1, workers=2)
    assert tokens_of(drawn) == tokens_of(drawn) == rows(dataset)[1:]


def test_ranks_share_out_every_batch():
    dataset = Coins().train_dataset(0, 16)
    one, two = ([tokens_of([batch]) for batch in loader(dataset, 2, 4, rank=rank, ranks=2)] for rank in (0, 1))
    whole = [tokens_of([batch]) for batch in loader(dataset, 4, 4)]
    assert [sorted(a + b) for a, b in zip(one, two, strict=True)] == [sorted(batch) for batch in whole]


def test_no_batch_repeats_over_workers_epochs_and_ranks():
    """The second epoch is the rows that follow: training data is fresh."""
    dataset = Coins().train_dataset(7, 48)

    def batches():
        for epoch in range(2):
            for rank in range(2):
                part = torch.utils.data.Subset(dataset, range(24 * epoch, 24 * epoch + 24))
                yield from loader(part, 4, workers=2, rank=rank, ranks=2)

    first, again = (tokens_of(batches()) for _ in range(2))
    assert len(set(first)) == len(first) == 48
    assert first == again


def test_reading_data_leaves_the_global_random_state_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    tokens_of(loader(Coins().train_dataset(0, 4), 2))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 1, "start_row": -1}, "start_row=-1"),
        ({"batch_size": 1, "start_row": 6}, "start_row=6 .* 5"),
        ({"batch_size": 1, "workers": -1}, "workers=-1"),
        ({"batch_size": 1, "rank": 2, "ranks": 2}, "rank=2"),
    ],
)
def test_loader_options_that_cannot_be(options, what):
    with pytest.raises(ValueError, match=what):
        loader(Coins().train_dataset(0, 5), **options)


def test_rows_of_different_lengths_are_padded():
    def item(*tokens):
        return {"tokens": torch.tensor(tokens), "labels": torch.tensor(tokens)}

    batch = collate([item(5, 6, 7), item(8)])
    assert batch["tokens"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert batch["labels"].tolist() == [[5, 6, 7], [8, NOT_SCORED, NOT_SCORED]]
    assert batch["documents"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["documents"].dtype == torch.int32

    packed = item(3, 4) | {"documents": torch.tensor([1, 2], dtype=torch.int32)}
    assert collate([packed, item(5, 6, 7)])["documents"].tolist() == [[1, 2, 0], [1, 1, 1]]
    assert collate([packed, item(5, 6)])["documents"].tolist() == [[1, 2], [1, 1]]


def tokens_with_losses(*losses: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [N, 2] and labels [N] whose cross-entropy is exactly that: log(1 + exp(x)) = loss."""
    other = torch.tensor(losses, dtype=torch.float64).expm1().log()
    return torch.stack([torch.zeros_like(other), other], -1), torch.zeros(len(losses), dtype=torch.int64)


@pytest.mark.parametrize("size", [1, 8, 11, 100])
@pytest.mark.parametrize("pads", [0, 3])
def test_ten_tokens_of_loss_two_and_ninety_of_one_are_1_1(size, pads):
    logits, labels = tokens_with_losses(*[2.0] * 10, *[1.0] * 90)
    scores = Scores()
    for a, b in zip(logits.split(size), labels.split(size), strict=True):
        nothing = torch.full((pads, 2), 1e9, dtype=torch.float64)
        scores.add(torch.cat([a, nothing]), torch.cat([b, torch.full((pads,), NOT_SCORED)]))
    assert scores.result()["loss"] == pytest.approx(1.1, abs=1e-12)


def test_the_mean_is_over_tokens_whatever_the_shape_of_a_row():
    """Two documents in rows of 90 with padding: the same as in one line."""
    logits, labels = tokens_with_losses(*[2.0] * 10, *[1.0] * 90)
    padded = torch.zeros(2, 90, 2, dtype=torch.float64)
    padded[0, :10], padded[1] = logits[:10], logits[10:]
    targets = torch.full((2, 90), NOT_SCORED)
    targets[0, :10], targets[1] = labels[:10], labels[10:]
    assert token_sums(padded, targets)["loss"] == (pytest.approx(110, abs=1e-10), 100)


def test_sums_are_kept_in_float64():
    """2 ** 25 + log 2 is 2 ** 25 in float32."""
    large, small = torch.tensor([[0.0, 2.0**25]]), torch.zeros(1000, 2)
    labels = torch.zeros(1001, dtype=torch.int64)
    at_once, one_by_one = Scores(), Scores()
    at_once.add(torch.cat([large, small]), labels)
    for row in torch.cat([large, small]):
        one_by_one.add(row[None], labels[:1])
    for scores in (at_once, one_by_one):
        assert scores.result()["loss"] * 1001 - 2**25 == pytest.approx(1000 * math.log(2), abs=1e-3)


def test_half_precision_logits_are_scored_in_float32():
    logits = torch.randn(64, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    labels = torch.arange(64)
    exact = torch.nn.functional.cross_entropy(logits.double(), labels).item()
    assert token_sums(logits, labels)["loss"][0] / 64 == pytest.approx(exact, abs=1e-5)


def test_accuracy_by_hand():
    logits = torch.tensor([[0.0, 1.0, 0.0], [5.0, 1.0, 0.0], [0.0, 0.0, 1.0], [9.0, 0.0, 0.0]])
    scores = Scores()
    scores.add(logits, torch.tensor([1, 0, 1, NOT_SCORED]))
    assert scores.result()["accuracy"] == 2 / 3


def test_merged_scores_count_every_token_once():
    parts = [tokens_with_losses(2.0), tokens_with_losses(1.0, 1.0, 1.0)]
    whole = Scores()
    for logits, labels in parts:
        part = Scores()
        part.add(logits, labels)
        whole.merge(part)
    assert whole.result()["loss"] == pytest.approx(1.25)


def test_nothing_scored_is_an_error_not_a_number():
    with pytest.raises(ValueError, match="no token was scored"):
        Scores().result()
    scores = Scores()
    scores.add(torch.zeros(2, 3), torch.full((2,), NOT_SCORED))
    with pytest.raises(ValueError, match="no token was scored"):
        scores.result()
    scores.add(*tokens_with_losses(1.0))
    assert scores.result()["loss"] == pytest.approx(1.0)


def test_logits_and_labels_must_fit():
    with pytest.raises(ValueError, match=r"\(2, 3\).*"):
        token_sums(torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64))


def test_a_task_can_measure_more():
    class Bytes(Coins):
        def metrics(self, logits, labels):
            sums = super().metrics(logits, labels)
            return sums | {"bits_per_byte": (sums["loss"][0] / math.log(2), 4 * sums["loss"][1])}

    scores = Bytes().scores()
    scores.add(torch.zeros(3, 2), torch.tensor([0, 1, 1]))
    scores.add(torch.zeros(1, 2), torch.tensor([0]))
    assert scores.result()["bits_per_byte"] == pytest.approx(1 / 4)


def test_tasks_by_name():
    assert "mqar" in tasks.names()
    for name in tasks.names():
        assert tasks.get(name).name == name
        assert tasks.get(name)().vocabulary > 1


def test_an_unknown_task_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match=r"task='mqr' is not a task \(did you mean 'mqar'\?\).*mqar"):
        tasks.get("mqr")


def test_listing_the_tasks_does_not_import_torch():
    code = "import sys, experiments.tasks; experiments.tasks.names(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
