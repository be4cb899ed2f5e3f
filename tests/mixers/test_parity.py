"""Same weights, same outputs and gradients as `transformers`."""

from __future__ import annotations

import pytest
import torch

from mixers import registry
from mixers.rope import Rope

transformers = pytest.importorskip("transformers")
from transformers.models.bert.modeling_bert import BertConfig, BertSelfAttention  # noqa: E402
from transformers.models.bloom.modeling_bloom import BloomAttention, BloomConfig, build_alibi_tensor  # noqa: E402
from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention, Gemma2Config  # noqa: E402
from transformers.models.gpt_oss.modeling_gpt_oss import (  # noqa: E402
    GptOssAttention,
    GptOssConfig,
    GptOssRotaryEmbedding,
)
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb, create_sinusoidal_positions  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaConfig, LlamaRotaryEmbedding  # noqa: E402
from transformers.models.mistral.modeling_mistral import MistralAttention, MistralConfig  # noqa: E402
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3Config  # noqa: E402

SIZES = dict(hidden_size=64, num_attention_heads=8, num_key_value_heads=2, attn_implementation="eager")
OURS = dict(n_heads=8, n_kv_heads=2)
PROJECTIONS = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "out": "o_proj"}
TRAINED = 32  # tokens; the scalings below are for lengths past that

SCALINGS = {
    "linear": dict(factor=4.0),
    "dynamic": dict(factor=4.0, original_max_position_embeddings=TRAINED),
    "yarn": dict(factor=4.0, original_max_position_embeddings=TRAINED),
    "yarn with all options": dict(
        factor=4.0,
        original_max_position_embeddings=TRAINED,
        beta_fast=4.0,
        beta_slow=0.5,
        attention_factor=1.3,
        truncate=False,
    ),
    "longrope": dict(
        short_factor=[1.0, 1.1, 1.3, 1.7],
        long_factor=[1.0, 2.0, 3.5, 4.0],
        factor=4.0,
        original_max_position_embeddings=TRAINED,
    ),
    "llama3": dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=TRAINED),
}


def additive(time, window=None, causal=True):
    i = torch.arange(time)
    distance = i[:, None] - i
    seen = (distance >= 0 if causal else torch.ones(time, time, dtype=torch.bool)) & (distance < (window or time))
    return torch.zeros(1, 1, time, time).masked_fill(~seen, torch.finfo(torch.float32).min)


def check(theirs, ours, time, table=None, mask=None, names=PROJECTIONS):
    """Outputs, and gradients to the input and every parameter; `names`: our parts as theirs calls them, None: none."""
    torch.manual_seed(time)
    pairs = []
    for name, mine in ours.named_parameters():
        module, _, rest = name.partition(".")
        if names.get(module, module) is not None:
            pairs.append((name, mine, theirs.get_parameter(f"{names.get(module, module)}.{rest}".rstrip("."))))
    with torch.no_grad():
        for _, mine, other in pairs:
            mine.copy_(torch.randn_like(other) / (8 if other.dim() > 1 else 1))
            other.copy_(mine)
    x = torch.randn(2, time, 64, requires_grad=True)
    tables = {} if table is None else {"position_embeddings": table(x, torch.arange(time)[None])}
    expected = theirs(x, attention_mask=additive(time) if mask is None else mask, **tables)[0]
    got = ours(x)
    assert relative(got, expected) < 1e-5
    # One key has the weight 1, and a bias adds the same to the scores of all keys that do not turn: these gradients are
    # 0 but for rounding.
    zero = [name for name, *_ in pairs if (time == 1 and name[0] in "qk") or (ours.rope is None and name == "k.bias")]
    pairs = [pair for pair in pairs if pair[0] not in zero]
    weight = torch.randn_like(got)
    grads = torch.autograd.grad((got * weight).sum(), (x, *(mine for _, mine, _ in pairs)))
    wanted = torch.autograd.grad((expected * weight).sum(), (x, *(other for *_, other in pairs)))
    errors = {n: relative(a, b) for n, a, b in zip(["x", *(n for n, *_ in pairs)], grads, wanted, strict=True)}
    assert max(errors.values()) < 1e-5, errors


def relative(got, expected):
    return ((got - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("time", [1, 17, 63])
@pytest.mark.parametrize("bias", [False, True])
def test_gqa_with_rope_equals_llama(time, bias):
    config = LlamaConfig(**SIZES, attention_bias=bias, rope_theta=500_000.0)
    ours = registry.build("gqa", 64, **OURS, bias=bias, rope_base=500_000.0)
    check(LlamaAttention(config, 0), ours, time, LlamaRotaryEmbedding(config))


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("time", [TRAINED, 2 * TRAINED + 1])
def test_length_scalings_equal_llama_with_its_own_table(name, time):
    kind, options = name.split()[0], SCALINGS[name]
    theirs = {"rope_type": kind, "rope_theta": 10_000.0, **options}
    config = LlamaConfig(**SIZES, rope_parameters=theirs, max_position_embeddings=TRAINED)
    ours = registry.build("gqa", 64, **OURS, rope_scaling={"rope_type": kind, **options})
    check(LlamaAttention(config, 0), ours, time, LlamaRotaryEmbedding(config))


def test_window_equals_mistral():
    config = MistralConfig(**SIZES, head_dim=16, sliding_window=5)
    base = config.rope_parameters["rope_theta"]
    ours = registry.build("window", 64, **OURS, head_dim=16, window=5, rope_base=base)
    check(MistralAttention(config, 0), ours, 33, LlamaRotaryEmbedding(config), additive(33, 5))


def test_qk_norm_equals_qwen3():
    config = Qwen3Config(**SIZES, head_dim=16, rms_norm_eps=1e-6)
    base = config.rope_parameters["rope_theta"]
    ours = registry.build("gqa", 64, **OURS, head_dim=16, qk_norm=True, rope_base=base)
    check(Qwen3Attention(config, 0), ours, 33, LlamaRotaryEmbedding(config))


def test_softcap_and_scale_equal_gemma2():
    config = Gemma2Config(**SIZES, head_dim=16, query_pre_attn_scalar=24, attn_logit_softcapping=2.0)
    ours = registry.build("gqa", 64, **OURS, head_dim=16, softcap=2.0, scale=24**-0.5)
    check(Gemma2Attention(config, 0), ours, 33, LlamaRotaryEmbedding(config))


def test_sinks_equal_gpt_oss():
    yarn = dict(factor=4.0, original_max_position_embeddings=TRAINED, beta_fast=32.0, beta_slow=1.0, truncate=False)
    parameters = {"rope_type": "yarn", "rope_theta": 10_000.0, **yarn}
    config = GptOssConfig(**SIZES, head_dim=16, attention_bias=True, rope_parameters=parameters)
    scaling = {"rope_type": "yarn", **yarn}
    ours = registry.build("gqa", 64, **OURS, head_dim=16, bias=True, sinks=True, rope_scaling=scaling)
    check(GptOssAttention(config, 0), ours, 65, GptOssRotaryEmbedding(config))


@pytest.mark.parametrize("name", ["mha", "window"])
def test_bidirectional_with_bias_equals_bert(name):
    """BERT's module ends before the output projection: ours is the identity."""
    config = BertConfig(hidden_size=64, num_attention_heads=4, attn_implementation="eager")
    window = {"window": 33} if name == "window" else {}
    ours = registry.build(name, 64, n_heads=4, bias=True, position="none", causal=False, **window)
    torch.nn.init.eye_(ours.out.weight)
    torch.nn.init.zeros_(ours.out.bias)
    names = {"q": "query", "k": "key", "v": "value", "out": None}
    check(BertSelfAttention(config).eval(), ours, 33, mask=additive(33, causal=False), names=names)


@pytest.mark.parametrize("heads", [4, 12])
def test_alibi_equals_bloom(heads):
    """12 heads: no power of two."""
    config = BloomConfig(hidden_size=8 * heads, n_head=heads, hidden_dropout=0.0)
    theirs = BloomAttention(config, 0).eval()
    ours = registry.build("mha", 8 * heads, n_heads=heads, position="alibi", bias=True)
    # Theirs has one matrix for all three, by head.
    for i, mine in enumerate((ours.q, ours.k, ours.v)):
        for name in ("weight", "bias"):
            whole = getattr(theirs.query_key_value, name).detach()
            getattr(mine, name).data = whole.view(heads, 3, 8, -1)[:, i].reshape(getattr(mine, name).shape)
    ours.out.load_state_dict(theirs.dense.state_dict())
    x = torch.randn(2, 33, 8 * heads)
    alibi = build_alibi_tensor(torch.ones(2, 33, dtype=torch.int64), heads, torch.float32)
    expected = theirs(x, torch.zeros_like(x), alibi=alibi, attention_mask=additive(33))[0]
    assert relative(ours(x), expected) < 1e-5


def test_interleaved_layout_equals_gptj():
    x = torch.randn(2, 33, 4, 16)
    sin, cos = create_sinusoidal_positions(33, 8).expand(2, -1, -1).chunk(2, -1)
    turned = apply_rotary_pos_emb(x[..., :8], sin, cos)
    rope = Rope(16, 10_000.0, 0.5, "interleaved", None)
    got = rope.turn(x, rope.angles(torch.arange(33)[None]))
    assert relative(got, torch.cat([turned, x[..., 8:]], -1)) < 1e-5
