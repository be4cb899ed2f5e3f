"""Encoder-decoders against a definition from scratch, extraction of documents, full forwards and brute-force cost."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from arch.activations import kept
from arch.cost import measure
from arch.encoder_decoder import EncoderDecoder
from mixers.base import Memory, Packing

V, D = 13, 16
MIXERS = {
    "mha": {"n_heads": 2},
    "gqa": {"n_heads": 4, "n_kv_heads": 2},
    "additive": {"n_heads": 2, "attention_dim": 3},
    "mamba2": {"d_state": 4, "head_dim": 8},
    **{f"cross_{mixer}": {"mixer": mixer, "cross": True} for mixer in ("mha", "gqa", "additive")},
}
# Decoder, encoder.
STACKS = {
    "vaswani": ("mha + cross_mha + mlp", "mha"),
    "grouped": ("2*(gqa + cross_gqa)", "gqa"),
    "bahdanau": ("mamba2 + cross_additive + mlp", "linear"),
    "hybrid": ("linear|cross_mha + window", "mha + window"),
    "recurrent encoder": ("mha + cross_mha", "mamba2"),
}
SOURCES = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7, 9]]
PROMPTS = [[11], [11, 2, 3], [11, 4]]
every_stack = pytest.mark.parametrize("stack", STACKS)


def build(stack="vaswani", **options):
    torch.manual_seed(0)
    layout, encoder = STACKS.get(stack, (stack, "mha"))
    options = {"mixers": MIXERS, "init_std": 0.4, "encoder": {"layout": encoder}} | options
    return EncoderDecoder(layout, vocabulary=V, d_model=D, **options).double().eval()


def attend(mixer, x, source, causal):
    """Softmax attention over all of the source, or over what lies before, written out."""
    heads = lambda y: y.unflatten(-1, (mixer.n_heads, -1)).transpose(1, 2)  # noqa: E731
    q, k, v = heads(mixer.q(x)), heads(mixer.k(source)), heads(mixer.v(source))
    scores = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[2:]).triu(1).bool(), -torch.inf)
    return mixer.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_equals_the_transformer_of_the_paper():
    """Vaswani et al. 2017, figure 1, with the norms in front and the MLP of this house: sublayer by sublayer."""
    model = build(mixers=MIXERS | {"mha": {"n_heads": 2, "position": "none"}}, position="sinusoidal", norm="layernorm")
    source, tokens = torch.tensor([SOURCES[0]]), torch.tensor([[11, 2, 3, 7]])
    angles = torch.arange(9.0).double()[:, None] * 10_000.0 ** (-torch.arange(0, D, 2) / D)
    places = torch.stack([angles.sin(), angles.cos()], -1).flatten(1)
    norm = lambda x, layer: F.layer_norm(x, (D,), layer.weight, layer.bias)  # noqa: E731
    x = model.embedding.weight[source] + places[: source.shape[1]]
    for block in model.encoder.blocks:
        inside = norm(x, block.mixing.before)
        x = x + attend(block.mixing.mixers[0], inside, inside, causal=False)
        x = x + block.mlp.mlp(norm(x, block.mlp.before))
    memory = norm(x, model.encoder.norm)
    y = model.embedding.weight[tokens] + places[: tokens.shape[1]]
    own, cross, mlp = model.stack.blocks
    inside = norm(y, own.mixing.before)
    y = y + attend(own.mixing.mixers[0], inside, inside, causal=True)
    y = y + attend(cross.mixing.mixers[0], norm(y, cross.mixing.before), memory, causal=False)
    y = y + mlp.mlp.mlp(norm(y, mlp.mlp.before))
    expected = norm(y, model.stack.norm) @ model.embedding.weight.T
    assert torch.allclose(model(tokens, None, model.encode(source)), expected, atol=1e-12)


@every_stack
def test_ragged_pairs_equal_each_pair_alone(stack):
    """Pads stand anywhere, two pairs share a row: a document of the target attends to that of the same id."""
    model = build(stack)
    sources = torch.randint(0, V, (2, 9))
    source_ids = torch.tensor([[1, 1, 0, 1, 2, 2, 0, 0, 0], [0, 0, 1, 1, 1, 0, 1, 1, 1]], dtype=torch.int32)
    tokens = torch.randint(0, V, (2, 7))
    ids = torch.tensor([[1, 0, 1, 1, 2, 2, 2], [1, 1, 1, 0, 0, 0, 0]], dtype=torch.int32)
    y = model(tokens, Packing(ids), model.encode(sources, Packing(source_ids)))
    for row, document in ((0, 1), (0, 2), (1, 1)):
        mine, theirs = ids[row] == document, source_ids[row] == document
        alone = model(tokens[row, mine][None], None, model.encode(sources[row, theirs][None]))
        assert torch.allclose(y[row, mine], alone[0], atol=1e-10)


@every_stack
def test_targets_see_the_whole_source_and_no_later_target(stack):
    model = build(stack)
    source, tokens = torch.randint(0, V, (1, 6)), torch.randint(0, V, (1, 5))
    y = model(tokens, None, model.encode(source))
    for i in range(6):
        changed = source.clone()
        changed[0, i] = (changed[0, i] + 1) % V
        assert not torch.allclose(model(tokens, None, model.encode(changed))[0, 0], y[0, 0], atol=1e-9)
    later = tokens.clone()
    later[0, 3] = (later[0, 3] + 1) % V
    assert torch.equal(model(later, None, model.encode(source))[0, :3], y[0, :3])


@every_stack
def test_extend_piece_by_piece_equals_the_whole(stack):
    model = build(stack)
    tokens, sources = torch.randint(0, V, (3, 6)), torch.randint(0, V, (3, 9))
    memory = model.encode(sources, Packing.from_lengths(torch.tensor([9, 4, 1]), 9))
    with torch.no_grad():
        expected = model(tokens, None, memory)
        logits, state = model.prefill(tokens[:, :2], None, memory)
        pieces = [logits]
        for piece in tokens[:, 2:].split([1, 3], 1):
            logits, state = model.extend(piece, state)
            pieces.append(logits)
        assert torch.allclose(torch.cat(pieces, 1), expected, atol=1e-10)
        # A state is one object: rows are chosen and repeated, memory and all, as beam search needs.
        again, _ = model.extend(tokens[:1, :1].expand(2, 1), state.clone().reorder(torch.tensor([1, 1])))
        once, _ = model.extend(tokens[:1, :1].expand(3, 1), state)
        assert torch.allclose(again, once[[1, 1]], atol=1e-12)


def slowly(model, source, prompt, count):
    """Greedy by the definition: a full forward over everything for each token."""
    tokens = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            memory = model.encode(torch.tensor([source]))
            tokens.append(int(model(torch.tensor([tokens]), None, memory)[0, -1].argmax()))
    return tokens[len(prompt) :]


@every_stack
def test_greedy_generation_is_the_arg_max_of_full_forwards(stack):
    model = build(stack)
    expected = [slowly(model, *pair, 8) for pair in zip(SOURCES, PROMPTS, strict=True)]
    assert [row.tolist() for row in model.transduce(SOURCES, PROMPTS, 8)] == expected
    even = model.transduce(torch.tensor([SOURCES[0], SOURCES[0][::-1]]), [[11], [11]], 5)
    assert [row.tolist() for row in even] == [slowly(model, s, [11], 5) for s in (SOURCES[0], SOURCES[0][::-1])]
    assert len({token for row in expected for token in row}) > 1


def test_dropout_is_off_in_the_encoder_too_and_the_mode_stays():
    model = build(dropout=0.5).train()
    first, second = model.transduce(SOURCES, PROMPTS, 8), model.transduce(SOURCES, PROMPTS, 8)
    assert model.training and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_encoder_sees_both_sides_with_the_options_of_the_decoder():
    model = build("mha + cross_mha", encoder={"layout": "gqa + mamba2 + gqa", "mixers": {"gqa": {"bias": True}}})
    attention, scan, _ = (block.mixing.mixers[0] for block in model.encoder.blocks)
    assert not attention.causal and attention.n_kv_heads == 2 and attention.q.bias is not None
    # It has no such option: it stays causal.
    assert scan.causal and not model.encoder.causal and model.causal
    once = build("mha + cross_mha", encoder={"layout": "mha", "mixers": {"mha": {"causal": True}}})
    assert once.encoder.causal


def test_embeddings_are_shared_or_not():
    shared, apart = build(), build(share_embeddings=False)
    assert shared.source_embedding is shared.embedding
    assert sum(p.numel() for p in apart.parameters()) - sum(p.numel() for p in shared.parameters()) == V * D
    assert measure(shared, 4).parameters_without_embeddings == measure(apart, 4).parameters_without_embeddings
    # Of its table, a source token reads one row.
    assert measure(apart, 4).parameters_active - measure(shared, 4).parameters_active == D
    source, tokens = torch.tensor([[1, 2]]), torch.tensor([[3]])
    before = apart(tokens, None, apart.encode(source))
    with torch.no_grad():
        apart.source_embedding.weight += torch.randn(V, D)
    assert not torch.allclose(apart(tokens, None, apart.encode(source)), before)


def test_residual_outputs_start_by_the_depth_of_their_own_stack():
    encoder = {"layout": "mha", "n_layers": 8}
    model = EncoderDecoder("mha + cross_mha", encoder=encoder, mixers=MIXERS, vocabulary=V, d_model=256)
    stds = [stack.blocks[0].mixing.mixers[0].out.weight.std().item() * 256**0.5 for stack in model.stacks]
    assert stds == pytest.approx([16**-0.5, 4**-0.5], rel=0.03)


def linear(module):
    return sum(m.in_features * m.out_features for m in module.modules() if isinstance(m, nn.Linear))


def pairs(mixer, count):
    """Multiply-adds of so many pairs of a query and a key."""
    inner = 2 * mixer.attention_dim if hasattr(mixer, "attention_dim") else mixer.head_dim
    return mixer.n_heads * count * (inner + mixer.head_dim)


def counted(model, sources, targets):
    """Multiply-adds of the definition: encoder; keys and values of the memory; the rest of the decoder."""
    encoder = sum(sources * linear(b) + pairs(b.mixing.mixers[0], sources**2) for b in model.encoder.blocks)
    remembered = rest = 0
    for block in model.stack.blocks:
        rest += targets * (0 if block.mlp is None else linear(block.mlp))
        if block.mixing is None:
            continue
        (mixer,) = block.mixing.mixers
        if block.takes_memory:
            remembered += sources * (linear(mixer.k) + linear(mixer.v))
            rest += targets * (linear(mixer.q) + linear(mixer.out)) + pairs(mixer, targets * sources)
        else:
            rest += targets * linear(mixer) + pairs(mixer, sum(1 for i in range(targets) for j in range(i + 1)))
    return encoder, remembered, rest + targets * linear(model.head)


COUNTED = pytest.mark.parametrize(
    "layout", ["mha + cross_mha + mlp", "2*gqa + cross_gqa", "additive + cross_additive", "mha + 2*cross_mha@a"]
)


@COUNTED
@pytest.mark.parametrize("length", [1, 9])
def test_flops_equal_brute_force(layout, length):
    model = build(layout)
    cost, (encoder, remembered, rest) = measure(model, length), counted(model, length, length)
    assert cost.flops_per_token_forward * length == 2 * (encoder + remembered + rest)
    assert cost.prefill_flops == 2 * (encoder + remembered + rest)
    # One more token for the same source: neither the encoder nor the keys of the memory are computed again.
    assert cost.decode_flops_per_token == 2 * (counted(model, length, length + 1)[2] - rest)


@COUNTED
@pytest.mark.parametrize("length", [1, 9])
def test_state_bytes_equal_live_tensors_with_the_keys_of_the_memory(layout, length):
    model, tokens = build(layout).float(), torch.zeros(1, length, dtype=torch.int64)
    one = Packing(torch.ones(1, length, dtype=torch.int32))
    for narrow in (False, True):
        model = model.bfloat16() if narrow else model
        with torch.no_grad():
            _, state = model.prefill(tokens, None, model.encode(tokens))
            _, packed = model.prefill(tokens, one, model.encode(tokens, one))
        cost = measure(model, length)
        live = sum(t.numel() * t.element_size() for t in state.tensors.values() if t.is_floating_point())
        memory = sum(t.numel() * t.element_size() for name, t in state.tensors.items() if ".memory." in name)
        assert cost.state_bytes == live > memory > 0
    assert cost.bookkeeping_bytes == packed.bookkeeping_bytes
    assert measure(build(layout).float(), length).bf16_state_bytes == live


def test_parameters_are_those_of_all_parts():
    model = build("2*(mha + cross_mha)", share_embeddings=False, position="learned", max_length=20)
    cost = measure(model, 9)
    assert sum(part.parameters for part in cost.parts) == cost.parameters == sum(p.numel() for p in model.parameters())
    assert cost.parameters - cost.parameters_without_embeddings == 2 * V * D + 2 * 20 * D
    assert [part.name for part in cost.parts] == [
        *("encoder embedding", "encoder mha", "encoder mha", "encoder norm"),
        *("embedding", "mha", "cross_mha", "mha", "cross_mha", "head"),
    ]


@pytest.mark.parametrize("options", [{}, {"share_embeddings": False, "position": "learned", "dropout": 0.1}])
def test_activation_bytes_equal_what_autograd_saves(options):
    model = build("2*(mha + cross_mha)", **options).float().train()
    source, tokens = torch.zeros(1, 9, dtype=torch.int64), torch.zeros(1, 9, dtype=torch.int64)

    def forward():
        return F.cross_entropy(model(tokens, None, model.encode(source)).flatten(0, 1), torch.zeros(9).long())

    assert measure(model, 9).activation_bytes == kept(model, forward)


def test_compiled_model_equals_eager():
    torch._dynamo.reset()
    model, source, tokens = build(), torch.randint(0, V, (2, 9)), torch.randint(0, V, (2, 5))

    def run(source, tokens):
        return model(tokens, None, model.encode(source))

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(source, tokens), run(source, tokens), atol=1e-10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "mha"}, "layout 'mha' has no cross-attending layer, so the decoder would not see the source"),
        ({"encoder": {"layout": "mha + cross_mha"}}, "encoder: layout 'mha + cross_mha' cross-attends with cross_mha"),
        ({"encoder": {"layouts": "mha"}}, "encoder has no option 'layouts' (did you mean 'layout'?)"),
        ({"encoder": {}}, "encoder needs the option 'layout'"),
        ({"encoder": {"layout": "mhaa"}}, "encoder: layout: unknown mixer 'mhaa'"),
        ({"encoder": {"layout": "mha", "mixers": {"mha": {"n_head": 2}}}}, "encoder: model.mixers.mha: mixer 'mha'"),
        ({"mixers": MIXERS | {"mha": {"causal": False}}}, "a decoder must be causal, and mha is not"),
        ({"mixers": {"cross_mha": {"mixer": "linear", "cross": True}}}, "'linear' cannot cross-attend; those that"),
        ({"mixers": {"cross_mha": {"mixer": "mha", "cross": 1}}}, "cross=1 must be true or false"),
    ],
)
def test_what_is_no_encoder_decoder_is_said(options, message):
    good = {"layout": "mha + cross_mha", "encoder": {"layout": "mha"}, "mixers": MIXERS, "vocabulary": V}
    with pytest.raises(ValueError, match=re.escape(message)):
        EncoderDecoder(**good | options)


def test_a_missing_or_misfitting_memory_is_said():
    model, tokens = build(), torch.zeros(2, 3, dtype=torch.int64)
    for call in (model, model.prefill):
        with pytest.raises(ValueError, match="a cross-attending layer needs a memory"):
            call(tokens)
    with pytest.raises(ValueError, match="memory has 3 rows; the prompts are 2"):
        model.generate(PROMPTS[:2], 3, memory=Memory(torch.zeros(3, 4, D)))
    with pytest.raises(ValueError, match="source 1 is empty"):
        model.transduce([[1], []], [[1], [2]], 3)


@pytest.mark.parametrize("stack", ["vaswani", "grouped", "bahdanau", "hybrid"])
def test_alignments_are_the_weights_that_the_layers_use(stack):
    """Weights times the memory's values, through the output projection, are what a cross-attending layer gives."""
    model, found = build(stack, convolution=3), []
    source, tokens = torch.randint(0, V, (2, 6)), torch.randint(0, V, (2, 5))
    for block in model.stack.blocks:
        for mixer in block.mixing.mixers if block.takes_memory else ():

            def spied(x, past, documents, memory=None, mixer=mixer, mix=mixer.mix):
                y, kept = mix(x, past, documents, memory)
                found.append((mixer, memory, y))
                return y, kept

            mixer.mix = spied
    weights = model.alignments(source, tokens)
    crossing = [(mixer, memory, y) for mixer, memory, y in found if memory is not None]
    assert len(weights) == len(crossing) > 0
    for w, (mixer, memory, y) in zip(weights.values(), crossing, strict=True):
        assert torch.allclose(w.sum(-1), torch.ones(()).double()) and w.shape[:2] == (2, 5) and w.shape[3] == 6
        v = mixer.remember(memory)["memory.v"]
        v = v.repeat_interleave(w.shape[2] // v.shape[2], 2)
        assert torch.allclose(mixer.out(torch.einsum("bths,bshv->bthv", w, v).flatten(2)), y, atol=1e-12)
