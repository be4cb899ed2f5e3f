"""Mamba and Mamba-2 against `transformers`, with the same weights: outputs, gradients, cached decode, left padding."""

from __future__ import annotations

import pytest
import torch

from mixers import registry
from mixers.base import Packing

pytest.importorskip("transformers")

from transformers import (
    DynamicCache,
    FalconH1Config,
    JambaConfig,
    Mamba2Config,
    MambaConfig,
    NemotronHConfig,
)
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1Mixer, compute_mup_vector
from transformers.models.jamba.modeling_jamba import JambaMambaMixer
from transformers.models.mamba.modeling_mamba import MambaMixer
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

D = 64
FALCON = dict(hidden_size=D, mamba_d_ssm=96, mamba_n_heads=6, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=2,
              mamba_chunk_size=16, num_hidden_layers=1)  # fmt: skip
NEMOTRON = dict(hidden_size=D, mamba_num_heads=10, mamba_head_dim=8, ssm_state_size=8, n_groups=2, chunk_size=16,
                layers_block_type=["mamba"], time_step_min=0.02)  # fmt: skip


def mamba2(**changes):
    heads = dict(num_heads=8, head_dim=16, state_size=8, n_groups=2, chunk_size=16)
    return Mamba2Mixer, Mamba2Config(hidden_size=D, num_hidden_layers=1, **heads | changes)


# Theirs, and ours in our words.
CASES = {
    "mamba": ((MambaMixer, MambaConfig(hidden_size=D, num_hidden_layers=1)), "mamba", {}),
    "mamba with other sizes": (
        (MambaMixer, MambaConfig(hidden_size=D, num_hidden_layers=1, state_size=5, conv_kernel=3, expand=1,
                                 time_step_rank=7, use_conv_bias=False)),
        "mamba", dict(d_state=5, d_conv=3, expand=1, dt_rank=7, conv_bias=False),
    ),
    "mamba with biases": (
        (MambaMixer, MambaConfig(hidden_size=D, num_hidden_layers=1, use_bias=True)), "mamba", dict(bias=True),
    ),
    "jamba": (
        (JambaMambaMixer, JambaConfig(hidden_size=D, num_hidden_layers=1, mamba_dt_rank=4)),
        "mamba", dict(inner_norm=True),
    ),
    "mamba2": (mamba2(), "mamba2", dict(d_state=8, head_dim=16, n_groups=2)),
    "mamba2 with biases": (
        mamba2(use_bias=True, n_groups=1, conv_kernel=2), "mamba2",
        dict(d_state=8, head_dim=16, bias=True, d_conv=2),
    ),
    "mamba2 of falcon-h1, norm first": (
        (FalconH1Mixer, FalconH1Config(**FALCON, mamba_rms_norm=True, mamba_norm_before_gate=True)),
        "mamba2", dict(d_state=8, head_dim=16, n_heads=6, n_groups=2, norm="before_gate"),
    ),
    "mamba2 of falcon-h1, without norm": (
        (FalconH1Mixer, FalconH1Config(**FALCON, mamba_rms_norm=False)),
        "mamba2", dict(d_state=8, head_dim=16, n_heads=6, n_groups=2, norm="none"),
    ),
    "mamba2 of nemotron-h": (
        (NemotronHMamba2Mixer, NemotronHConfig(**NEMOTRON)),
        "mamba2", dict(d_state=8, head_dim=8, n_heads=10, n_groups=2, dt_floor=0.02),
    ),
}  # fmt: skip
PLAIN = ["mamba", "mamba2"]


def pair(name):
    """Theirs and ours, with the same random weights loaded by name."""
    (module, config), mixer, options = CASES[name]
    torch.manual_seed(0)
    theirs = module(config, layer_idx=0)
    if module is FalconH1Mixer:
        # Fixed factors in front of the weights, 1 by default; their model hands them to its mixers.
        theirs.mup_vector = compute_mup_vector(config)
    ours = registry.build(mixer, D, **options)
    ours.load_state_dict({n: torch.randn_like(t) / (8 if t.dim() > 1 else 2) for n, t in ours.state_dict().items()})
    theirs.load_state_dict(ours.state_dict())
    return theirs, ours


def relative(got, expected):
    return ((got - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("time", [1, 17, 63])
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_equal_transformers(name, time):
    theirs, ours = pair(name)
    x = torch.randn(2, time, D, requires_grad=True)
    got, expected = ours(x), theirs(x)
    assert relative(got, expected) < 1e-5
    weight, names = torch.randn_like(got), [n for n, _ in ours.named_parameters()]
    # Without a past there is nothing to decay: this gradient is 0.
    names = [n for n in names if time > 1 or n != "A_log"]
    grads = torch.autograd.grad((got * weight).sum(), [x, *(ours.get_parameter(n) for n in names)])
    wanted = torch.autograd.grad((expected * weight).sum(), [x, *(theirs.get_parameter(n) for n in names)])
    errors = {n: relative(a, b) for n, a, b in zip(["x", *names], grads, wanted, strict=True)}
    assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize("prompt", [1, 2, 17])
@pytest.mark.parametrize("name", PLAIN)
def test_cached_decode_equals_transformers(name, prompt):
    """Prompts shorter than the convolution too."""
    theirs, ours = pair(name)
    (_, config), *_ = CASES[name]
    cache, x = DynamicCache(config=config), torch.randn(2, prompt + 4, D)
    with torch.no_grad():
        state = ours.start(2, x)
        for start, end in ((0, prompt), *((t, t + 1) for t in range(prompt, prompt + 4))):
            expected = theirs(x[:, start:end], cache=cache)
            got, state = ours.extend(x[:, start:end], state)
            assert relative(got, expected) < 1e-5
    layer = cache.layers[0]
    assert relative(state["state"], layer.recurrent_states[0]) < 1e-5
    assert relative(state["tail"], layer.conv_states[0].transpose(1, 2)[:, -3:]) < 1e-5


@pytest.mark.parametrize("name", PLAIN)
def test_left_padding_equals_transformers(name):
    """What stands at pads is masked on both sides; theirs is right without a bias in front of the convolution."""
    theirs, ours = pair(name)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1, 1]])
    x = torch.randn(2, 9, D)
    expected, got = theirs(x, attention_mask=mask), ours(x, Packing(mask.int()))
    assert relative(got[mask.bool()], expected[mask.bool()]) < 1e-5
