"""Scalings of RoPE as cells of a comparison, and the loss of a text by the length of its windows."""

from __future__ import annotations

import json

import pytest

from analysis import extrapolation, report, sheets
from analysis.comparison import by_task
from analysis.runs import counted, load

TEXT = {"task": "text", "task.name": "text", "task.kv": None, "task.length": 64}


@pytest.fixture
def tested(write):
    """One record with these last metrics."""

    def one(metrics, **about):
        folder = write(accuracy={}, **{"params": TEXT} | about)
        line = {"step": 200, "tokens": 2000, "metrics": metrics}
        (folder / "metrics.jsonl").write_text((folder / "metrics.jsonl").read_text() + json.dumps(line) + "\n")

    return one


def bits(plain: dict[int, float], **scaled: dict[int, float]) -> dict[str, float]:
    """Bits a byte by factor, as trained and under scalings."""
    return {
        f"eval/text{'' if factor == 1 else f'_x{factor}'}{'' if name == 'plain' else f'/{name}'}/bits_per_byte": value
        for name, values in ({"plain": plain} | scaled).items() for factor, value in values.items()
    }


def test_a_run_is_one_cell_a_scaling(tested, runs):
    for seed in (0, 1):
        tested(bits({1: 2.0, 4: 4.0 + seed}, pi={1: 2.0, 4: 3.0 + seed}, yarn={1: 2.0, 4: 2.5 + seed}), seed=seed)
        tested(bits({1: 2.5, 4: 2.6}), stack="alibi", seed=seed)
    about, = by_task(load(runs))
    assert about.sizes == {f"mha (scaling={name})": 2 for name in ("none", "pi", "yarn")} | {"alibi": 2}
    found = about.summary["eval/text_x4/bits_per_byte"].map(lambda interval: interval.mean).to_dict()
    assert found == {"mha (scaling=none)": 4.5, "mha (scaling=pi)": 3.5, "mha (scaling=yarn)": 3.0, "alibi": 2.6}
    # What was counted holds for all of them, and nothing was lost.
    assert set(about.summary["complexity/parameters"].map(lambda interval: interval.mean)) == {66_000.0}
    assert not sheets.left(about).rows and not [text for text in about.warnings if "seed" in text]
    name, lengths = extrapolation.by_length(about.counted)
    assert name == "eval/text/bits_per_byte" and set(lengths) == set(about.cells)
    assert {n: i.mean for n, i in lengths["mha (scaling=pi)"].items()} == {64: 2.0, 256: 3.5}


def test_runs_without_scalings_stay_what_they_are(write, runs):
    write()
    records = load(runs)
    assert extrapolation.apart(records) is records


def test_a_failed_run_is_listed_once(tested, write, runs):
    asked = TEXT | {"evaluate.rope_scaling.pi.rope_type": "linear"}
    tested(bits({1: 2.0, 4: 4.0}, pi={1: 2.0, 4: 3.0}), params=asked)
    write(status="FAILED", reason="no memory", seed=1, params=asked)
    about, = by_task(load(runs))
    left = [(row[0], row[1]) for row in sheets.left(about).rows]
    assert left == [("mha (scaling=none), seed 1", "FAILED"), ("mha (scaling=pi), seed 1", "MISSING")]


def test_the_report_draws_quality_by_length(tested, runs):
    tested(bits({1: 2.0, 4: 4.0}, pi={1: 2.0, 4: 3.0}))
    page = report.build(load(runs))
    assert "Test bits per byte on text by length" in page and "mha (scaling=pi)" in page and "of 1 runs" not in page


def test_windows_of_one_length_are_no_picture(tested, runs):
    tested(bits({1: 2.0}))
    assert extrapolation.by_length(counted(load(runs))) == ("", {})


def test_runs_trained_at_different_lengths_have_no_axis(tested, write, runs):
    tested(bits({1: 2.0, 4: 4.0}))
    write(stack="linear", params=TEXT | {"task.length": 128})
    assert extrapolation.by_length(counted(load(runs))) == ("", {})
