from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from arch import cost
from experiments import bench_cell, cli
from experiments.bench_cell import DECODE, PREFILL, TRAIN, WrongReading, check, metrics, plan
from experiments.timing import Reading
from mixers import registry
from mixers.base import Mixer


@pytest.fixture(scope="module")
def tree():
    return cli.composed("bench", ["stack=mha", "model.d_model=16", "model.mlp=none", "length=64", "batch_size=3"])


@pytest.fixture
def cell_of(tree):
    """The cell of a small model with some options changed: a.b=value."""
    def make(*changes):
        config = OmegaConf.create(tree)
        for name, _, value in (change.partition("=") for change in changes):
            OmegaConf.update(config, name, OmegaConf.create(f"value: {value}")._get_node("value"), force_add=True)
        return plan(OmegaConf.to_container(config))

    return make


def test_counted_flops_are_those_of_the_whole_batch(cell_of):
    # By hand: 2 layers, D 16, 64 tokens: 4 projections of 16 x 16; 64 * 65 / 2 pairs of 16 + 16; a head of 256 x 16.
    forward = 2 * (2 * 4 * 16 * 16 * 64 + 2 * (16 + 16) * 64 * 65 // 2) + 2 * 256 * 16 * 64
    decode = 2 * (2 * 4 * 16 * 16 + 2 * (16 + 16) * 65) + 2 * 256 * 16
    assert cell_of().flops == {TRAIN: 3 * 3 * forward, PREFILL: 3 * forward, DECODE: 3 * decode}


def test_what_a_model_cannot_do_is_not_timed(cell_of, monkeypatch):
    assert set(cell_of("model.mixers.mha.causal=false").flops) == {TRAIN}
    monkeypatch.setattr(registry, "_classes", dict(registry._classes))

    @registry.register("again")
    class Again(Mixer):
        def __init__(self, d_model: int):
            super().__init__()

        def whole(self, x):
            return x.cumsum(1)

    # It extends by running everything again, which is no decoding.
    assert set(cell_of("model.layout=again").flops) == {TRAIN, PREFILL}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("length=0", "length=0 must be a whole number of at least 1"),
        ("length=two", "length='two' must be a whole number"),
        ("rounds=0", "rounds=0 must be a whole number of at least 1"),
        ("threads=0", "threads=0 must be a whole number of at least 1"),
        ("precision=16", "precision=16 is not allowed; allowed: 32, bf16-mixed"),
        ("backend=portabel", "backend='portabel' is not allowed (did you mean 'portable'?)"),
        ("lenght=5", "no option 'lenght' (did you mean 'length'?)"),
        ("model.mixers.mha.n_heads=3", "n_heads=3"),
        ("runs=${nowhere}", "nowhere"),
    ],
)
def test_wrong_options_are_named_with_what_is_allowed(cell_of, change, message):
    with pytest.raises(ValueError) as error:
        cell_of(change)
    assert message in str(error.value)


def rounds(*seconds):
    return [{TRAIN: Reading(wall, cpu)} for wall, cpu in seconds]


def test_a_time_that_needs_more_flops_a_second_than_there_are_is_refused(cell_of):
    # Case C21, with a clock that runs a hundred times too slow in one round of three.
    cell = cell_of("accelerator=cpu")
    peak = cell.flops[TRAIN] / 0.01
    check(cell, rounds((0.02, 0.02), (0.001, 0.01), (0.02, 0.02)), peak)
    with pytest.raises(WrongReading, match=r"wrong reading: train_step in 0\.2 ms .* fastest matrix product"):
        check(cell, rounds((0.02, 0.02), (0.02, 0.0002), (0.02, 0.02)), peak)
    with pytest.raises(WrongReading, match="train_step in 0 ms"):
        check(cell, rounds((0.02, 0.0)), peak)


def test_metrics_are_medians_and_the_spread_is_that_of_the_work(cell_of):
    cell = cell_of("accelerator=cpu")
    both = {PREFILL: Reading(0.002, 0.001), DECODE: Reading(0.0003, 0.0002)}
    found = metrics(cell, [both | reading for reading in rounds((0.5, 0.2), (0.3, 0.1), (9.0, 0.16))], 1e9)
    assert found == pytest.approx({
        "measured/train_step_ms": 500.0, "measured/train_step_cpu_ms": 160.0, "measured/train_step_spread": 0.1 / 0.16,
        "measured/train_tokens_per_second": 64 * 3 / 0.5, "measured/train_flops_per_second": cell.flops[TRAIN] / 0.16,
        "measured/prefill_ms_at_64": 2.0, "measured/prefill_cpu_ms_at_64": 1.0, "measured/prefill_spread_at_64": 0.0,
        "measured/decode_ms_at_64": 0.3, "measured/decode_cpu_ms_at_64": 0.2, "measured/decode_spread_at_64": 0.0,
        "measured/peak_flops_per_second": 1e9,
    })


def test_on_a_gpu_the_wall_is_the_work(cell_of, monkeypatch):
    monkeypatch.setattr(bench_cell.torch.cuda, "is_available", lambda: True)
    cell = cell_of("model.mixers.mha.causal=false")
    found = metrics(cell, rounds((0.5, 0.2), (0.4, 0.2), (0.6, 0.2)), 1e9)
    assert found["measured/train_flops_per_second"] == cell.flops[TRAIN] / 0.5
    assert not any("cpu" in name for name in found)


def test_counted_metrics_are_those_of_a_run(cell_of):
    cell = cell_of()
    assert cell.counted == cost.measure(cell.model(), 64).metrics()
