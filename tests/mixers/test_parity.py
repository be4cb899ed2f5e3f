"""Same weights, same outputs and gradients as `transformers`."""

from __future__ import annotations

import pytest
import torch

from mixers import registry

transformers = pytest.importorskip("transformers")
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaConfig, LlamaRotaryEmbedding  # noqa: E402
from transformers.models.mistral.modeling_mistral import MistralAttention, MistralConfig  # noqa: E402


def theirs(cls, config, x, mask):
    """The other library's attention with its own rotary table, on [B, T, D]."""
    torch.manual_seed(0)
    module = cls(config, layer_idx=0)
    table = LlamaRotaryEmbedding(config)(x, torch.arange(x.shape[1])[None])
    return module, module(x, position_embeddings=table, attention_mask=mask)[0]


def copy_weights(source, target):
    for ours, other in (("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj"), ("out", "o_proj")):
        getattr(target, ours).load_state_dict(getattr(source, other).state_dict())


@pytest.mark.parametrize("time", [1, 17, 63])
@pytest.mark.parametrize("bias", [False, True])
def test_gqa_with_rope_equals_llama(time, bias):
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=8,
        num_key_value_heads=2,
        attention_bias=bias,
        attn_implementation="eager",
        rope_theta=500_000.0,
    )
    check(
        LlamaAttention,
        config,
        time,
        None,
        registry.build("gqa", 64, n_heads=8, n_kv_heads=2, bias=bias, rope_base=500_000.0),
    )


def test_window_equals_mistral():
    config = MistralConfig(
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=5,
        attn_implementation="eager",
    )
    base = config.rope_parameters["rope_theta"]
    check(
        MistralAttention, config, 33, 5, registry.build("window", 64, n_heads=4, n_kv_heads=2, window=5, rope_base=base)
    )


def check(cls, config, time, window, ours):
    torch.manual_seed(time)
    i = torch.arange(time)
    seen = (i[:, None] >= i) & (i[:, None] - i < (window or time))
    mask = torch.zeros(1, 1, time, time).masked_fill(~seen, torch.finfo(torch.float32).min)
    x = torch.randn(2, time, 64, requires_grad=True)
    module, expected = theirs(cls, config, x, mask)
    copy_weights(module, ours)
    got = ours(x)
    assert relative(got, expected) < 1e-5
    weight = torch.randn_like(got)
    names = ["x", "q", "k", "v", "o"]
    grads = torch.autograd.grad((got * weight).sum(), (x, ours.q.weight, ours.k.weight, ours.v.weight, ours.out.weight))
    wanted = torch.autograd.grad(
        (expected * weight).sum(),
        (x, module.q_proj.weight, module.k_proj.weight, module.v_proj.weight, module.o_proj.weight),
    )
    if time == 1:  # one key: its weight is 1 whatever the query, so both gradients are rounding
        names, grads, wanted = ["x", "v", "o"], [grads[0], *grads[3:]], [wanted[0], *wanted[3:]]
    errors = {name: relative(a, b) for name, a, b in zip(names, grads, wanted, strict=True)}
    assert max(errors.values()) < 1e-5, errors


def relative(got, expected):
    return ((got - expected).abs().max() / expected.abs().max()).item()
