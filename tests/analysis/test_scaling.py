from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest

from analysis import canvas, plots, scaling
from analysis.runs import load
from analysis.scaling import AGREE, cells, exponent, exponents, points

LENGTHS = (512, 2048, 8192)


def values(length, *, train=2.0, cpu=True, parameters=1000, activation=None, shared=0.0):
    """What a benchmark logs of a stack whose training time grows like length ** train; counted: quadratic."""
    found = {
        "complexity/parameters": parameters,
        "complexity/flops_per_token_forward": float(length),
        "complexity/flops_per_token_train": 3.0 * length,
        f"complexity/decode_flops_per_token_at_{length}": 5.0,
        "measured/train_step_ms": 17.0,
        f"measured/prefill_ms_at_{length}": 1e-3 * length**2,
        f"measured/decode_ms_at_{length}": 2.0,
        "measured/peak_memory_bytes": 8.0 * parameters + 100.0 * length,
        "measured/shared_cores": shared,
    }
    found |= {"measured/train_step_cpu_ms": 1e-3 * length**train} if cpu else {}
    return found | ({f"complexity/activation_bytes_at_{length}": activation * length} if activation else {})


@pytest.fixture
def bench(write, tmp_path):
    """Writes records of one stack at several lengths."""
    def bench(stack="mha", lengths=LENGTHS, params=None, **options):
        for length in lengths:
            about = {"task": "bench", "length": length, "batch_size": 2} | (params or {})
            write(stack, accuracy={}, curve={}, costs=values(length, **options), params=about)
        return tmp_path / "runs"

    return bench


def of(found, quantity, cell="mha"):
    row, = found[(found["quantity"] == quantity) & (found["cell"] == cell)].itertuples()
    return row


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0, -0.5])
def test_the_exponent_of_a_power_is_that_power(power):
    assert exponent(LENGTHS, [7.0 * n**power for n in LENGTHS]) == pytest.approx(power)


def test_the_exponent_is_the_least_squares_slope():
    # By hand, in logarithms to base 2: lengths 0, 1, 2 and values 0, 3, 3: slope (0 * -1 + 3 * 0 + 3 * 1) / 2.
    assert exponent([1, 2, 4], [1, 8, 8]) == pytest.approx(1.5)


def test_there_is_no_exponent_of_one_length_or_of_nothing():
    assert all(math.isnan(found) for found in (exponent([5, 5], [1, 2]), exponent([1, 2], [1, math.nan]),
                                               exponent([1, 2], [0, 1])))


def test_measured_and_counted_exponents_of_every_quantity(bench):
    found = exponents(cells(load(bench(train=1.5, activation=50))))
    train, prefill, decode, memory = (of(found, quantity.name) for quantity in scaling.QUANTITIES)
    assert (train.measured, train.counted) == pytest.approx((1.5, 2.0))
    assert (prefill.measured, prefill.counted) == pytest.approx((2.0, 2.0))
    assert (decode.measured, decode.counted) == pytest.approx((0.0, 0.0), abs=1e-9)
    # Weights and gradients, 8 bytes a parameter, and 50 bytes a token of each of 2 rows.
    slope = np.polyfit(np.log(LENGTHS), np.log([8 * 1000 + 100 * n for n in LENGTHS]), 1)[0]
    assert (memory.measured, memory.counted) == pytest.approx((slope, slope))
    assert train.lengths == 3


def test_where_nothing_was_counted_only_the_measured_one_is_told(bench):
    row = of(exponents(cells(load(bench()))), "peak memory")
    assert math.isnan(row.counted) and row.measured > 0
    assert scaling.rows(exponents(cells(load(bench()))))[-1][-1] == "–"


def test_on_a_gpu_the_wall_is_fitted(bench):
    assert of(exponents(cells(load(bench(cpu=False)))), "training step").measured == pytest.approx(0.0)


def test_cells_that_differ_in_more_than_the_length_stay_apart(bench):
    bench(params={"d_model": 64})
    folder = bench(params={"d_model": 128}, train=1.0)
    known = cells(load(folder))
    assert set(known.runs["cell"]) == {"mha (d_model=64)", "mha (d_model=128)"}
    assert list(points(known, scaling.QUANTITIES[0])["mha (d_model=64)"]["length"]) == list(LENGTHS)
    assert of(exponents(known), "training step", "mha (d_model=128)").measured == pytest.approx(1.0)


def test_a_difference_above_the_bound_is_pointed_at(bench):
    bench("near", train=2 - 0.9 * AGREE)
    found = exponents(cells(load(bench("far", train=2 - 1.1 * AGREE))))
    shown = {row[0]: row[-1] for row in scaling.rows(found) if row[1] == "training step"}
    assert shown == {"far": "-0.33 !", "near": "-0.27"}
    assert scaling.summary(found).startswith("5 of 6 ")


def test_the_page_is_self_contained_and_names_what_is_missing_and_shared(bench, write, capsys):
    bench(shared=0.7, activation=50)
    folder = bench("linear")
    about = {"task": "bench", "length": 512}
    why = "MemoryError: no <room>\nmore"
    write("window", status="FAILED", reason=why, accuracy={}, curve={}, costs={}, params=about)
    assert scaling.main([str(folder)]) == 0
    out, _ = capsys.readouterr()
    page = (folder / "scaling.html").read_text()
    assert "picture: " in out and re.search(r"mha +training step +3 +2\.00 +2\.00 +\+?0\.00", out)
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=.https?:", page)
    assert "window at 512: FAILED: MemoryError: no &lt;room&gt;" in page
    assert "others kept up to 0.7 cores busy" in page
    assert page.count("Plotly.newPlot") >= 4


def test_records_without_two_lengths_are_an_error(bench, tmp_path, capsys):
    assert scaling.main([str(bench(lengths=(512,)))]) == 2
    assert "two lengths" in capsys.readouterr().err
    assert scaling.main([str(tmp_path / "none")]) == 2
    (tmp_path / "empty").mkdir()
    assert scaling.main([str(tmp_path / "empty")]) == 2


def test_the_counted_line_has_the_counted_slope_and_the_measured_middle(bench):
    known = cells(load(bench(train=1.5)))
    shown = points(known, scaling.QUANTITIES[0])
    figure = plots.growth(shown, "training step (CPU ms)", "measured/train_step_ms", canvas.styles(known.runs))
    measured, = (trace for trace in figure.data if trace.mode == "lines+markers")
    dotted, = (trace for trace in figure.data if trace.line.dash == "dot")
    assert list(measured.x) == list(LENGTHS) and measured.y == pytest.approx([1e-3 * n**1.5 for n in LENGTHS])
    assert exponent(dotted.x, dotted.y) == pytest.approx(2.0)
    assert np.log(dotted.y).mean() == pytest.approx(np.log(measured.y).mean())
    assert figure.layout.xaxis.type == figure.layout.yaxis.type == "log"


def test_names_on_a_logarithmic_axis_stand_by_their_points(bench):
    bench("mha", train=2.0)
    known = cells(load(bench("linear", train=1.0)))
    shown = points(known, scaling.QUANTITIES[0])
    figure = plots.growth(shown, "ms", "measured/train_step_ms", canvas.styles(known.runs))
    places = {trace.text[0]: trace.y[0] for trace in figure.data if trace.mode == "text"}
    low, high = (10**end for end in figure.layout.yaxis.range)
    assert low < places["linear"] < places["mha"] <= high
    assert places["linear"] == pytest.approx(1e-3 * 8192, rel=0.3)


def test_the_page_carries_figures_that_can_be_read_back(bench):
    page = scaling.build(load(bench()), "python -m analysis.scaling")
    figures = [json.loads(text) for text in re.findall(r"const picture = (\{.*?\}); Plotly\.newPlot", page)]
    assert [figure["layout"]["annotations"][0]["text"] for figure in figures] == [
        "training step (CPU ms)", "prefill (ms)", "decoded token (ms)", "peak memory (bytes)"]
