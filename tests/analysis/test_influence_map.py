"""What is said to depend on what: against Jacobians, masks, and a mixer that forgets at a known rate."""

from __future__ import annotations

import math

import pytest
import torch
from torch.autograd.functional import jacobian

from analysis.influence_map import (
    MODEL,
    Effort,
    Row,
    ahead,
    beyond,
    by_distance,
    context,
    farthest,
    influence,
    mixer_map,
    mixer_maps,
    model_map,
    profile,
)
from arch.encoder_decoder import EncoderDecoder
from arch.language_model import LanguageModel
from mixers import registry
from mixers.base import Packing
from mixers.conformance.definitions import declared

# Past one chunk of every op.
TIME = 70
ALL = Effort(range(9), directions=99)
WINDOWS = {"window": {"window": 4}}
OWN_WEIGHTS = ("mha", "gqa", "mqa", "window", "additive")


def mixer(name, dtype=torch.float32, **options):
    """One mixer at the options of its conformance tests, and [T, D] for it to read."""
    torch.manual_seed(0)
    said = declared(registry.get(name))
    built = registry.build(name, said.d_model, **{**said.options, **options}).to(dtype).eval()
    return built, torch.randn(TIME, said.d_model, dtype=dtype)


def model(layout, kind=LanguageModel, **options):
    torch.manual_seed(0)
    return kind(layout, vocabulary=11, **{"d_model": 8, "mlp_width": 8, **options}).double().eval()


def tokens(time=9):
    return torch.arange(time) * 7 % 11


def distances(about, time):
    """How far token j is behind query i, [Q, T]."""
    return torch.tensor(list(about.queries))[:, None] - torch.arange(time)


@pytest.mark.parametrize("name", registry.names())
def test_what_comes_after_a_query_has_exactly_no_influence(name):
    built, x = mixer(name)
    found = mixer_map(name, built, x, None, Effort((0, 33, 63, 64, TIME - 1), directions=2))
    later = distances(found, TIME) < 0
    assert found.values[later].eq(0).all() and found.values.isfinite().all()
    assert ahead(found.values, found.queries) == 0 and (found.values.sum(1) > 0).all()


@pytest.mark.parametrize("name", registry.names())
def test_documents_have_exactly_no_influence_on_each_other(name):
    built, x = mixer(name)
    documents = torch.tensor([3] * 20 + [1] * (TIME - 20), dtype=torch.int32)
    found = mixer_map(name, built, x, documents, Effort((10, 19, 20, 64), directions=2))
    assert found.values[:2, 20:].eq(0).all() and found.values[2:, :20].eq(0).all()
    assert (found.values.sum(1) > 0).all()


@pytest.mark.parametrize(("layers", "reach"), [(1, 3), (2, 6)])
def test_window_layers_reach_as_far_as_their_windows_add_up_to(layers, reach):
    """Each W of 4 goes 3 further back than the query, and no further."""
    stack = model("window", n_layers=layers, mixers=WINDOWS)
    found = model_map(stack, Row(tokens()), ALL)
    back = distances(ALL, 9)
    assert found.values[(back < 0) | (back > reach)].eq(0).all()
    assert (found.values[(back >= 0) & (back <= reach)] > 0).all()
    assert farthest(found.values, ALL.queries) == reach
    for one in mixer_maps(stack, Row(tokens()), ALL):
        assert one.window == 4 and farthest(one.values, ALL.queries) == 3
        assert beyond(profile(one.values, one.queries), 4) == 0 < beyond(profile(one.values, one.queries), 3)


def test_full_attention_depends_on_all_of_the_past():
    found = model_map(model("mha"), Row(tokens()), ALL)
    assert torch.equal(found.values > 0, distances(ALL, 9) >= 0)


@pytest.mark.parametrize("layout", ["mha + mamba2", "gqa|linear", "2*(additive@a + mlp)"])
def test_influence_is_the_norm_of_the_jacobian(layout):
    stack, row = model(layout), tokens()
    x = stack.embed(row[None])[0]
    truth = jacobian(lambda x: stack.logits(stack.stack(x[None])[0]), x).square().sum((1, 3)).sqrt()
    found = model_map(stack, Row(row), ALL)
    assert found.name == MODEL
    torch.testing.assert_close(found.values, truth, rtol=1e-12, atol=1e-14)


def test_a_decoder_is_asked_beside_its_source():
    stack = model("mha + cross + mlp", EncoderDecoder, encoder={"layout": "mha"},
                  mixers={"cross": {"mixer": "mha", "cross": True}})
    source, x = torch.tensor([5, 1, 2]), stack.embed(tokens()[None])[0]
    memory = stack.encode(source[None])
    truth = jacobian(lambda x: stack.logits(stack.stack(x[None], memory=memory)[0]), x).square().sum((1, 3)).sqrt()
    row = Row(tokens(), source=source)
    torch.testing.assert_close(model_map(stack, row, ALL).values, truth, rtol=1e-12, atol=1e-14)
    # The layer that reads the source depends on nothing else.
    assert [one.name for one in mixer_maps(stack, row, ALL)] == ["0 mha"]


def test_few_directions_are_right_in_the_mean():
    """A map of 2 outputs along 1 direction: squares have a relative deviation of at most 0.71, of 400 means 0.035."""
    weight = torch.tensor([[3.0, 1.0], [0.0, 2.0]])
    found = [influence(lambda x: x @ weight, torch.ones(1, 2), Effort((0,), 1, seed)) for seed in range(400)]
    assert torch.stack(found).square().mean() == pytest.approx(14, rel=0.15)
    assert influence(lambda x: x @ weight, torch.ones(1, 2), Effort((0,), 2)).item() == pytest.approx(math.sqrt(14))


@pytest.mark.parametrize("layout", ["mha|mamba2 + mamba", "window|linear", "gqa@a + nsa + mlp", "mqa with based at 1"])
def test_each_layer_is_asked_at_what_it_reads_in_the_model(layout, monkeypatch):
    stack = model(layout, n_layers=3, convolution=3, mixers=WINDOWS | {"gqa": {"n_heads": 2}})
    documents = torch.tensor([1] * 4 + [2] * 5, dtype=torch.int32)
    found = mixer_maps(stack, Row(tokens(), documents), ALL)
    read = []
    for part in {part for block in stack.stack.blocks for name, part in block.parts().items() if name != "conv"}:

        def spied(x, past, documents, memory=None, part=part, mix=part.mix):
            read.append((part, x[0].detach()))
            return mix(x, past, documents, memory)

        monkeypatch.setattr(part, "mix", spied)
    stack(tokens()[None], Packing(documents[None]))
    monkeypatch.undo()
    names = [f"{i} {name}" for i, layer in enumerate(stack.stack.layers) for name in layer.mixers if name != "mlp"]
    assert [one.name for one in found] == names and len(read) == len(names)
    for one, (part, x) in zip(found, read, strict=True):
        torch.testing.assert_close(one.values, mixer_map("", part, x, documents, ALL).values, rtol=1e-9, atol=1e-12)


def test_retention_falls_at_its_rate():
    """Equal tokens, no turning: all that tells them apart is gamma = 1 - 2^-5 to the power of their distance."""
    built, x = mixer("retention", torch.float64, n_heads=1, decay="retention", position="none")
    found = mixer_map("", built, x[:1].expand(TIME, -1), None, Effort((TIME - 1,), 99)).values[0]
    # The query's own token acts through its query and its gate too.
    torch.testing.assert_close(found[1:-1] / found[:-2], torch.full((TIME - 2,), 1 / (1 - 2**-5)).double())


@pytest.mark.parametrize("name", OWN_WEIGHTS)
def test_attention_weights_are_those_that_sum_the_values(name):
    """With whatever shapes the scores; over two documents."""
    shaped = {} if name == "additive" else {"softcap": 2.0, "sinks": True, "position": "alibi", "qk_norm": True}
    built, x = mixer(name, torch.float64, **shaped)
    documents = torch.tensor([1] * 30 + [2] * (TIME - 30), dtype=torch.int32)[None]
    weights, v = built.self_weights(x[None], documents), built._keys(x[None])[1]
    v = v.repeat_interleave(weights.shape[2] // v.shape[2], 2)
    y = built.out(torch.einsum("bths,bshv->bthv", weights, v).flatten(2))
    torch.testing.assert_close(y, built.mix(x[None], None, documents)[0])


def test_attention_weights_are_the_softmax_of_the_scores():
    built, x = mixer("mha", position="none", n_heads=1)
    scores = (x @ built.q.weight.T) @ (x @ built.k.weight.T).T / math.sqrt(built.head_dim)
    truth = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf).softmax(-1)
    found = mixer_map("", built, x, None, Effort((0, 40), 1)).weights
    torch.testing.assert_close(found, truth[[0, 40]].double(), rtol=1e-5, atol=1e-7)


def test_mixers_without_weights_have_none():
    assert {name for name in registry.names() if hasattr(registry.get(name), "self_weights")} == set(OWN_WEIGHTS)


def test_both_sides_are_seen_where_a_stack_is_not_causal():
    found = model_map(model("mha", mixers={"mha": {"causal": False}}), Row(tokens()), ALL)
    assert (found.values > 0).all() and ahead(found.values, ALL.queries) > 0.5


def test_a_hand_made_map():
    """Query 2 takes 1/2 from itself, 1/4 from 1, 1/4 from 3; query 1 takes 1 from 0."""
    values = torch.tensor([[0.0, 2, 4, 2], [5, 0, 0, 0], [0, 0, 0, 0]], dtype=torch.float64)
    queries = (2, 1, 3)
    moved = by_distance(values, queries)
    assert moved[0].isnan().tolist() == [True, True, False, False, False, False, True]
    assert moved[0, 2:6].tolist() == [2, 4, 2, 0]
    # The query under no influence has no part in the mean.
    found = profile(values, queries)
    assert found.tolist() == [0.25, 0.75, 0, 0]
    assert (context(found), context(found, 0.25), context(found, 0.26)) == (2, 1, 2)
    assert (beyond(found, 1), beyond(found, 2)) == (0.75, 0)
    assert (ahead(values, queries), farthest(values, queries)) == (0.25, 1)
    none = torch.zeros(2, 4, dtype=torch.float64)
    assert profile(none, (0, 1)).isnan().all() and context(profile(none, (0, 1))) is None
    assert (ahead(none, (0, 1)), farthest(none, (0, 1))) == (0, None)


def test_a_diverged_model_is_said_to_be_one():
    with pytest.raises(ValueError, match="the gradients are not finite: the model has diverged"):
        influence(lambda x: x * math.inf, torch.zeros(2, 2), Effort((1,)))


def test_a_model_in_training_stays_so_and_is_asked_without_dropout():
    stack = model("mha", dropout=0.5).train()
    first, again = (model_map(stack, Row(tokens()), ALL).values for _ in range(2))
    assert stack.training and torch.equal(first, again)
