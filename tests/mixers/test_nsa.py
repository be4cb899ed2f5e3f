"""NSA as a whole: against its dense definition, the mixers it contains, and what a token reads while decoding."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kernels import backend
from kernels.flops import FlopCounter
from kernels.sparse import portable
from mixers import registry
from mixers.base import Packing

ODD = dict(compress_block=6, compress_stride=3, select_block=9, n_selected=3, window=7)


def build(d_model=16, **options):
    torch.manual_seed(0)
    return registry.build("nsa", d_model, **{"n_heads": 4, "n_kv_heads": 2} | options).double()


def sample(time, d_model=16, rows=1):
    return torch.randn(rows, time, d_model, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_every_length_equals_the_dense_definition(groups):
    mixer, x = build(n_kv_heads=groups, **ODD), sample(200)
    with torch.no_grad():
        with backend.using("reference"):
            expected = mixer(x)
        for time in range(1, 201, 1 if groups == 2 else 9):
            torch.testing.assert_close(mixer(x[:, :time]), expected[:, :time], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("compression", ["mlp", "linear", "mean"])
@pytest.mark.parametrize("packed", [False, True])
def test_gradients_of_every_parameter_equal_the_definition(compression, packed):
    mixer, x = build(compression=compression, **ODD), sample(70, rows=2)
    packing = Packing(torch.tensor([[1] * 31 + [2] * 39, [3] * 60 + [0] * 10], dtype=torch.int32)) if packed else None
    grads = []
    for name in ("portable", "reference"):
        with backend.using(name):
            grads.append(torch.autograd.grad(mixer(x, packing).square().sum(), list(mixer.parameters())))
    for got, expected in zip(*grads, strict=True):
        assert expected.any()
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)


def shared_weights(mixer, other):
    """The other mixer with the projections of this one."""
    missing, _ = other.load_state_dict(mixer.state_dict(), strict=False)
    assert not missing
    return other.double()


def test_selected_alone_is_causal_attention_up_to_n_blocks():
    mixer = build(branches=["selected"], select_block=4, n_selected=5, compress_block=4, compress_stride=2)
    other, x = shared_weights(mixer, registry.build("gqa", 16, n_heads=4, n_kv_heads=2)), sample(30)
    assert mixer.gate is None
    difference = (mixer(x) - other(x)).abs().amax((0, 2))
    assert difference[:20].max() < 1e-14 and difference[20:].min() > 1e-8


def test_window_alone_is_the_window_mixer():
    mixer = build(branches=["window"], window=7)
    other = shared_weights(mixer, registry.build("window", 16, n_heads=4, n_kv_heads=2, window=7))
    torch.testing.assert_close(mixer(sample(50)), other(sample(50)), rtol=0, atol=0)


def test_a_token_sees_no_compressed_block_that_is_not_past():
    """C08: with block = stride = 4 and 8 tokens, rows 0 to 2 give nothing, 3 to 6 one block, 7 two."""
    mixer = build(branches=["compressed"], compress_block=4, compress_stride=4)
    x = sample(8).requires_grad_()
    y = mixer(x)
    assert not y[:, :3].any()
    for t in range(3, 8):
        grad = torch.autograd.grad(y[0, t].sum(), x, retain_graph=True)[0][0].abs().sum(1)
        assert [bool(g) for g in grad] == [s < 4 * ((t + 1) // 4) for s in range(8)]


@pytest.mark.parametrize("branches", [["selected"], ["compressed"], ["window"], ["compressed", "selected"]])
def test_branches_that_are_off_leave_nothing_behind(branches):
    mixer, x = build(branches=branches, **ODD), sample(60, rows=2)
    assert mixer.k.out_features == len(branches) * 2 * 4
    mixer(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in mixer.parameters())
    with torch.no_grad():
        state, pieces = mixer.start(2, x), []
        for piece in x.split([1, 20, 1, 1, 37], 1):
            y, state = mixer.extend(piece, state)
            pieces.append(y)
        torch.testing.assert_close(torch.cat(pieces, 1), mixer(x), rtol=1e-12, atol=1e-12)
    named = {name.split(".")[0] for name in state.tensors}
    assert named == {*branches, *(["compressed", "tail"] if set(branches) & {"compressed", "selected"} else [])}


def test_a_token_reads_compressed_blocks_selected_blocks_and_the_window():
    """Of 4096 cached tokens, 255 compressed ones, 4 blocks of 16 less the unfilled part, 32 of the window."""
    mixer = registry.build(
        "nsa", 64, n_heads=4, n_kv_heads=2, select_block=16, n_selected=4, window=32, compress_block=32
    ).to("meta")
    x = torch.empty(1, 4096, 64, device="meta")
    with torch.no_grad():
        _, state = mixer.extend(x, mixer.start(1, x))
        with FlopCounter() as count:
            mixer.extend(x[:, :1], state)
    entry, query = 4 * 2 * 2 * 16, 4 * 2 * 4 * 16  # a key and a value of two heads; a query and an output of four
    assert count.attention_bytes == 3 * query + (255 + 3 * 16 + 1 + 32) * entry


def test_a_token_of_the_portable_form_touches_no_other_keys():
    """Unselected keys may be anything: NaN here."""
    mixer, x = build(branches=["selected"], **ODD), sample(90)
    chosen = []
    with torch.no_grad():
        _, state = mixer.extend(x[:, :89], mixer.start(1, x))
        expected, _ = mixer.extend(x[:, 89:], state.clone())
        gathered = portable._gathered

        def watched(q, k, v, indices, *rest):
            chosen.append(indices)
            return gathered(q, k, v, indices, *rest)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(portable, "_gathered", watched)
            mixer.extend(x[:, 89:], state.clone())
        for g, blocks in enumerate(chosen[0][0, 0].tolist()):
            for j in set(range(10)) - set(blocks):
                state["selected.k"][0, g, 9 * j : 9 * j + 9] = float("nan")
                state["selected.v"][0, g, 9 * j : 9 * j + 9] = float("nan")
        torch.testing.assert_close(mixer.extend(x[:, 89:], state)[0], expected, rtol=0, atol=0)


def test_shrink_divides_every_size():
    small = build(shrink=16)
    assert (small.compress_block, small.compress_stride, small.select_block, small.window) == (2, 1, 4, 32)
    assert small.n_selected == 16


def test_no_branch_is_gated_alone():
    assert build(branches=["compressed"]).gate is None
    assert isinstance(build(branches=["compressed", "window"]).gate, nn.Linear)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(compress_stride=5), "compress_block=32 must be a multiple of compress_stride=5"),
        (dict(select_block=40), "select_block=40 must be a multiple of compress_stride=16"),
        (dict(n_selected=0), "n_selected=0 must be at least 1"),
        (dict(window=0), "window=0 must be at least 1"),
        (dict(branches=[]), r"branches=\[\] must be one or more of compressed, selected, window, each once"),
        (dict(branches=["window", "window"]), "each once"),
        (dict(branches=["windw"]), r"branches\[0\]='windw' is not allowed \(did you mean 'window'\?\)"),
        (dict(n_kv_heads=3), "n_kv_heads=3 must be at least 1 and divide n_heads=4"),
        (dict(shrink=3), "compress_block=32 must be a multiple of shrink=3"),
        (dict(shrink=0), "shrink=0 must be at least 1"),
        # The sizes that were given are named, not what shrink makes of them.
        (dict(shrink=4, select_block=40), "select_block=40 must be a multiple of compress_stride=16"),
        (dict(shrink=4, window=0), "window=0 must be at least 1"),
        (dict(compress_block=0), "compress_block=0 must be at least 1"),
        (dict(compress_stride=0), "compress_stride=0 must be at least 1"),
        (dict(compress_stride=64), "compress_block=32 must be a multiple of compress_stride=64"),
        (dict(select_block=0), "select_block=0 must be at least 1"),
        (dict(select_block=8), "select_block=8 must be a multiple of compress_stride=16"),
        (dict(n_kv_heads=0), "n_kv_heads=0 must be at least 1 and divide n_heads=4"),
        (dict(compression="pool"), "compression='pool' is not allowed; allowed: mlp, linear, mean"),
        (dict(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "rope_scaling"),
        (dict(position="none", rope_scaling={"rope_type": "linear", "factor": 2.0}), "needs position=rope; got none"),
    ],
)
def test_what_cannot_be_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)
