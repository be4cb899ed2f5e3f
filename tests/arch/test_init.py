"""How weights start and which decay."""

from __future__ import annotations

import copy

import pytest
import torch

from arch.init import decay_groups
from arch.language_model import LanguageModel
from mixers.parts import marked, own_parameters


def build(**options):
    torch.manual_seed(0)
    return LanguageModel(
        "mha + linear",
        vocabulary=256,
        d_model=128,
        n_layers=4,
        convolution=4,
        position="learned",
        **({"tied": False, "norm": "layernorm", "bias": True} | options),
    )


@pytest.mark.parametrize("std", [None, 0.05])
def test_matrices_are_normal_and_residual_outputs_scaled_by_the_depth(std):
    model = build(init_std=std)
    for name, module, own, parameter in own_parameters(model):
        if parameter.dim() < 2 or "convolution" in name:
            continue
        expected = std or (0.02 if isinstance(module, torch.nn.Embedding) else module.in_features**-0.5)
        expected /= 8**0.5 if "residual" in marked(module, own) else 1
        assert parameter.std().item() == pytest.approx(expected, rel=0.05), name
    residual = {
        name for name, module, own, _ in own_parameters(model) if "residual" in marked(module, own) and own == "weight"
    }
    assert residual == {
        f"stack.blocks.{i}.{part}.weight" for i in range(4) for part in ("mixing.mixers.0.out", "mlp.mlp.down")
    }


def test_without_mlps_there_are_half_as_many_residual_outputs():
    out = build(mlp="none", init_std=0.02).stack.blocks[0].mixing.mixers[0].out.weight
    assert out.std().item() == pytest.approx(0.02 / 4**0.5, rel=0.05)


def test_biases_are_zero_norms_one_and_the_convolution_keeps_its_own_init():
    model = build()
    for name, _, own, parameter in own_parameters(model):
        if own == "bias":
            assert (parameter == 0).all(), name
        if "before.weight" in name:
            assert (parameter == 1).all()
        if "convolution" in name:
            assert parameter.std().item() == pytest.approx(0.5 / 3**0.5, rel=0.1)  # uniform within +- 4 ** -0.5


@pytest.mark.parametrize("tied", [True, False])
def test_only_matrices_decay_embeddings_excepted(tied):
    model = build(tied=tied)
    groups = decay_groups(model, 0.1)
    named = {id(p): name for name, p in model.named_parameters()}
    decayed, kept = ({named[id(p)] for p in group["params"]} for group in groups)
    assert decayed | kept == set(named.values()) and not decayed & kept
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    matrices = {"mixing.mixers.0." + name for name in ("q.weight", "k.weight", "v.weight", "out.weight")} | {
        "mlp.mlp.up.weight",
        "mlp.mlp.down.weight",
    }
    expected = {f"stack.blocks.{i}.{name}" for i in range(4) for name in matrices} | (
        set() if tied else {"head.weight"}
    )
    assert decayed == expected


def test_decay_is_torchs_own_step():
    """With zero gradients AdamW only decays: w (1 - lr wd) where it may, w elsewhere."""
    model = build()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    decayed = {id(p) for p in decay_groups(model, 0.1)[0]["params"]}
    optimiser = torch.optim.AdamW(decay_groups(model, 0.1), lr=0.5)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimiser.step()
    for name, p in model.named_parameters():
        assert torch.allclose(p, before[name] * (0.95 if id(p) in decayed else 1), atol=1e-7), name


def test_marks_survive_a_copy():
    twin = copy.deepcopy(build())
    assert len(decay_groups(twin, 0.1)[0]["params"]) == len(decay_groups(build(), 0.1)[0]["params"])
