from __future__ import annotations

import io
import json
import math

import pandas as pd
import pytest

from analysis import export
from analysis.runs import load

HALF = 4.302653 / math.sqrt(3) * 0.1


@pytest.fixture
def records(write, runs):
    """Three seeds of one cell, two of the other, and a failure."""
    for seed, value in enumerate((0.8, 0.9, 1.0)):
        write("mha", seed, accuracy={4: 1.0, 16: value})
    for seed, value in enumerate((0.1, 0.1)):
        write("a|b*", seed, accuracy={4: 1.0, 16: value})
    write("window", 0, status="FAILED", reason="out | of memory")
    return load(runs)


def test_csv_has_one_row_a_cell_and_metric(records):
    table = pd.read_csv(io.StringIO(export.document("csv", records, "")), keep_default_na=False, na_values=[""])
    row = table[(table["cell"] == "mha") & (table["metric"] == "eval/kv16/accuracy")].iloc[0]
    assert (row["task"], row["better"], row["n"], row["seeds"]) == ("mqar", "higher", 3, 3) and row["deciding"]
    assert row["mean"] == pytest.approx(0.9) and row["half"] == pytest.approx(HALF, rel=1e-6)
    assert not table.duplicated(["task", "cell", "metric"]).any()
    assert {"val/accuracy", "eval/kv4/accuracy", "complexity/parameters"} <= set(table["metric"])
    assert set(table["cell"]) == {"mha", "a|b*"}


def test_json_says_what_the_page_says_and_holds_no_nan(records):
    found = json.loads(export.document("json", records, "the command"), parse_constant=pytest.fail)
    (task,) = found["tasks"]
    (pair,) = task["differences"]
    assert (pair["left"], pair["right"], pair["n"]) == ("mha", "a|b*", 2) and pair["mean"] == pytest.approx(0.75)
    assert [lost["status"] for lost in task["not_counted"]] == ["FAILED", "MISSING", "MISSING"]
    assert task["fronts"]["complexity/parameters"]["mha"] == "front" and found["command"] == "the command"
    assert {point["metric"] for point in task["curves"]} == {"val/accuracy"}


def test_markdown_tables_stay_tables_whatever_the_names(records):
    text = export.document("md", records, "the command")
    tables = [block for block in text.split("\n\n") if block.startswith("| ")]
    for table in tables:
        bars = [line.replace("\\|", "").count("|") for line in table.splitlines()]
        assert len(set(bars)) == 1
    assert "a\\|b\\*" in text and "out \\| of memory" in text and text.endswith("Made by `the command`")
