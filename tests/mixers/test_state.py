"""Packing and State: what they accept, what they hold, what they cost."""

from __future__ import annotations

import pytest
import torch

from mixers import registry
from mixers.base import Memory, Packing, State, positions


def ids(*rows):
    return torch.tensor(rows, dtype=torch.int32)


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        (torch.ones(3, dtype=torch.int32), r"wants documents \[B, T\]"),
        (torch.ones(1, 3), "of dtype int32; got"),
        (ids([1, -1]), "ids >= 0"),
        (ids([1, 1, 2], [4, 3, 4]), "document 4 of row 1 returns"),
        (ids([1, 0, 2, 0, 1]), "document 1 of row 0 returns"),
    ],
)
def test_packing_refuses_what_has_no_meaning(documents, message):
    with pytest.raises(ValueError, match=message):
        Packing(documents)


def test_packing_accepts_pads_anywhere_and_ids_in_any_order():
    for documents in (ids([0, 5, 0, 5, 2, 0]), ids([0, 0]), ids([7, 3, 9]), torch.zeros(2, 0, dtype=torch.int32)):
        Packing(documents)


def test_compact_moves_pads_last_and_can_be_undone():
    x = torch.arange(6.0).view(1, 6, 1) + 1
    packing = Packing(ids([0, 5, 0, 5, 2, 0]))
    compact, documents, undo = packing.compact(x)
    assert compact.flatten().tolist() == [2, 4, 5, 0, 0, 0] and documents.tolist() == [[5, 5, 2, 0, 0, 0]]
    assert compact[0, undo[0], 0].tolist() == [0, 2, 0, 4, 5, 0]


def test_from_lengths():
    assert Packing.from_lengths(torch.tensor([2, 0, 3]), 3).documents.tolist() == [[1, 1, 0], [0, 0, 0], [1, 1, 1]]


def test_lengths_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"lengths must be from 0 to time=4; got \[9, -1\]"):
        Packing.from_lengths(torch.tensor([9, -1]), 4)


def test_positions_count_per_document_and_go_on_from_the_state():
    documents = ids([1, 1, 2, 2, 2, 0], [4, 4, 4, 4, 0, 0])
    assert positions(documents, None, 6, documents.device)[:, :4].tolist() == [[0, 1, 0, 1], [0, 1, 2, 3]]
    state = State({"document": ids([1, 3])[0], "position": ids([7, 7])[0], "filled": ids([9, 9])[0]}, 9)
    assert positions(documents, state, 6, documents.device)[:, :4].tolist() == [[7, 8, 0, 1], [0, 1, 2, 3]]
    assert positions(None, State({}, 5), 3, documents.device).tolist() == [[5, 6, 7]]


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("mha", {}, lambda n: 2 * n * 64),
        ("gqa", dict(n_heads=8, n_kv_heads=2), lambda n: 2 * n * 16),
        ("mqa", dict(n_heads=4), lambda n: 2 * n * 16),
        ("window", dict(window=8), lambda n: 2 * min(n, 8) * 64),
        ("additive", dict(n_heads=4, attention_dim=3), lambda n: n * 4 * (3 + 16)),
        ("additive", dict(n_heads=4, attention_dim=3, window=16), lambda n: min(n, 16) * 4 * (3 + 16)),
        ("linear", dict(n_heads=2), lambda n: 2 * 32 * 33),
        ("based", dict(n_heads=2, feature_dim=4), lambda n: 2 * 21 * 33),
        ("mamba", {}, lambda n: 128 * 16 + 3 * 128),
        ("mamba2", dict(n_groups=2), lambda n: 2 * 64 * 128 + 3 * (128 + 2 * 2 * 128)),
    ],
)
@pytest.mark.parametrize("length", [0, 5, 8, 21])
def test_state_bytes_by_hand_and_on_meta(name, options, expected, length):
    x = torch.randn(1, length, 64)
    with torch.no_grad():
        live = registry.build(name, 64, **options)
        _, state = live.extend(x, live.start(1, x))
        with torch.device("meta"):
            ghost = registry.build(name, 64, **options)
        _, shadow = ghost.extend(x.to("meta"), ghost.start(1, x.to("meta")))
    assert state.bytes == shadow.bytes == 4 * expected(length)
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in state.tensors.values()}
    assert state.bytes == sum(held.values())
    assert state.bookkeeping_bytes == 0


def test_ids_are_counted_apart():
    mixer, x = registry.build("mha", 64), torch.randn(2, 5, 64)
    _, state = mixer.extend(x, mixer.start(2, x), Packing(torch.ones(2, 5, dtype=torch.int32)))
    assert state.bytes == 4 * 2 * 2 * 5 * 64
    assert state.bookkeeping_bytes == 4 * (2 * 5 + 3 * 2)  # an id a slot; document, position and fill of each row


def test_cache_is_written_in_place_and_grows_by_doubling():
    mixer, x = registry.build("mha", 8), torch.randn(1, 40, 8)
    with torch.no_grad():
        _, state = mixer.extend(x[:, :5], mixer.start(1, x))
        capacities, moves, before = [], 0, state["k"].data_ptr()
        for t in range(5, 40):
            _, state = mixer.extend(x[:, t : t + 1], state)
            capacities.append(state["k"].shape[2])
            moves += state["k"].data_ptr() != before
            before = state["k"].data_ptr()
    assert sorted(set(capacities)) == [10, 20, 40] and moves == 3


def test_with_gradients_extend_leaves_the_old_state_alone():
    mixer, x = registry.build("window", 8, window=4), torch.randn(1, 9, 8)
    _, state = mixer.extend(x[:, :6], mixer.start(1, x))
    before = {name: t.clone() for name, t in state.tensors.items()}
    for t in (6, 7):
        mixer.extend(x[:, t : t + 1], state)
    assert all(torch.equal(state[name], t) for name, t in before.items())


def test_gradients_flow_through_a_state():
    mixer, x = (
        registry.build("mha", 8, n_heads=2).double(),
        torch.randn(1, 6, 8, dtype=torch.float64, requires_grad=True),
    )
    expected = torch.autograd.grad(mixer(x).square().sum(), x)[0]
    first, state = mixer.extend(x[:, :4], mixer.start(1, x))
    second, _ = mixer.extend(x[:, 4:], state)
    got = torch.autograd.grad(first.square().sum() + second.square().sum(), x)[0]
    assert torch.allclose(got, expected, atol=1e-12)


def test_window_cache_holds_the_last_tokens_only():
    """C15: W 8, prompt 6, four decodes, values tagged by position: 2 .. 9 are held; token 0 changes nothing."""
    mixer = registry.build("window", 8, window=8, n_heads=1, position="none").double()
    torch.nn.init.eye_(mixer.v.weight)
    x = torch.randn(1, 10, 8).double()
    x[0, :, 0] = torch.arange(10.0)
    outputs = []
    for first in (0.0, 100.0):
        x[0, 0, 0] = first
        with torch.no_grad():
            _, state = mixer.extend(x[:, :6], mixer.start(1, x))
            for t in range(6, 10):
                y, state = mixer.extend(x[:, t : t + 1], state)
        outputs.append(y)
        assert sorted(state["v"][0, 0, :, 0].tolist()) == list(range(2, 10))
    assert torch.equal(*outputs)


def test_window_prefill_longer_than_the_window_is_the_banded_mask():
    """C16: T 20, W 4, whole and in chunks of 7; row 0 equals its own value."""
    mixer = registry.build("window", 8, window=4, n_heads=1, position="none").double()
    x = torch.randn(1, 20, 8).double()
    q, k, v = mixer.q(x), mixer.k(x), mixer.v(x)
    i = torch.arange(20)
    band = (i[:, None] >= i) & (i[:, None] - i < 4)
    weights = (q @ k.transpose(1, 2) / 8**0.5).masked_fill(~band, float("-inf")).softmax(-1)
    expected = mixer.out(weights @ v)
    state, pieces = mixer.start(1, x), []
    for piece in x.split(7, 1):
        y, state = mixer.extend(piece, state)
        pieces.append(y)
    assert torch.allclose(mixer(x), expected, atol=1e-12)
    assert torch.allclose(torch.cat(pieces, 1), expected, atol=1e-12)
    assert torch.allclose(mixer(x)[0, 0], mixer.out(v[0, 0]), atol=1e-12)


def test_a_token_behind_pads_alone_returns_its_value_under_linear_attention():
    """C06: elu(0) + 1 = 1, so pad keys would count in the normaliser."""
    mixer = registry.build("linear", 8).double()
    torch.nn.init.eye_(mixer.out.weight)
    x = torch.randn(1, 4, 8).double()
    y = mixer(x, Packing(ids([0, 0, 0, 1])))
    assert torch.allclose(y[0, 3], mixer.v(x)[0, 3], atol=1e-12)


def test_state_moves_to_another_dtype_and_device():
    mixer, x = registry.build("gqa", 8, n_heads=2), torch.randn(1, 5, 8)
    _, state = mixer.extend(x, mixer.start(1, x), Packing(torch.ones(1, 5, dtype=torch.int32)))
    moved = state.to("meta", torch.float64)
    assert {t.device.type for t in moved.tensors.values()} == {"meta"}
    assert moved["k"].dtype == torch.float64 and moved["document"].dtype == torch.int32 and moved.length == 5


class TestMemory:
    """Cross-attention: queries from x, keys and values from a memory."""

    def setup_method(self):
        torch.manual_seed(0)
        self.mixer = registry.build("gqa", 8, n_heads=4, n_kv_heads=2).double()
        self.x, self.source = torch.randn(2, 5, 8).double(), torch.randn(2, 7, 8).double()

    def test_equals_softmax_over_the_memory(self):
        q = self.mixer.q(self.x).view(2, 5, 4, 2)
        k, v = (p(self.source).view(2, 7, 2, 2).repeat_interleave(2, 2) for p in (self.mixer.k, self.mixer.v))
        weights = (torch.einsum("bthk,bshk->bhts", q, k) / 2**0.5).softmax(-1)
        expected = self.mixer.out(torch.einsum("bhts,bshk->bthk", weights, v).flatten(2))
        assert torch.allclose(self.mixer(self.x, memory=Memory(self.source)), expected, atol=1e-12)

    def test_documents_see_their_own_part_and_pads_are_not_there(self):
        packing, memory_packing = (
            Packing(ids([1, 1, 2, 0, 2], [0, 1, 1, 1, 0])),
            Packing(ids([1, 0, 1, 2, 2, 2, 0], [0, 0, 1, 1, 1, 1, 1])),
        )
        y = self.mixer(self.x, packing, Memory(self.source, memory_packing))
        for row in range(2):
            for document in (1, 2):
                mine, theirs = packing.documents[row] == document, memory_packing.documents[row] == document
                if mine.any():
                    alone = self.mixer(self.x[row, mine][None], memory=Memory(self.source[row, theirs][None]))
                    assert torch.allclose(y[row, mine], alone[0], atol=1e-12)
        assert (y[packing.documents == 0] == 0).all()

    def test_extend_keeps_the_memory(self):
        memory = Memory(self.source, Packing.from_lengths(torch.tensor([7, 3]), 7))
        expected, state = self.mixer(self.x, memory=memory), self.mixer.start(2, self.x, memory)
        pieces = []
        for piece in self.x.split(2, 1):
            y, state = self.mixer.extend(piece, state)
            pieces.append(y)
        assert torch.allclose(torch.cat(pieces, 1), expected, atol=1e-12)

    def test_a_mixer_that_cannot_says_so(self):
        with pytest.raises(ValueError, match="LinearAttention cannot cross-attend"):
            registry.build("linear", 8)(self.x.float(), memory=Memory(self.source.float()))


@pytest.mark.parametrize("name", registry.names())
def test_a_wrong_state_is_named(name):
    mixer = registry.build(name, 16)
    x = torch.randn(2, 3, 16)
    _, state = mixer.extend(x, mixer.start(2, x))
    for wrong, message in (
        (state.reorder(torch.tensor([0])), "is of batch 1; x is of batch 2"),
        (state.map(torch.Tensor.long), "must be like torch.float32; got torch.int64"),
        (State({}), "in its state; got a state of nothing"),
    ):
        with pytest.raises(ValueError, match=message):
            mixer.extend(x, wrong)


@pytest.mark.parametrize("name", registry.names())
def test_no_rows_are_no_case_of_their_own(name):
    mixer = registry.build(name, 16)
    x = torch.randn(0, 5, 16)
    assert mixer(x).shape == x.shape
    assert mixer.extend(x, mixer.start(0, x))[0].shape == x.shape
