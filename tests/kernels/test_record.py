"""Tables of the docs are rewritten between their marks and nowhere else."""

from __future__ import annotations

import pytest

from kernels import bench_gpu, bench_gpu_sparse, bench_gpu_state, record


def test_only_what_stands_between_the_marks_changes(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- x -->\nold\n<!-- x -->\nb <!-- y --> c <!-- y -->\n")
    record.rewrite("x", ["new", "lines"], page)
    assert page.read_text() == "a\n<!-- x -->\nnew\nlines\n<!-- x -->\nb <!-- y --> c <!-- y -->\n"
    with pytest.raises(ValueError, match="must hold the mark <!-- z --> twice; it holds it 0 times"):
        record.rewrite("z", [], page)


@pytest.mark.parametrize("name", ["compiled", "measured", "measured sparse"])
def test_the_page_has_a_place_for_each_table(name):
    assert record.DOCS.read_text().count(f"<!-- {name} -->") == 2


@pytest.mark.parametrize("module", [bench_gpu, bench_gpu_sparse])
def test_benchmark_without_a_gpu_says_so(module, monkeypatch, capsys):
    monkeypatch.setattr(module.torch.cuda, "is_available", lambda: False)
    assert module.main([]) == 1
    assert "needs a GPU" in capsys.readouterr().err


def test_crossover_by_hand():
    """Quadratic against linear time meet where they are equal; the last crossing counts."""
    lengths = (1000, 2000, 4000, 8000)
    quadratic, linear = [n * n for n in lengths], [3000 * n for n in lengths]
    assert bench_gpu_sparse.crossover(lengths, linear, quadratic) == pytest.approx(3000)
    assert bench_gpu_sparse.crossover(lengths, quadratic, linear) is None
    assert bench_gpu_sparse.crossover(lengths, [1, 5, 1, 1], [2, 2, 2, 2]) > 2000
    assert bench_gpu_sparse.crossover(lengths, [1, 1, 1, 1], [2, 2, 2, 2]) == 1000
    assert bench_gpu_sparse.crossover((), (), ()) is None


def test_work_of_a_benchmark_by_hand():
    """One query sees all keys: 4 D FLOPs a key and query head; backward is 2.5 times forward."""
    flops, moved = bench_gpu.Problem("decode", 64, 1, 1000).work()
    assert flops == 16 * 32 * 1000 * 4 * 64
    assert moved == 2 * 64 * 16 * (2 * 32 + 2 * 8 * 1000)
    flops, _ = bench_gpu.Problem("backward", 64, 16_384, 16_384, backward=True).work()
    assert flops == 2.5 * 32 * (16_384 * 16_385 // 2) * 4 * 64


def test_work_of_a_scan_and_a_convolution_by_hand():
    """16,384 tokens, 2048 channels: 16 states updated and read, with 8 bytes of x, y and the step; 4 taps, 4 bytes."""
    found = {p.what: p.work() for p in bench_gpu_state.problems() if p.time == 4096 and p.who == "this project"}
    tokens = 16_384 * 2048
    assert found["scan, N 16, forward"] == (tokens * 2 * 2 * 16, tokens * 8)
    assert found["scan, N 16, backward"] == (2 * tokens * 2 * 2 * 16, 2 * tokens * 8)
    # Three tokens of each of the four rows have fewer taps.
    assert found["convolution, W 4, forward"] == (2 * (4 * tokens - 4 * 2048 * (3 + 2 + 1)), tokens * 4)
