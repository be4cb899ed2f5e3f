from __future__ import annotations

import itertools
import json
import math
import random

import pytest

from analysis import tables
from analysis.runs import counted, load
from analysis.statistics import Interval
from experiments.metrics import format_value


@pytest.fixture
def records(write, runs):
    """Loads what a test has written."""
    return lambda: load(runs)


def test_quality_is_the_hardest_trained_difficulty_then_those_beyond(write, records):
    write(accuracy={4: 1.0, 16: 0.9, 32: 0.5, 64: 0.1})
    assert tables.quality(records()) == ["eval/kv16/accuracy", "eval/kv32/accuracy", "eval/kv64/accuracy"]
    assert tables.trained(records()) == [4, 8, 16]


def test_quality_is_the_hardest_difficulty_where_training_is_not_recorded(write, records):
    folder = write(accuracy={16: 0.9, 4: 1.0})
    params = json.loads((folder / "params.json").read_text())
    del params["task.kv"]
    (folder / "params.json").write_text(json.dumps(params))
    assert tables.quality(records()) == ["eval/kv16/accuracy"] and tables.trained(records()) == []


@pytest.mark.parametrize(
    ("axis", "option", "suites", "trained"),
    [("length", 128, (64, 128, 256), [128]), ("writes", [4, 8], (4, 8, 32), [4, 8]), ("noise", 0.2, (20, 40), [20])],
)
def test_difficulties_of_other_tasks_are_read_off_their_suites(write, records, axis, option, suites, trained):
    folder = write(accuracy={}, params={f"task.{axis}": option})
    metrics = {f"eval/{axis}{n}/accuracy": 0.5 for n in suites}
    line = {"step": 200, "tokens": 2000, "metrics": metrics}
    (folder / "metrics.jsonl").write_text((folder / "metrics.jsonl").read_text() + json.dumps(line) + "\n")
    found = records()
    assert tables.axis(found.metrics) == axis and list(tables.difficulties(found.metrics)) == list(suites)
    assert tables.trained(found) == trained
    assert tables.quality(found) == [name for n, name in zip(suites, metrics, strict=True) if n >= max(trained)]


def test_quality_falls_back_on_other_suites_and_on_validation(write, runs):
    file = write(accuracy={}) / "metrics.jsonl"
    assert tables.quality(load(runs)) == ["val/accuracy"]
    file.write_text(file.read_text() + '{"step": 200, "tokens": 2000, "metrics": {"eval/books/loss": 1.5}}\n')
    assert tables.quality(load(runs)) == ["eval/books/loss"]
    file.write_text("")
    assert tables.quality(load(runs)) == []


def test_the_state_is_taken_at_the_task_length(write, records):
    write(params={"task.length": 1024})
    assert "complexity/state_bytes_at_1024" in tables.costs(
        records()
    ) and "complexity/state_bytes_at_64" not in tables.costs(records())


def test_reads_stand_beside_the_quality_at_their_length(write, records):
    counted = {f"complexity/decode_attention_bytes_at_{n}": 10.0 * n for n in (64, 128, 256)}
    folder = write(accuracy={16: 0.9, 32: 0.5}, costs=counted)
    assert tables.reads(records()) == {"eval/kv16/accuracy": "complexity/decode_attention_bytes_at_64"}
    metrics = {f"eval/length{n}/accuracy": 0.5 for n in (64, 256, 512)}
    (folder / "metrics.jsonl").write_text(
        "\n".join(json.dumps({"step": 1, "tokens": 10, "metrics": m}) for m in (counted, metrics)) + "\n"
    )
    found = {f"eval/length{n}/accuracy": f"complexity/decode_attention_bytes_at_{n}" for n in (64, 256)}
    assert tables.reads(records()) == found
    assert [name for name in tables.costs(records()) if "attention" in name] == list(found.values())


def test_reads_are_not_compared_where_a_stack_has_no_attention(write, records):
    name = "complexity/decode_attention_bytes_at_64"
    write(accuracy={16: 0.9}, costs={name: 640.0})
    assert tables.reads(records())
    write(stack="linear", accuracy={16: 0.8}, costs={name: 0.0})
    assert tables.reads(records()) == {} and name not in tables.costs(records())


def test_costs_that_were_not_recorded_are_left_out(write, records):
    write(costs={"complexity/parameters": 10.0})
    assert tables.costs(records()) == ["complexity/parameters", "measured/train_tokens_per_second"]


def test_summary_is_sorted_by_the_first_metric_with_unknown_last(write, records):
    write("b", 0, accuracy={16: 0.5})
    write("b", 1, accuracy={16: 0.7})
    write("c", 0, accuracy={16: 0.9})
    write("a", 0, accuracy={})
    table = tables.summary(counted(records()), ["eval/kv16/accuracy"])
    assert list(table.index) == ["c", "b", "a"]
    found = table.at["b", "eval/kv16/accuracy"]
    assert (found.n, found.mean) == (2, pytest.approx(0.6))


def test_a_lower_loss_comes_first(write, records):
    write("a", loss={200: 2.0})
    write("b", loss={200: 1.0})
    assert list(tables.summary(counted(records()), ["val/loss"]).index) == ["b", "a"]


def test_intervals_are_shown_where_they_exist():
    name = "eval/kv16/accuracy"
    assert tables.show(name, Interval(0.5, 0.25, 3)) == f"{format_value(name, 0.5)} ± {format_value(name, 0.25)}"
    assert tables.show(name, Interval(0.5, math.nan, 1), runs=1) == format_value(name, 0.5)
    assert tables.show(name, Interval(0.5, 0.25, 2), runs=3).endswith("(n = 2)")
    assert tables.show(name, Interval(math.nan, math.nan, 0), runs=3) == tables.NOTHING
    assert "±" not in tables.show("complexity/parameters", Interval(100.0, 0.0, 3))


def test_cells_share_a_letter_exactly_where_they_cannot_be_told_apart():
    for seed in range(30):
        dice = random.Random(seed)
        cells = [f"cell {i}" for i in range(7)]
        edges = {pair for pair in itertools.combinations(cells, 2) if dice.random() < 0.5}
        same = {cell: [other for other in cells if (cell, other) in edges or (other, cell) in edges] for cell in cells}
        letters = tables.groups(same, cells)
        assert all(letters.values())
        for a, b in itertools.combinations(cells, 2):
            assert bool(set(letters[a]) & set(letters[b])) == ((a, b) in edges), (seed, a, b)
        members = [{cell for cell in cells if letter in letters[cell]} for letter in set("".join(letters.values()))]
        assert not any(one < other for one in members for other in members)
        assert len({frozenset(one) for one in members}) == len(members)


def test_letters_follow_the_order_of_the_cells():
    same = {"x": ["y"], "y": ["x", "z"], "z": ["y"], "w": []}
    assert tables.groups(same, ["x", "y", "z", "w"]) == {"x": "a", "y": "ab", "z": "b", "w": "c"}


def test_every_run_that_is_not_counted_is_listed_with_its_reason(write, records):
    write("mha", 0)
    write("mha", 1, status="FAILED", reason="ValueError: too wide")
    write("linear", 0, status="DIVERGED", reason="the loss was not finite")
    write("linear", 1, status="RUNNING")
    write("window", 1)
    write("mha", 0, started="2024-01-01T00:00:00+00:00")
    left = tables.not_counted(records())
    assert left[["cell", "seed", "status"]].values.tolist() == [
        ["mha", 1, "FAILED"],
        ["linear", 0, "DIVERGED"],
        ["linear", 1, "RUNNING"],
        ["mha", 0, "REPEATED"],
        ["window", "0", "MISSING"],
    ]
    assert (
        left["reason"].tolist()[:2] == ["ValueError: too wide", "the loss was not finite"]
        and left["reason"].notna().all()
    )


def test_nothing_is_listed_where_every_run_is_counted(write, records):
    write("mha", 0)
    write("linear", 0)
    assert tables.not_counted(records()).empty


def test_environments_that_differ_are_both_shown(write, records):
    write()
    other = write(seed=1)
    (other / "environment.json").write_text(json.dumps({"python": "3.12.1", "threads": 1, "gpu": None}))
    found = {tuple(row) for row in tables.environment(records()).values.tolist()}
    assert found == {("python", "3.11.2", 1), ("python", "3.12.1", 1), ("threads", "1", 2)}


def test_settings_separate_what_differs_from_what_is_common(write, records):
    write("mha", params={"lr": 0.1})
    write("linear", params={"lr": 0.2})
    common, differing = tables.settings(records())
    assert dict(common.values.tolist())["d_model"] == "64" and "lr" not in set(common["name"])
    assert differing["lr"].to_dict() == {"mha": "0.1", "linear": "0.2"}


def test_text_columns_are_aligned():
    assert tables.text([["cell", "n"], ["mha + window", "3"]]) == "cell           n\nmha + window   3"
