"""The linear-time mixers against public definitions, written anew here, and `transformers`."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import sigmoid, silu

from mixers import registry
from mixers.parts import marked

transformers = pytest.importorskip("transformers")
from transformers.models.minimax.modeling_minimax import MiniMaxConfig, MiniMaxLightningAttention  # noqa: E402

B, T, D, H = 2, 70, 32, 4


def inputs(time=T):
    torch.manual_seed(0)
    return torch.randn(B, time, D)


def heads(x):
    return x.unflatten(-1, (H, -1)).transpose(1, 2)


def close(got, expected, relative=1e-5):
    return (got - expected).norm() <= relative * expected.norm()


def lightning(layer=3, layers=8):
    """MiniMax's layer, and ours with its weights."""
    config = MiniMaxConfig(
        hidden_size=D, num_attention_heads=H, num_hidden_layers=layers, block_size=16,
        layer_types=["linear_attention"] * layers,
    )  # fmt: skip
    theirs = MiniMaxLightningAttention(config, layer).eval()
    options = dict(decay="slopes", position="none", activation="silu", norm="rms", gate="sigmoid", scale=1.0, expand=1)
    ours = registry.build(
        "retention", D, n_heads=H, slope_scale=1 - layer / (layers - 1 + 1e-5) + 1e-5, **options
    )  # fmt: skip
    with torch.no_grad():
        theirs.norm.weight.uniform_(0.5, 1.5)
        # Theirs is a head's query, key and value, head after head.
        q, k, v = (part.flatten(0, 1) for part in theirs.qkv_proj.weight.unflatten(0, (H, 3, D // H)).unbind(1))
        for name, weight in (
            ("q", q), ("k", k), ("v", v), ("gate", theirs.output_gate.weight), ("out", theirs.out_proj.weight),
            ("norm", theirs.norm.weight),
        ):  # fmt: skip
            getattr(ours, name).weight.copy_(weight)
    return theirs, ours


def test_lightning_attention_equals_transformers():
    theirs, ours = lightning()
    x, y = inputs().requires_grad_(), inputs().requires_grad_()
    expected, state = theirs(x, None, None)
    got = ours(y)
    assert close(got, expected)
    weight = torch.randn_like(got)
    (expected * weight).sum().backward()
    (got * weight).sum().backward()
    assert close(y.grad, x.grad)
    for name, whose in (("out", theirs.out_proj), ("gate", theirs.output_gate), ("norm", theirs.norm)):
        assert close(getattr(ours, name).weight.grad, whose.weight.grad)
    with torch.no_grad():
        assert close(ours.extend(y, ours.start(B, y))[1]["kv"], state)


def test_retention_equals_the_parallel_form():
    """RetNet's equation 5, (Q K^T * D) V with D of gamma^(n - m), then its group norm and gate."""
    mixer, x = registry.build("retention", D, n_heads=H), inputs()
    q, k, v = (heads(project(x)) for project in (mixer.q, mixer.k, mixer.v))
    angles = torch.arange(T)[:, None] * 10000 ** (-torch.arange(0, D // H, 2) / (D // H))
    turn = torch.polar(torch.ones_like(angles), angles)
    q, k = (torch.view_as_real(torch.view_as_complex(t.unflatten(-1, (-1, 2))) * turn).flatten(-2) for t in (q, k))
    gamma, distance = 1 - 2.0 ** (-5 - torch.arange(H)), torch.arange(T)[:, None] - torch.arange(T)
    decay = torch.where(distance >= 0, gamma[:, None, None] ** distance.clamp(min=0), 0)
    y = ((q @ k.mT / (D // H) ** 0.5 * decay) @ v).transpose(1, 2)
    y = torch.nn.functional.group_norm(y.flatten(0, 1).flatten(1), H).view(B, T, -1)
    assert close(mixer(x), mixer.out(y * silu(mixer.gate(x))))


def test_gated_linear_equals_the_parallel_form():
    """flash-linear-attention's naive simple GLA: weights times exp of the gates between, then RMSNorm and gate."""
    mixer, x = registry.build("gated_linear", D, n_heads=H), inputs()
    q, k, v = (heads(project(x)) for project in (mixer.q, mixer.k, mixer.v))
    gates = (sigmoid(mixer.forget(x)).log() / 16).transpose(1, 2).cumsum(-1)
    decay = (gates[..., :, None] - gates[..., None, :]).tril().exp().tril()
    y = ((q @ k.mT / (D // H) ** 0.5 * decay) @ v).transpose(1, 2)
    y = y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * mixer.norm.weight
    assert close(mixer(x), mixer.out(y.flatten(2) * silu(mixer.gate(x))))


@pytest.mark.parametrize("feature_map", ["elu", "relu", "softmax_pair", "identity"])
def test_linear_equals_the_sum_over_pairs(feature_map):
    mixer, x = registry.build("linear", D, n_heads=H, feature_map=feature_map), inputs()
    q, k, v = (heads(project(x)) for project in (mixer.q, mixer.k, mixer.v))
    phi = {
        "elu": lambda t: torch.nn.functional.elu(t) + 1,
        "relu": lambda t: t.clamp(min=0),
        "softmax_pair": lambda t: torch.cat([t.softmax(-1), (-t).softmax(-1)], -1),
        "identity": lambda t: t / (D // H) ** 0.25,
    }[feature_map]
    weights = (phi(q) @ phi(k).mT).tril()
    if feature_map != "identity":
        weights = weights / weights.sum(-1, keepdim=True)
    # A relu query may meet no key: nothing visible is 0.
    assert close(mixer(x), mixer.out((weights.nan_to_num() @ v).transpose(1, 2).flatten(2)))


def test_queries_far_below_zero_still_choose():
    """exp of all projections is 0 in fp32, but not what they are to each other."""
    mixer, x = registry.build("linear", D, n_heads=H, bias=True), inputs()
    with torch.no_grad():
        mixer.q.bias.fill_(-200)
    expected = mixer.double()(x.double())
    y = mixer.float()(x)
    assert y.abs().amax() > 0.01 and close(y, expected, 1e-4)


@pytest.mark.parametrize("name", ["retention", "gated_linear"])
def test_published_init_is_kept(name):
    """Xavier uniform, gain 2^-2.5; a model's init leaves it alone."""
    mixer = registry.build(name, D, n_heads=H)
    for project in (mixer.q, mixer.k, mixer.v, mixer.gate):
        assert "own_init" in marked(project, "weight")
        bound = 2**-2.5 * (6 / sum(project.weight.shape)) ** 0.5
        assert 0.9 * bound < project.weight.abs().amax() <= bound


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("linear", dict(feature_map="softmax_pairs"), r"'softmax_pairs' is not allowed \(did you mean 'softmax_pair'"),
        ("retention", dict(decay="slope"), r"'slope' is not allowed \(did you mean 'slopes'"),
        ("retention", dict(slope_scale=0.0), "slope_scale=0.0 must be above 0"),
        ("retention", dict(expand=0), "expand=0 must be above 0"),
        ("retention", dict(causal=False), "has no bidirectional form"),
        ("gated_linear", dict(causal=False), "has no bidirectional form"),
        ("gated_linear", dict(tau=-1.0), "tau=-1.0 must be above 0"),
    ],
    ids=str,
)
def test_bad_options_are_named(name, options, message):
    with pytest.raises(ValueError, match=message):
        registry.build(name, D, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.reorder(torch.tensor([0])), "is of batch 1; x is of batch 2"),
        (lambda state: state.to(dtype=torch.bfloat16), "kv must be of dtype torch.float32 or wider"),
        (lambda state: state.map(lambda t: t[:, :3]), r"kv must have shape \[2, 4, 8, 8\]; got \[2, 3, 8, 8\]"),
    ],
)
def test_a_state_that_does_not_fit_is_named(change, message):
    mixer, x = registry.build("gated_linear", D, n_heads=H), inputs()
    with pytest.raises(ValueError, match=message):
        mixer.extend(x, change(mixer.start(B, x)))
