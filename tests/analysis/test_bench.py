"""Benchmarks beside runs: who is measured by which, and how costs grow."""

from __future__ import annotations

import json

import pytest

from analysis import bench
from analysis.comparison import by_task
from analysis.pictures import figures, styles
from analysis.report import build, main
from analysis.runs import load
from analysis.scaling import cells

LENGTHS = (64, 128)


@pytest.fixture
def measure(runs):
    """Writes the records of one benchmark, stack -> milliseconds of a decoded token at `LENGTHS`: its folder."""

    def one(time, decode, d_model=64, status="FINISHED"):
        for stack, values in decode.items():
            for length, value in zip(LENGTHS, values, strict=True):
                folder = runs / "bench" / time / f"{stack}-{length}"
                folder.mkdir(parents=True)
                params = {"stack": stack, "layout": stack, "length": length, "batch_size": 1, "model.d_model": d_model}
                metrics = {
                    f"measured/decode_ms_at_{length}": value,
                    f"complexity/decode_flops_per_token_at_{length}": 100.0 * length,
                    "measured/shared_cores": 0.0,
                }
                line = {"step": 0, "tokens": 0, "metrics": metrics}
                (folder / "params.json").write_text(json.dumps(params))
                (folder / "status.json").write_text(json.dumps({"status": status, "reason": "no memory"}))
                (folder / "environment.json").write_text("{}")
                (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        return runs / "bench" / time

    return one


def test_a_run_gets_the_times_of_its_own_model_alone(write, runs, measure):
    write("mha", 0)
    write("mha", 0, params={"d_model": 128, "model.d_model": 128})
    write("linear", 0)
    records = bench.joined(load(runs), bench.read(measure("1", {"mha": (3.0, 5.0)})))
    found = records.runs.set_index(["stack", "model.d_model"])["measured/decode_ms_at_128"]
    assert found["mha", 64] == 5.0 and found[["mha"]].count() == 1 and found[["linear"]].isna().all()


def test_quality_against_the_time_of_a_decoded_token_is_drawn_where_it_was_measured(write, runs, measure):
    for seed in range(2):
        write("mha", seed)
        write("linear", seed, accuracy={4: 1.0, 16: 0.5})
    records = bench.joined(load(runs), bench.read(measure("1", {"mha": (3.0, 5.0), "linear": (2.0, 2.0)})))
    picture = figures(records)["eval-kv16-accuracy-against-measured-decode-ms-at-128"]
    assert {trace.name: trace.x[0] for trace in picture.data if trace.name} == {"mha": 5.0, "linear": 2.0}


def test_the_newest_benchmark_that_measured_one_of_the_stacks_is_taken(write, runs, measure):
    write("mha", 0)
    assert bench.newest(runs, load(runs)) is None
    wanted = measure("2025-01-02", {"mha": (1.0, 1.0)})
    measure("2025-01-01", {"mha": (2.0, 2.0)})
    measure("2025-01-03", {"mha": (3.0, 3.0)}, status="FAILED")
    measure("2025-01-04", {"linear": (3.0, 3.0)})
    assert bench.newest(runs, load(runs)) == wanted


def test_growth_is_a_section_in_the_looks_of_the_other_pictures(write, runs, measure):
    for stack in ("window", "mha"):
        write(stack, 0)
    folder = measure("1", {"mha": (1.0, 4.0), "linear": (3.0, 3.0)})
    measured = bench.read(folder)
    looks = styles(by_task(load(runs)), cells(measured).runs)
    assert set(looks) == {"mha", "window", "linear"}
    found = bench.growth(measured, looks)
    assert [row[:3] for row in found.sheet.rows] == [[s, "decoded token", "2"] for s in ("linear", "mha")]
    # Four times as long for twice the tokens is quadratic; twice the FLOPs is linear.
    assert found.sheet.rows[1][3:] == ["2.00", "1.00", "+1.00 !"]
    colours = {trace.name: trace.line.color for trace in found.pictures[0].figure.data if trace.name}
    assert colours == {cell: looks[cell].colour for cell in ("mha", "linear")}
    page = build(load(runs), measured=measured)
    assert "Cost against length" in page and str(folder) in page


def test_one_length_has_no_growth(measure):
    folder = measure("1", {"mha": (1.0, 4.0)})
    (folder / "mha-128" / "status.json").write_text('{"status": "FAILED"}')
    assert bench.growth(bench.read(folder), {}) is None


def test_the_command_takes_the_newest_and_says_which(write, runs, measure, tmp_path, capsys):
    write("mha", 0)
    folder = measure("1", {"mha": (1.0, 4.0)})
    assert main(["--runs", str(runs), "--html", str(tmp_path / "out.html")]) == 0
    assert f"--bench {folder}" in (tmp_path / "out.html").read_text()
