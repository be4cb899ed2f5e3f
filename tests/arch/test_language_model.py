"""The whole model: prefill and extend, options, sharing, errors."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.nn.functional import cross_entropy

from arch.language_model import LanguageModel
from arch.stack import sinusoids
from mixers.base import Memory, Packing

LAYOUTS = [
    "mha",
    "gqa|linear",
    "linear + window + mha",
    "window + mha + linear",
    "mha + linear + window",
    "mha@a + based + mha@a",
    "mqa + mlp with window at 1",
]
MIXERS = {"window": {"window": 4}, "mha": {"n_heads": 2}, "gqa": {"n_heads": 4}, "based": {"feature_dim": 4}}


def build(layout="mha + linear", **options):
    torch.manual_seed(0)
    return (
        LanguageModel(layout, vocabulary=17, d_model=16, **({"mixers": MIXERS, "init_std": 0.5} | options))
        .double()
        .eval()
    )


def differ(a, b):
    return not torch.allclose(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "options",
    [
        dict(convolution=4),
        dict(position="sinusoidal", parallel="mean"),
        dict(position="learned", max_length=12, logit_softcap=5.0),
    ],
    ids=lambda o: "-".join(o),
)
def test_prefill_and_extend_equal_forward(layout, options):
    """C31: every order of linear, window and full attention; ragged prompts with pads on the left."""
    model = build(layout, **options)
    tokens, lengths = torch.randint(0, 17, (3, 12)), [12, 5, 8]
    ids = torch.stack([(torch.arange(12) >= 12 - n).int() for n in lengths])
    packing = Packing(ids)
    whole = model(tokens, packing)
    with torch.no_grad():
        for cuts in ([0, 8, 12], [0, 9, 10, 11, 12]):
            logits, state = model.prefill(tokens[:, : cuts[1]], Packing(ids[:, : cuts[1]]))
            pieces = [logits]
            for a, b in pairwise(cuts[1:]):
                logits, state = model.extend(tokens[:, a:b], state)
                pieces.append(logits)
            assert torch.allclose(torch.cat(pieces, 1)[ids > 0], whole[ids > 0], atol=1e-12)
    for row, n in enumerate(lengths):
        assert torch.allclose(whole[row, 12 - n :], model(tokens[row : row + 1, 12 - n :])[0], atol=1e-12)


def test_any_token_id_may_stand_at_a_pad():
    model, ids = build(), torch.tensor([[1, 0, 1]], dtype=torch.int32)
    a, b = (model(torch.tensor([[3, pad, 5]]), Packing(ids)) for pad in (-100, 7))
    assert torch.equal(a[ids > 0], b[ids > 0])


@pytest.mark.parametrize(
    "options",
    [
        dict(mlp="gelu"),
        dict(mlp="geglu"),
        dict(mlp="none"),
        dict(mlp_width=40),
        dict(norm="layernorm"),
        dict(sandwich=True),
        dict(bias=True),
        dict(convolution=3),
        dict(position="learned"),
        dict(position="sinusoidal"),
        dict(tied=False),
        dict(logit_softcap=0.5),
        dict(init_std=0.1),
        dict(n_layers=4),
        dict(mixers={"mha": {"n_heads": 4}}),
    ],
    ids=lambda o: "-".join(o),
)
def test_every_option_has_an_effect(options):
    """C42."""
    tokens = torch.arange(12).view(1, 12)
    a, b = build(), build(**options)
    shapes = [[tuple(p.shape) for p in m.parameters()] for m in (a, b)]
    assert shapes[0] != shapes[1] or differ(a(tokens), b(tokens))


def test_parallel_ways_differ_and_dropout_is_for_training_only():
    tokens = torch.arange(12).view(1, 12)
    outputs = [build("mha|linear", parallel=way)(tokens) for way in ("sum", "mean", "normed_mean")]
    assert differ(outputs[0], outputs[1]) and differ(outputs[1], outputs[2])
    model = build(dropout=0.5)
    assert torch.equal(model(tokens), model(tokens))
    model.train()
    assert differ(model(tokens), model(tokens))


def test_max_length_limits_learned_positions_only():
    model = build(position="learned", max_length=8)
    model(torch.zeros(1, 8, dtype=torch.int64))
    with pytest.raises(ValueError, match="position=learned was built for max_length=8; got position 8"):
        model(torch.zeros(1, 9, dtype=torch.int64))
    two = torch.tensor([[1] * 8 + [2] * 8 + [0]], dtype=torch.int32)
    model(torch.zeros(1, 17, dtype=torch.int64), Packing(two))  # positions count per document
    _, state = model.prefill(torch.zeros(1, 8, dtype=torch.int64))
    with pytest.raises(ValueError, match="got position 8"):
        model.extend(torch.zeros(1, 1, dtype=torch.int64), state)


def test_sinusoids_by_hand():
    """Vaswani et al. 2017, section 3.5: PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i+1) = cos of the same."""
    expected = torch.tensor([3.0, 3 / 10_000**0.5]).double()
    got = sinusoids(torch.tensor([3]), 4, torch.float64)[0]
    assert torch.allclose(got, torch.stack([expected.sin(), expected.cos()], 1).flatten(), atol=1e-12)


def test_shared_blocks_are_one_set_of_weights_with_two_states():
    model = build("mha@a + linear + mha@a")
    assert model.stack.blocks[0] is model.stack.blocks[2]
    _, state = model.prefill(torch.randint(0, 17, (1, 5)))
    assert not torch.equal(state["0.mixer.k"], state["2.mixer.k"])
    separate = build("mha + linear + mha")
    block = sum(p.numel() for p in model.stack.blocks[0].parameters())
    assert sum(p.numel() for p in separate.parameters()) - sum(p.numel() for p in model.parameters()) == block


def test_an_alias_starts_from_the_options_of_its_mixer():
    model = build(
        "local + window", mixers={"window": {"window": 4, "n_heads": 2}, "local": {"mixer": "window", "window": 2}}
    )
    local, window = (block.mixing.mixers[0] for block in model.stack.blocks)
    assert (local.window, local.n_heads, window.window, window.n_heads) == (2, 2, 4, 2)
    assert dict(model.used) == {
        "local": {"mixer": "window", "window": 2, "n_heads": 2},
        "window": {"mixer": "window", "window": 4, "n_heads": 2},
    }


def test_mlp_layers_of_their_own_leave_the_others_without():
    model = build("mqa + mlp")
    assert model.stack.blocks[0].mlp is None and model.stack.blocks[1].mixing is None
    assert all(block.mlp is not None for block in build("mqa").stack.blocks)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_training_step_reaches_every_parameter_and_reloads_weights_only(layout, tmp_path):
    """C29, C43."""
    model = build(layout, convolution=4).train()
    tokens = torch.randint(0, 17, (2, 9))
    cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())
    torch.save(model.state_dict(), tmp_path / "model.pt")
    other = build(layout, convolution=4, init_std=0.1)
    other.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    assert torch.equal(other(tokens), model.eval()(tokens))


@pytest.mark.parametrize(
    ("layout", "options", "message"),
    [
        ("mha + linaer", {}, "linear"),
        (
            "mha",
            dict(mixers={"mha": {"n_head": 2}}),
            r"model.mixers.mha: mixer 'mha' has no option 'n_head' \(did you mean 'n_heads'",
        ),
        ("mha", dict(mixers={"gqa": {"n_kv_head": 2}}), "did you mean 'n_kv_heads'"),
        ("mha", dict(mixers={"mha": {"n_heads": 3}}), "n_heads=3 must divide d_model=16"),
        ("mha", dict(mixers={"local": {"window": 3}}), "model.mixers.local is no registered mixer"),
        ("mha", dict(mixers={"local": {"mixer": "windo"}}), "did you mean 'window'"),
        ("mha", dict(mixers={"mha": {"mixer": "gqa"}}), "cannot be an alias"),
        ("mha", dict(mixers={"mha": 3}), "must be a mapping"),
        ("mha", dict(mixers={"at": {"mixer": "mha"}}), "reserved"),
        ("mambo + mha", {}, "mamba"),
        ("mamba", dict(mixers={"mamba": {"causal": False}}), "mixers.mamba: mixer 'mamba' has no bidirectional form"),
        ("mha + mlp", dict(mlp="none"), "contradicts"),
        ("mha", dict(mlp_width=0), "mlp_width=0"),
        ("mha", dict(convolution=0), "convolution=0"),
        ("mha", dict(dropout=1.0), "dropout=1.0"),
        ("mha", dict(logit_softcap=0.0), "logit_softcap=0.0"),
        ("mha", dict(n_layers=0), "n_layers"),
        ("mha", dict(max_length=0, position="learned"), "max_length=0"),
    ],
)
def test_wrong_models_are_named(layout, options, message):
    with pytest.raises(ValueError, match=message):
        build(layout, **options)


def test_a_stack_without_cross_attention_refuses_a_memory():
    x = torch.randn(1, 3, 16).double()
    build("mha + cross", mixers={"cross": {"mixer": "mha", "cross": True}}).stack(x, None, Memory(x))
    with pytest.raises(ValueError, match="cannot cross-attend"):
        build("mha + linear").stack(x, None, Memory(x))


@pytest.mark.parametrize("layout", ["mha", "linear", "based + window"])
def test_an_empty_batch_is_an_empty_result(layout):
    assert build(layout)(torch.zeros(0, 5, dtype=torch.int64)).shape == (0, 5, 17)


def test_a_bidirectional_model_has_no_decode():
    model = build("mha", mixers={"mha": {"causal": False}})
    assert not model.causal
    with pytest.raises(ValueError, match="has no decode"):
        model.prefill(torch.zeros(1, 3, dtype=torch.int64))


def test_compiled_model_equals_eager():
    torch._dynamo.reset()
    model = build("mha + linear|window", convolution=4)
    tokens = torch.randint(0, 17, (2, 21))
    assert torch.allclose(torch.compile(model, fullgraph=True, backend="aot_eager")(tokens), model(tokens), atol=1e-10)
