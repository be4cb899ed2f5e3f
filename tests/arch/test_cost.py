"""Counted cost against brute force over the definition, hand formulas, and live tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from arch.cost import measure, on_meta, parts
from arch.language_model import LanguageModel
from mixers import registry
from mixers.base import Mixer

MIXERS = {"window": {"window": 5}, "gqa": {"n_heads": 4, "n_kv_heads": 2}, "based": {"feature_dim": 3}}
D, V = 16, 11


def build(layout, **options):
    return LanguageModel(layout, vocabulary=V, d_model=D, mixers=MIXERS, **options)


def multiply_adds(model, length):
    """Every multiply-add of the definition, enumerated pair by pair and tap by tap."""
    count = 0
    for i in range(length):
        for block in model.stack.blocks:
            if block.mixing is not None:
                if block.mixing.convolution is not None:
                    count += sum(1 for tap in range(4) if i - tap >= 0) * D
                for mixer in block.mixing.mixers:
                    count += sum(p.in_features * p.out_features for p in (mixer.q, mixer.k, mixer.v, mixer.out))
                    if hasattr(mixer, "feature_dim"):
                        # S += k v^T, q S, and the normaliser as one more value.
                        count += 2 * mixer.n_heads * mixer.feature_dim * (mixer.value_dim + 1)
                    else:
                        seen = sum(
                            1
                            for j in range(length)
                            if (j <= i or not mixer.causal) and (mixer.window is None or abs(i - j) < mixer.window)
                        )
                        count += mixer.n_heads * seen * 2 * mixer.head_dim
            if block.mlp is not None:
                count += sum(
                    m.in_features * m.out_features for m in block.mlp.mlp.modules() if isinstance(m, nn.Linear)
                )
        count += D * V
    return count


@pytest.mark.parametrize(
    "layout", ["mha", "gqa", "mqa", "window", "linear", "based", "mha + linear|window", "gqa@a + mlp + gqa@a"]
)
@pytest.mark.parametrize("length", [1, 4, 17])
@pytest.mark.parametrize("options", [{}, dict(convolution=4, mlp="gelu")], ids=["plain", "convolution"])
def test_flops_equal_brute_force(layout, length, options):
    """C20, and C04 for the whole model: every mixer counts, masked pairs do not."""
    model = build(layout, **options)
    cost = measure(model, length)
    assert cost.flops_per_token_forward * length == 2 * multiply_adds(model, length)
    assert cost.flops_per_token_train == 3 * cost.flops_per_token_forward
    # One more token: the difference between two whole sequences, as every mixer here is causal with exact extension.
    assert cost.decode_flops_per_token == 2 * (multiply_adds(model, length + 1) - multiply_adds(model, length))


@pytest.mark.parametrize("name", ["mha", "window", "linear", "based"])
def test_bidirectional_flops_equal_brute_force(name):
    model = LanguageModel(name, vocabulary=V, d_model=D, mixers={name: {"causal": False} | MIXERS.get(name, {})})
    cost = measure(model, 9)
    assert cost.flops_per_token_forward * 9 == 2 * multiply_adds(model, 9)
    assert cost.state_bytes is None and not any(
        "state_bytes" in metric or "decode" in metric for metric in cost.metrics()
    )


def test_core_growth():
    """C20: T to 2T: T (T + 1) / 2 pairs for causal attention (3.97 times at 64), twice for linear attention."""
    cost = {
        (name, n): measure(LanguageModel(name, vocabulary=1, d_model=64, mlp="none"), n)
        for name in ("mha", "linear")
        for n in (64, 128)
    }
    outside = 2 * (4 * 64 * 64 * 2 + 64)  # projections of two layers and the head, a token
    core = {key: (value.flops_per_token_forward - outside) * key[1] for key, value in cost.items()}
    assert core["mha", 128] / core["mha", 64] == pytest.approx(128 * 129 / (64 * 65)) == pytest.approx(3.97, abs=0.01)
    assert core["linear", 128] / core["linear", 64] == 2


@pytest.mark.parametrize("layout", ["mha", "window", "linear|based", "mha@a + window + mha@a"])
@pytest.mark.parametrize("length", [1, 4, 17])
def test_state_bytes_equal_live_tensors(layout, length):
    model = build(layout, convolution=4)
    with torch.no_grad():
        _, state = model.prefill(torch.randint(0, V, (1, length)))
    assert measure(model, length).state_bytes == sum(
        t.numel() * t.element_size() for t in state.tensors.values() if t.is_floating_point()
    )


def test_parameters_by_hand():
    cost = measure(build("gqa@a + gqa@a", mlp_width=24), 4)
    block = 16 * 16 * 2 + 2 * 16 * 8 + 3 * 16 * 24 + 2 * 16  # q and out, k and v of two groups, MLP, two norms
    assert cost.parameters == block + 16 + V * D and cost.parameters_without_embeddings == block + 16
    untied = measure(build("gqa@a + gqa@a", mlp_width=24, tied=False, position="learned", max_length=32), 4)
    assert untied.parameters == block + 16 + 2 * V * D + 32 * D and untied.parameters_without_embeddings == block + 16


def test_llama_parameters_equal_transformers():
    """Built on meta: 8,030,261,248 for Llama-3.1-8B."""
    with torch.device("meta"):
        model = LanguageModel(
            "gqa",
            vocabulary=128_256,
            d_model=4096,
            n_layers=32,
            mlp_width=14_336,
            tied=False,
            mixers={"gqa": {"n_heads": 32, "n_kv_heads": 8}},
        )
    cost = measure(model, 1_000_000)
    assert cost.parameters == 8_030_261_248
    assert cost.state_bytes == 2 * 32 * 8 * 128 * 1_000_000 * 4


def test_metrics_have_the_contracts_names():
    metrics = measure(build("mha"), 64).metrics()
    assert set(metrics) == {
        f"complexity/{name}"
        for name in (
            "parameters",
            "parameters_without_embeddings",
            "flops_per_token_forward",
            "flops_per_token_train",
            "state_bytes_at_64",
            "decode_flops_per_token_at_64",
        )
    }


def test_measuring_leaves_the_model_alone():
    model = build("mha").train()
    before = [p.detach().clone() for p in model.parameters()]
    measure(model, 8)
    assert model.training and all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert {p.device.type for p in on_meta(model).parameters()} == {"meta"}


def test_a_recomputing_mixer_has_no_decode_figure(monkeypatch):
    registry.names()
    monkeypatch.setattr(registry, "_classes", dict(registry._classes))

    @registry.register("naive")
    class Naive(Mixer):
        def __init__(self, d_model: int):
            super().__init__()
            self.project = nn.Linear(d_model, d_model, bias=False)

        def whole(self, x):
            scores = self.project(x) @ x.transpose(1, 2)
            return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf")).softmax(-1) @ x

    cost = measure(LanguageModel("naive", vocabulary=V, d_model=D), 8)
    assert cost.decode == "recompute" and cost.dense_counted
    assert "complexity/decode_flops_per_token_at_8" not in cost.metrics()
    assert cost.state_bytes == 2 * 8 * D * 4


def test_length_below_one_is_named():
    with pytest.raises(ValueError, match="length=0 must be at least 1"):
        measure(build("mha"), 0)
    with pytest.raises(ValueError, match="length=0 must be at least 1"):
        parts(build("mha"), 0)


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("mha", dict()),
        ("2*window + linear|based + gqa", dict(convolution=4, sandwich=True, tied=False)),
        ("gqa@a + window + gqa@a", dict(position="learned", max_length=32, parallel="normed_mean")),
        ("mlp + gqa + mlp", dict(mlp="gelu", norm="layernorm", bias=True)),
        ("linear", dict(mlp="none", position="sinusoidal", logit_softcap=5.0)),
    ],
)
@pytest.mark.parametrize("length", [1, 17])
def test_parts_add_up_to_the_whole(layout, options, length):
    model = build(layout, **options)
    found, whole = parts(model, length), measure(model, length)
    assert [part.name for part in found] == ["embedding", *map(str, model.stack.layers), "head"]
    assert sum(part.parameters for part in found) == whole.parameters
    flops = sum(part.flops_per_token_forward for part in found)
    assert flops == pytest.approx(whole.flops_per_token_forward, rel=1e-12)
    assert sum(part.state_bytes for part in found) == whole.state_bytes


def test_a_part_that_shares_weights_adds_none():
    first, again, other = (part.parameters for part in parts(build("gqa@a + gqa@a + gqa"), 4)[1:-1])
    assert first == other > 0 and again == 0
    assert parts(build("gqa"), 4)[-1].parameters == D  # the norm: the head is the embedding
    assert parts(build("gqa", tied=False), 4)[-1].parameters == D + V * D


def test_parts_of_a_bidirectional_model_have_no_state():
    model = LanguageModel("mha + mha", vocabulary=V, d_model=D, mixers={"mha": {"causal": False}})
    found = parts(model, 9)
    assert {part.state_bytes for part in found} == {None}
    flops = sum(part.flops_per_token_forward for part in found)
    assert flops == pytest.approx(measure(model, 9).flops_per_token_forward, rel=1e-12)


def test_parts_leave_the_model_alone():
    model = build("mha + linear").train()
    parts(model, 8)
    assert all(module.training for module in model.modules())
    assert {p.device.type for p in model.parameters()} == {"cpu"}
