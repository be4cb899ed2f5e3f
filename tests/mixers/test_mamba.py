"""Mamba and Mamba-2: the published start, names and bad input. Against transformers: test_mamba_parity.py."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.functional import softplus

from arch.init import decay_groups
from arch.language_model import LanguageModel
from mixers import registry

NAMES = {
    "mamba": {
        "in_proj.weight": (256, 64),
        "conv1d.weight": (128, 1, 4),
        "conv1d.bias": (128,),
        "x_proj.weight": (36, 128),
        "dt_proj.weight": (128, 4),
        "dt_proj.bias": (128,),
        "A_log": (128, 16),
        "D": (128,),
        "out_proj.weight": (64, 128),
    },
    "mamba2": {
        "in_proj.weight": (128 + 128 + 2 * 128 + 2, 64),
        "conv1d.weight": (128 + 2 * 128, 1, 4),
        "conv1d.bias": (128 + 2 * 128,),
        "dt_bias": (2,),
        "A_log": (2,),
        "D": (2,),
        "norm.weight": (128,),
        "out_proj.weight": (64, 128),
    },
}

both = pytest.mark.parametrize("name", NAMES)


@both
def test_parameters_have_the_published_names_and_shapes(name):
    mixer = registry.build(name, 64)
    assert {n: tuple(t.shape) for n, t in mixer.state_dict().items()} == NAMES[name]


@pytest.mark.parametrize("whole", [False, True], ids=["alone", "in a model"])
@both
def test_the_published_start_survives(name, whole):
    """C10."""
    torch.manual_seed(0)
    if whole:
        model = LanguageModel(name, vocabulary=8, d_model=512, n_layers=1, init_std=0.5)
        mixer = model.stack.blocks[0].mixing.mixers[0]
    else:
        mixer = registry.build(name, 512)
    steps = softplus(mixer.dt_bias if name == "mamba2" else mixer.dt_proj.bias)
    assert steps.min() >= 1e-3 * (1 - 1e-5) and steps.max() <= 1e-1 * (1 + 1e-5)
    assert (mixer.D == 1).all()
    if name == "mamba":
        assert torch.allclose(mixer.A_log.exp(), torch.arange(1.0, 17).expand(1024, -1))
        # Log-uniform: the mean of the logarithms is that of 1e-2.
        assert steps.log().mean().exp().item() == pytest.approx(1e-2, rel=0.1)
        assert mixer.dt_proj.weight.abs().max() <= 32**-0.5
    else:
        rates = mixer.A_log.exp()
        assert rates.min() >= 1 and rates.max() <= 16


@both
def test_what_the_paper_does_not_decay_is_not_decayed(name):
    model = LanguageModel(name, vocabulary=8, d_model=32, n_layers=1, mlp="none")
    spared = {id(p) for p in decay_groups(model, 0.1)[1]["params"]}
    named = dict(model.stack.blocks[0].mixing.mixers[0].named_parameters())
    expected = {"A_log", "D", "conv1d.bias", "dt_bias", "dt_proj.bias", "norm.weight"} & set(named)
    assert {n for n, p in named.items() if id(p) in spared} == expected


@both
def test_a_block_leaves_its_convolution_out(name):
    assert LanguageModel(name, vocabulary=8, d_model=16, convolution=4).stack.blocks[0].mixing.convolution is None


@both
def test_sums_stay_fp32_under_autocast(name):
    """C41; the ops refuse steps, decays and skips that are narrower."""
    mixer, x = registry.build(name, 32), torch.randn(2, 9, 32)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        y, state = mixer.extend(x, mixer.start(2, x))
    assert y.dtype == torch.bfloat16 and state["state"].dtype == torch.float32
    assert {p.dtype for p in mixer.parameters()} == {torch.float32}


@pytest.mark.parametrize("norm", ["after_gate", "before_gate"])
def test_sums_beyond_half_precision_reach_the_norm(norm):
    """4,096 keys of norm 20 in float16, all of one direction and hardly forgotten: their sum is above 65,504."""
    torch.manual_seed(0)
    mixer, x = registry.build("mamba2", 8, d_state=16, d_conv=1, norm=norm).half(), 1 + torch.rand(1, 4096, 8).half()
    with torch.no_grad():
        mixer.in_proj.weight.abs_()
        mixer.conv1d.weight.fill_(2.5)
        mixer.A_log.fill_(-12)
        y, state = mixer.extend(x, mixer.start(1, x))
        expected = copy.deepcopy(mixer).double()(x.double())
    assert state["state"].amax() > 65_504 / 20
    assert y.dtype == torch.float16 and (y - expected).norm() < 2e-3 * expected.norm()


@both
def test_pieces_shorter_than_the_convolution_equal_the_whole(name):
    """C02, C16: 1 to 3 tokens at a time with 4 taps."""
    mixer, x = registry.build(name, 16).double(), torch.randn(2, 9, 16).double()
    state, pieces = mixer.start(2, x), []
    for start, end in ((0, 1), (1, 3), (3, 6), (6, 7), (7, 9)):
        y, state = mixer.extend(x[:, start:end], state)
        pieces.append(y)
    assert torch.allclose(torch.cat(pieces, 1), mixer(x), atol=1e-12)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mamba", dict(d_state=0), "d_state=0 must be at least 1"),
        ("mamba", dict(d_conv=0), "d_conv=0 must be at least 1"),
        ("mamba", dict(expand=-1), "expand=-1 must be at least 1"),
        ("mamba", dict(dt_rank=0), "dt_rank=0 must be at least 1"),
        ("mamba", dict(dt_min=0.2), "dt_min=0.2 and dt_max=0.1 must be 0.0001 <= dt_min <= dt_max"),
        ("mamba", dict(dt_min=0.0), "dt_min=0.0"),
        ("mamba", dict(causal=False), "mixer 'mamba' has no bidirectional form: allowed causal=True"),
        ("mamba", dict(state=3), r"no option 'state' \(did you mean 'd_state'\?\)"),
        ("mamba2", dict(d_state=0), "d_state=0 must be at least 1"),
        ("mamba2", dict(d_conv=0), "d_conv=0 must be at least 1"),
        ("mamba2", dict(head_dim=0), "head_dim=0 must be at least 1"),
        ("mamba2", dict(head_dim=48), "head_dim=48 must divide expand \\* d_model = 128"),
        ("mamba2", dict(n_groups=3), "n_groups=3 must divide the 2 heads"),
        ("mamba2", dict(n_groups=0), "n_groups=0 must be at least 1"),
        ("mamba2", dict(n_heads=0), "n_heads=0 must be at least 1"),
        ("mamba2", dict(a_min=0.0), "a_min=0.0 and a_max=16.0"),
        ("mamba2", dict(dt_floor=-1.0), "dt_floor=-1.0 must be at least 0"),
        ("mamba2", dict(norm="before"), "did you mean 'before_gate'"),
        ("mamba2", dict(causal=False), "mixer 'mamba2' has no bidirectional form: allowed causal=True"),
    ],
)
def test_wrong_options_are_named(name, options, message):
    with pytest.raises(ValueError, match=message):
        registry.build(name, 64, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t[:1], "is of batch 1; x is of batch 2"),
        (lambda t: t[..., :3], "state must have shape"),
        (lambda t: t.bfloat16(), "state must be of dtype torch.float32 or wider"),
    ],
    ids=["batch", "shape", "dtype"],
)
@both
def test_a_foreign_state_is_named(name, change, message):
    mixer, x = registry.build(name, 16), torch.randn(2, 5, 16)
    _, state = mixer.extend(x, mixer.start(2, x))
    state.tensors["state"] = change(state["state"])
    with pytest.raises(ValueError, match=message):
        mixer.extend(x, state)
