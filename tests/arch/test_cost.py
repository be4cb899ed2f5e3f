"""Counted cost against brute force over the definition, hand formulas, live tensors and the allocator."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.profiler import profile

from arch.activations import kept
from arch.cost import FIGURES, measure
from arch.language_model import LanguageModel
from arch.parts import on_meta
from experiments import cli, config
from experiments.metrics import metric
from kernels.flops import FlopCounter
from mixers import registry
from mixers.base import Mixer, Packing

MIXERS = {
    "window": {"window": 5},
    "additive": {"attention_dim": 3},
    "gqa": {"n_heads": 4, "n_kv_heads": 2},
    "based": {"feature_dim": 3},
}
MIXERS["nsa"] = dict(
    n_heads=4, n_kv_heads=2, compress_block=4, compress_stride=2, select_block=4, n_selected=3, window=5
)
D, V = 16, 11


def build(layout, **options):
    return LanguageModel(layout, vocabulary=V, d_model=D, mixers=MIXERS, **options)


# Their layouts name indices of the published depth: the shortest stack that has room for them.
FIXED_DEPTH = ("hymba", "mamba2_hybrid", "nemotron_h", "zamba2")


def preset(stack):
    """A published stack at a small size; its window is shorter than the rows of these tests."""
    depth = f"model.n_layers={'null' if stack in FIXED_DEPTH else 8}"
    small = ["model.d_model=32", depth, "task.vocabulary=22", "task.kv=[1]", "task.test_kv=[1]"]
    heads = [f"model.mixers.{mixer}.n_heads=4" for mixer in ("mha", "gqa", "mqa", "window", "linear")]
    return config.plan(cli.composed("train", [f"stack={stack}", *small, *heads, "model.mixers.window.window=5"]))


def multiply_adds(model, length):
    """Every multiply-add of the definition, enumerated pair by pair and tap by tap."""
    count = 0
    for i in range(length):
        for block in model.stack.blocks:
            if block.mixing is not None:
                if block.mixing.convolution is not None:
                    count += sum(1 for tap in range(4) if i - tap >= 0) * D
                for mixer in block.mixing.mixers:
                    if hasattr(mixer, "A_log"):
                        count += state_space(mixer, i)
                        continue
                    if hasattr(mixer, "select_block"):
                        count += sum(p.in_features * p.out_features for p in (mixer.q, mixer.k, mixer.v, mixer.out))
                        count += sparse_multiply_adds(mixer, i)
                        continue
                    count += sum(m.in_features * m.out_features for m in mixer.modules() if isinstance(m, nn.Linear))
                    if hasattr(mixer, "feature_dim"):
                        # S += k v^T, q S, and the normaliser as one more value.
                        count += 2 * mixer.n_heads * mixer.feature_dim * (mixer.value_dim + mixer.normalise)
                    else:
                        seen = sum(
                            1
                            for j in range(length)
                            if (j <= i or not mixer.causal) and (mixer.window is None or abs(i - j) < mixer.window)
                        )
                        # A multiply-add a channel; additive attention: half of one for its add, half for its tanh.
                        inner = 2 * mixer.attention_dim if hasattr(mixer, "attention_dim") else mixer.head_dim
                        count += mixer.n_heads * seen * (inner + mixer.head_dim)
            if block.mlp is not None:
                count += sum(
                    m.in_features * m.out_features for m in block.mlp.mlp.modules() if isinstance(m, nn.Linear)
                )
        count += model.head.in_features * model.head.out_features
    return count


def state_space(mixer, i):
    """Token i of Mamba or Mamba-2: projections, taps inside of the row, h += dt x b^T, h c."""
    count = sum(p.in_features * p.out_features for p in mixer.modules() if isinstance(p, nn.Linear))
    count += sum(1 for tap in range(mixer.conv1d.kernel_size[0]) if i - tap >= 0) * mixer.conv1d.in_channels
    heads = mixer.D.numel()
    return count + heads * 2 * getattr(mixer, "head_dim", 1) * mixer.d_state


def sparse_multiply_adds(mixer, i):
    """Of NSA's token i, projections aside: its gates, the block that ends with it, and what it sees, one by one."""
    block, stride, select = mixer.compress_block, mixer.compress_stride, mixer.select_block
    ends = [c * stride + block - 1 for c in range(i + 1)]
    own = i // select
    chosen = {own, *range(min(own, mixer.n_selected - 1))}
    seen = sum(end <= i for end in ends)
    seen += sum(j // select in chosen for j in range(i + 1))
    seen += sum(i - j < mixer.window for j in range(i + 1))
    phi = sum(
        m.in_features * m.out_features
        for part in (mixer.compress_k, mixer.compress_v)
        for m in part.modules()
        if isinstance(m, nn.Linear)
    )
    gates = mixer.gate.in_features * mixer.gate.out_features
    return gates + (i in ends) * mixer.n_kv_heads * phi + mixer.n_heads * seen * 2 * mixer.head_dim


def floats(state):
    """Bytes of the live tensors that remember tokens."""
    return sum(t.numel() * t.element_size() for t in state.tensors.values() if t.is_floating_point())


@pytest.mark.parametrize(
    "layout",
    [
        *("mha", "gqa", "mqa", "window", "linear", "based", "retention", "gated_linear"),
        *("mamba + mamba2", "additive", "nsa"),
        *("mha + linear|window", "gqa@a + mlp + gqa@a"),
    ],
)
@pytest.mark.parametrize("length", [1, 4, 17])
@pytest.mark.parametrize("options", [{}, dict(convolution=4, mlp="gelu")], ids=["plain", "convolution"])
def test_flops_equal_brute_force(layout, length, options):
    """C20, and C04 for the whole model: every mixer counts, masked pairs do not."""
    model = build(layout, **options)
    cost = measure(model, length)
    assert cost.flops_per_token_forward * length == 2 * multiply_adds(model, length)
    assert cost.flops_per_token_train == 3 * cost.flops_per_token_forward
    assert cost.prefill_flops == 2 * multiply_adds(model, length)
    # One more token: the difference between two whole sequences, as every mixer here is causal with exact extension.
    assert cost.decode_flops_per_token == 2 * (multiply_adds(model, length + 1) - multiply_adds(model, length))


@pytest.mark.parametrize("stack", config.choices("stack"))
def test_flops_and_state_of_every_preset(stack):
    """Counted / brute-force FLOPs = 1.000, counted / live state bytes = 1.000."""
    plan = preset(stack)
    model, length = plan.model(), 17
    cost = measure(plan.skeleton, length)
    assert cost.flops_per_token_forward * length == 2 * multiply_adds(model, length)
    if not model.causal:
        assert cost.state_bytes is None and cost.decode_flops_per_token is None
        return
    assert cost.decode_flops_per_token == 2 * (multiply_adds(model, length + 1) - multiply_adds(model, length))
    for narrow in (False, True):
        with torch.no_grad():
            _, state = (model.bfloat16() if narrow else model).prefill(torch.zeros(1, length, dtype=torch.int64))
        assert (cost.bf16_state_bytes if narrow else cost.state_bytes) == floats(state) > 0


@pytest.mark.parametrize("name", ["mha", "window", "linear", "based", "additive"])
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


@pytest.mark.parametrize(
    "layout",
    [
        *("mha", "window", "linear|based", "retention|gated_linear", "mha@a + window + mha@a"),
        *("mamba|mamba2", "nsa|additive"),
    ],
)
@pytest.mark.parametrize("length", [1, 4, 17])
def test_state_bytes_equal_live_tensors(layout, length):
    model = build(layout, convolution=4)
    with torch.no_grad():
        _, state = model.prefill(torch.randint(0, V, (1, length)))
    assert measure(model, length).state_bytes == floats(state)


def test_recurrent_states_stay_wide():
    """In bfloat16 a cache halves, k and v of D; S [D, D + 1] of linear attention stays float32."""
    assert measure(build("mha"), 9).bf16_state_bytes == 2 * 2 * 9 * D * 2
    assert measure(build("linear"), 9).bf16_state_bytes == 2 * D * (D + 1) * 4


def test_bookkeeping_bytes_equal_live_tensors():
    """Ids and positions of a packed prompt, apart from its state; an unpacked one has none."""
    model, tokens = build("window + mha|linear", convolution=4), torch.zeros(1, 9, dtype=torch.int64)
    with torch.no_grad():
        _, plain = model.prefill(tokens)
        _, packed = model.prefill(tokens, Packing(torch.ones(1, 9, dtype=torch.int32)))
    assert plain.bookkeeping_bytes == 0 and measure(model, 9).bookkeeping_bytes == packed.bookkeeping_bytes > 0
    assert measure(model, 9).state_bytes == floats(plain) == floats(packed)


def test_parameters_by_hand():
    cost = measure(build("gqa@a + gqa@a", mlp_width=24), 4)
    block = 16 * 16 * 2 + 2 * 16 * 8 + 3 * 16 * 24 + 2 * 16  # q and out, k and v of two groups, MLP, two norms
    assert cost.parameters == block + 16 + V * D and cost.parameters_without_embeddings == block + 16
    untied = measure(build("gqa@a + gqa@a", mlp_width=24, tied=False, position="learned", max_length=32), 4)
    assert untied.parameters == block + 16 + 2 * V * D + 32 * D and untied.parameters_without_embeddings == block + 16


def test_active_parameters_by_hand():
    """A table that is only looked up counts one row; one that the head reads too counts whole."""
    tied = measure(build("gqa"), 4)
    assert tied.parameters_active == tied.parameters
    untied = measure(build("gqa", tied=False, position="learned", max_length=32), 4)
    assert untied.parameters - untied.parameters_active == (V - 1) * D + 31 * D


def activations(layout, length, **options):
    """A model in training and its forward pass with the loss, on live tensors."""
    model = build(layout, **options)
    tokens = torch.zeros(1, length, dtype=torch.int64)
    targets = torch.zeros(1, length, dtype=torch.int64)
    return model, lambda: cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


TRAINED = [
    ("mha", {}),
    ("window + linear|based", dict(convolution=4, sandwich=True, tied=False)),
    ("gqa@a + mlp + gqa@a", dict(position="learned", dropout=0.1, mlp="gelu", norm="layernorm", bias=True)),
    ("linear", dict(position="sinusoidal", logit_softcap=5.0)),
    ("mamba + mamba2", {}),
    ("additive", {}),
]


@pytest.mark.parametrize(("layout", "options"), TRAINED)
@pytest.mark.parametrize("length", [1, 17, 130])
def test_activation_bytes_equal_what_autograd_saves(layout, options, length):
    model, forward = activations(layout, length, **options)
    assert measure(model, length).activation_bytes == kept(model, forward)


# Python numbers in products: based scales and divides queries and keys, the softcap logits.
NUMBERS = [(*case, numbers) for case, numbers in zip(TRAINED, (0, 4, 0, 2, 0, 0), strict=True)]


@pytest.mark.parametrize(("layout", "options", "numbers"), NUMBERS)
def test_activation_bytes_equal_what_the_allocator_holds(layout, options, numbers):
    """Allocated and not freed after the forward: the activations, the loss, and 8 bytes a Python number, which autograd
    shows to nobody; less the ids that were there before."""
    model, forward = activations(layout, 130, **options)
    forward()
    with profile(profile_memory=True) as recorded:
        loss = forward()
    held = sum(event.self_cpu_memory_usage for event in recorded.events())
    assert measure(model, 130).activation_bytes == held - loss.nbytes - 8 * numbers + 2 * 130 * 8


def test_activations_by_hand():
    """One head without positions: a norm keeps x, its scale and x scaled, the projections their input, attention q, k,
    v, its output and log-sum-exp; the MLP both sides of its activation."""
    model = LanguageModel(
        "mha", vocabulary=V, d_model=D, mlp="gelu", mlp_width=24, mixers={"mha": {"n_heads": 1, "position": "none"}}
    )
    embedding, first, second, head = measure(model, 8).activations
    norm, attention, mlp = 2 * D + 1, 5 * D + 1, D + 2 * 24
    assert first == second == 4 * 8 * (2 * norm + attention + mlp)
    # Ids; the norm before the head, its input, and the log-probabilities; the sum of the loss's weights is a scalar.
    assert embedding == 8 * 8 and head == 4 * 8 * (norm + D + V) + 8 * 8 + 4


def test_attention_bytes_by_hand():
    """q and y of 4 heads, k and v of 2, 4 wide, 9 tokens of 4 bytes, two layers; a 9 x 9 matrix a head."""
    cost = measure(build("gqa"), 9)
    assert cost.attention_bytes == 2 * (2 * 4 + 2 * 2) * 4 * 9 * 4
    assert cost.score_bytes == 2 * 4 * 9 * 9 * 4
    assert (measure(build("linear"), 9).attention_bytes, measure(build("linear"), 9).score_bytes) == (0, 0)


def test_reads_of_a_token_by_hand():
    """Behind 99 tokens: all 100, the last 5, or of NSA 49 compressed, 3 blocks of 4, the last 5."""
    query, entry = 2 * 4 * 4 * 4, 2 * 2 * 4 * 4  # q and y of 4 heads, a key and a value of 2, 4 wide, in 4 bytes
    assert measure(build("gqa"), 99).decode_attention_bytes == 2 * (query + 100 * entry)
    narrow = build("window")
    assert measure(narrow, 99).decode_attention_bytes == 2 * (2 * 16 * 4 + 5 * 2 * 16 * 4)
    assert measure(build("nsa"), 99).decode_attention_bytes == 2 * (3 * query + (49 + 12 + 5) * entry)
    assert measure(build("linear"), 99).decode_attention_bytes == 0


def test_metrics_have_the_contracts_names():
    found = measure(build("mha"), 64).metrics()
    assert set(found) == {
        f"complexity/{name}"
        for name in (
            "parameters",
            "parameters_active",
            "parameters_without_embeddings",
            "flops_per_token_forward",
            "flops_per_token_train",
            "prefill_flops_at_64",
            "decode_flops_per_token_at_64",
            "decode_attention_bytes_at_64",
            "state_bytes_at_64",
            "bf16_state_bytes_at_64",
            "attention_bytes_at_64",
            "score_bytes_at_64",
        )
    }
    assert all(metric(f"complexity/{name.replace('<length>', '64')}") for name in FIGURES)


def test_figures_do_not_depend_on_the_order_of_asking():
    for name in ("decode_flops_per_token_at_8", "bf16_state_bytes_at_8", "prefill_flops_at_8"):
        alone, last = measure(build("mha + linear"), 8), measure(build("mha + linear"), 8)
        last.metrics()
        assert alone.figure(name) == last.figure(name)


def test_an_unknown_figure_is_named():
    with pytest.raises(ValueError, match=r"'parameter' is unknown \(did you mean 'parameters'\?\); known are"):
        measure(build("mha"), 8).figure("parameter")


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
    """Layers counted one by one, equal ones once, against the whole model in one pass."""
    model, tokens = build(layout, **options), torch.empty(1, length, dtype=torch.int64, device="meta")
    cost, ghost = measure(model, length), on_meta(model).eval()
    with torch.no_grad(), FlopCounter() as forward:
        ghost(tokens)
    with torch.no_grad(), FlopCounter() as prompt:
        _, state = ghost.prefill(tokens)
    size = state.bytes
    with torch.no_grad(), FlopCounter() as step:
        ghost.extend(tokens[:, :1], state)
    assert [part.name for part in cost.parts] == ["embedding", *map(str, model.stack.layers), "head"]
    assert sum(part.parameters for part in cost.parts) == sum(p.numel() for p in model.parameters())
    assert cost.flops_per_token_forward == forward.total / length
    assert (cost.attention_bytes, cost.score_bytes) == (forward.attention_bytes, forward.score_bytes)
    assert (cost.prefill_flops, cost.decode_flops_per_token, cost.state_bytes) == (prompt.total, step.total, size)


def test_a_part_that_shares_weights_adds_none():
    first, again, other = (part.parameters for part in measure(build("gqa@a + gqa@a + gqa"), 4).parts[1:-1])
    assert first == other > 0 and again == 0
    assert measure(build("gqa"), 4).parts[-1].parameters == D  # the norm: the head is the embedding
    assert measure(build("gqa", tied=False), 4).parts[-1].parameters == D + V * D


def test_parts_of_a_bidirectional_model_have_no_state():
    model = LanguageModel("mha + mha", vocabulary=V, d_model=D, mixers={"mha": {"causal": False}})
    parts = measure(model, 9).parts
    assert {part.state_bytes for part in parts} == {part.decode_flops_per_token for part in parts} == {None}
    assert all(part.flops_per_token_forward > 0 for part in parts[1:])


def test_a_mixer_that_looks_at_values_has_no_activation_bytes(monkeypatch):
    class Looks(registry.get("mha")):
        def __init__(self, d_model: int):
            super().__init__(d_model, n_heads=1)

        def mix(self, x, past, documents, memory=None):
            if not x.is_meta and float(x.detach().sum()) > 1e9:
                raise ValueError("too large")
            return super().mix(x, past, documents, memory)

    monkeypatch.setitem(registry._classes, "looks", Looks)
    cost = measure(LanguageModel("mha + looks", vocabulary=32, d_model=8, mlp="none"), 8)
    embedding, first, second, head = cost.activations
    assert None not in (embedding, first, head) and second is None
    assert cost.activation_bytes is None and cost.flops_per_token_forward > 0
