"""Parameters of published models, built on meta from their configurations: ours, those of `transformers`, and the
published count where it is printed somewhere (None: it is not).

Each row is the public `config.json` of the model, in the words of `transformers` and in ours.
"""

from __future__ import annotations

import pytest
import torch

from arch.cost import measure, parameters
from arch.language_model import LanguageModel

transformers = pytest.importorskip("transformers")


def decoder(d_model, layers, width, heads, kv_heads, **options):
    """The sizes that most configurations have, in the words of `transformers`."""
    sizes = dict(hidden_size=d_model, num_hidden_layers=layers, intermediate_size=width)
    return sizes | dict(num_attention_heads=heads, num_key_value_heads=kv_heads) | options


def ours(layout, vocabulary, d_model, layers, width, mixers, **options):
    return dict(layout=layout, vocabulary=vocabulary, d_model=d_model, n_layers=layers, mlp_width=width, mixers=mixers,
                tied=False) | options  # fmt: skip


GPT2 = dict(mlp="gelu", norm="layernorm", bias=True, position="learned", tied=True)
PUBLISHED = {
    "Llama-3.1-8B": (
        "Llama", decoder(4096, 32, 14_336, 32, 8, vocab_size=128_256, tie_word_embeddings=False),
        ours("gqa", 128_256, 4096, 32, 14_336, {"gqa": {"n_heads": 32, "n_kv_heads": 8}}), 8_030_261_248,
    ),
    "Mistral-7B-v0.1": (
        "Mistral", decoder(4096, 32, 14_336, 32, 8, vocab_size=32_000, tie_word_embeddings=False),
        ours("window", 32_000, 4096, 32, 14_336, {"window": {"window": 4096, "n_heads": 32, "n_kv_heads": 8}}),
        7_241_732_096,
    ),
    "Qwen3-8B": (
        "Qwen3",
        decoder(4096, 36, 12_288, 32, 8, head_dim=128, vocab_size=151_936, tie_word_embeddings=False),
        ours("gqa", 151_936, 4096, 36, 12_288, {"gqa": {"n_heads": 32, "n_kv_heads": 8, "qk_norm": True}}),
        8_190_735_360,
    ),
    "gemma-2-2b": (
        "Gemma2", decoder(2304, 26, 9216, 8, 4, head_dim=256, vocab_size=256_000),
        ours("window + gqa", 256_000, 2304, 26, 9216,
             {name: {"n_heads": 8, "n_kv_heads": 4, "head_dim": 256} for name in ("window", "gqa")},
             mlp="geglu", sandwich=True, tied=True), 2_614_341_888,
    ),
    "SmolLM3-3B": (
        "SmolLM3", decoder(2048, 36, 11_008, 16, 4, vocab_size=128_256, tie_word_embeddings=True, pad_token_id=0),
        ours("3*gqa + nope", 128_256, 2048, 36, 11_008,
             {"gqa": {"n_heads": 16, "n_kv_heads": 4}, "nope": {"mixer": "gqa", "position": "none"}}, tied=True),
        3_075_098_624,
    ),
    # Without its fixed multipliers, which are no parameters.
    "Falcon-H1-7B": (
        "FalconH1",
        decoder(3072, 44, 12_288, 12, 2, head_dim=128, vocab_size=130_049, mamba_d_ssm=3072, mamba_n_heads=24,
                mamba_d_state=256, mamba_n_groups=1, mamba_expand=2),
        ours("gqa|mamba2", 130_049, 3072, 44, 12_288,
             {"gqa": {"n_heads": 12, "n_kv_heads": 2, "head_dim": 128},
              "mamba2": {"n_heads": 24, "head_dim": 128, "d_state": 256, "norm": "none"}}), None,
    ),
    "Nemotron-H-8B": (
        "NemotronH",
        dict(vocab_size=131_072, hidden_size=4096, intermediate_size=21_504, num_attention_heads=32, head_dim=128,
             num_key_value_heads=8, mamba_num_heads=128, mamba_head_dim=64, n_groups=8, ssm_state_size=128,
             hybrid_override_pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"),
        ours("mamba2 + mlp with gqa at 7 18 29 40", 131_072, 4096, 52, 21_504,
             {"gqa": {"n_heads": 32, "n_kv_heads": 8, "position": "none"},
              "mamba2": {"n_heads": 128, "head_dim": 64, "n_groups": 8, "d_state": 128}}, mlp="relu2"), None,
    ),
    "Jamba, all MLPs dense": (
        "Jamba", decoder(4096, 32, 14_336, 32, 8, vocab_size=65_536, num_experts=1),
        ours("4*mamba + gqa + 3*mamba", 65_536, 4096, 32, 14_336,
             {"gqa": {"n_heads": 32, "n_kv_heads": 8, "position": "none"}, "mamba": {"inner_norm": True}}), None,
    ),
    "mamba-130m": (
        "Mamba", dict(vocab_size=50_280, hidden_size=768, num_hidden_layers=24, state_size=16),
        ours("mamba", 50_280, 768, 24, None, {}, mlp="none", tied=True), 129_135_360,
    ),
    "gpt2": (
        "GPT2", dict(vocab_size=50_257, n_positions=1024, n_embd=768, n_layer=12, n_head=12),
        ours("mha", 50_257, 768, 12, 3072, {"mha": {"n_heads": 12, "bias": True, "position": "none"}}, **GPT2,
             max_length=1024), 124_439_808,
    ),
    "starcoder": (
        "GPTBigCode", dict(vocab_size=49_152, n_positions=8192, n_embd=6144, n_layer=40, n_head=48, n_inner=24_576),
        ours("mqa", 49_152, 6144, 40, 24_576, {"mqa": {"n_heads": 48, "bias": True, "position": "none"}}, **GPT2,
             max_length=8192), 15_517_456_384,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_equal_transformers_and_the_published_count(name):
    family, theirs, options, published = PUBLISHED[name]
    with torch.device("meta"):
        their_config = getattr(transformers, f"{family}Config")(**theirs)
        reference = transformers.AutoModelForCausalLM.from_config(their_config)
        model = LanguageModel(**options)
    assert measure(model, 1).parameters == parameters(reference)
    assert published is None or published == parameters(reference)


def test_caches_of_long_contexts_by_hand():
    """Llama 3.1 8B at a million tokens: k and v of 8 heads of 128 in 32 layers."""
    with torch.device("meta"):
        model = LanguageModel(**PUBLISHED["Llama-3.1-8B"][2])
    cost = measure(model, 1_000_000)
    assert cost.state_bytes == 2 * 32 * 8 * 128 * 1_000_000 * 4 == 2 * cost.bf16_state_bytes
