from __future__ import annotations

import math
import re
from functools import reduce

import pytest
from mlflow.exceptions import MlflowException
from mlflow.utils.validation import _validate_metric_name

from experiments import metrics
from experiments.metrics import METRICS, Metric, direction, format_value, legal, metric


@pytest.mark.parametrize(
    ("name", "unit", "better", "title"),
    [
        ("val/loss", "nats a token", "lower", "validation loss"),
        ("val/accuracy", "", "higher", "validation accuracy"),
        ("val/bits_per_byte", "bits a byte", "lower", "validation bits per byte"),
        ("eval/kv16/accuracy", "", "higher", "test accuracy on kv16"),
        ("eval/noisy_recall-2.5/loss", "nats a token", "lower", "test loss on noisy_recall-2.5"),
        ("complexity/parameters", "parameters", "lower", "parameters"),
        ("complexity/flops_per_token_forward", "FLOPs", "lower", "forward FLOPs a token"),
        ("complexity/flops_per_token_train", "FLOPs", "lower", "training FLOPs a token"),
        ("complexity/state_bytes_at_2048", "bytes", "lower", "state after 2048 tokens"),
        ("complexity/decode_flops_per_token_at_64", "FLOPs", "lower", "decoding FLOPs a token after 64"),
        ("measured/train_tokens_per_second", "tokens/s", "higher", "training tokens a second"),
        ("measured/peak_memory_bytes", "bytes", "lower", "peak memory"),
        ("measured/decode_ms_at_512", "ms", "lower", "time to decode a token after 512"),
        ("measured/train_step_ms", "ms", "lower", "time of a training step"),
        ("measured/prefill_cpu_ms_at_512", "ms", "lower", "CPU time to read a prompt of 512"),
        ("measured/peak_flops_per_second", "FLOP/s", "higher", "FLOPs a second of the fastest matrix product"),
    ],
)
def test_names_of_the_contract(name, unit, better, title):
    found = metric(name)
    assert (found.unit, found.better, found.title) == (unit, better, title)
    assert direction(name) == better


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("val/acuracy", "val/accuracy"),
        ("eval/kv16", None),
        ("eval/kv16/acuracy", "eval/<suite>/accuracy"),
        ("eval/a/b/c/accuracy", "eval/<suite>/accuracy"),
        ("eval/../accuracy", "eval/<suite>/accuracy"),
        ("complexity/state_bytes_at_", "complexity/state_bytes_at_<length>"),
        ("complexity/state_bytes_at_0", "complexity/state_bytes_at_<length>"),
        ("complexity/state_bytes_at_2k", "complexity/state_bytes_at_<length>"),
        ("val/loss\n", "val/loss"),
        ("val-loss", "val/loss"),
        ("", None),
    ],
)
def test_unknown_names_are_refused_and_the_nearest_is_named(name, nearest):
    with pytest.raises(ValueError, match=re.escape(f"metric {name!r} is unknown")) as error:
        metric(name)
    if nearest is not None:
        assert f"did you mean {nearest!r}?" in str(error.value)
    assert "complexity/flops_per_token_train" in str(error.value)


def examples() -> list[str]:
    parts = {"<suite>": "kv4", "<length>": "64", "<scaling>": "yarn"}
    return [reduce(lambda name, part: name.replace(*part), parts.items(), entry.pattern) for entry in METRICS]


def test_a_name_means_one_thing():
    for name in examples():
        assert sum(entry.of(name) is not None for entry in METRICS) == 1


def test_a_metric_without_a_direction_cannot_be_optimised(monkeypatch):
    monkeypatch.setattr(metrics, "METRICS", (Metric("train/temperature", "K", None, "temperature"),))
    with pytest.raises(ValueError, match="train/temperature"):
        direction("train/temperature")


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("complexity/parameters", 1_234_567, "1.23 M"),
        ("complexity/parameters", 0, "0"),
        ("complexity/parameters", 999, "999"),
        ("complexity/parameters", 999_499, "999 k"),
        ("complexity/parameters", 999_500, "1 M"),
        ("complexity/flops_per_token_train", 4.256e12, "4.26 T"),
        ("complexity/flops_per_token_forward", 0.5, "0.5"),
        ("complexity/state_bytes_at_64", 4096, "4.1 kB"),
        ("complexity/state_bytes_at_64", 512, "512 B"),
        ("measured/peak_memory_bytes", 65_536, "65.5 kB"),
        ("measured/train_tokens_per_second", 12_345.6, "12.3 k"),
        ("measured/train_tokens_per_second", math.inf, "inf"),
        ("measured/decode_ms_at_512", 3.2144, "3.21 ms"),
        ("measured/train_step_ms", 12_345.6, "12,346 ms"),
        ("measured/train_flops_per_second", 5.13e10, "51.3 G"),
        ("val/accuracy", 0.9926, "0.993"),
        ("eval/kv4/accuracy", 1, "1.000"),
        ("val/loss", 5.5452, "5.545"),
        ("val/bits_per_byte", math.nan, "nan"),
    ],
)
def test_values_for_people(name, value, shown):
    assert format_value(name, value) == shown


def test_a_value_of_an_unknown_metric_is_refused():
    with pytest.raises(ValueError, match="val/acc"):
        format_value("val/acc", 1.0)


def mlflow_takes(name: str) -> bool:
    try:
        _validate_metric_name(name)
    except MlflowException:
        return False
    return True


@pytest.mark.parametrize("name", [*examples(), "a:b", "a b-c.d_e/f", "x" * 250])
def test_legal_names_are_taken_by_mlflow(name):
    assert legal(name)
    assert mlflow_takes(name)


@pytest.mark.parametrize("name", ["acc@512", "loss[len=64]", "a//b", "/a", "../a", "a/../b", "a/", "."])
def test_names_that_mlflow_refuses_are_not_legal(name):
    assert not mlflow_takes(name)
    assert not legal(name)


@pytest.mark.parametrize("name", ["", "x" * 251, "größe", "a\n"])
def test_names_that_databases_or_paths_may_refuse_are_not_legal(name):
    assert not legal(name)
