"""NSA's ops: hand-worked choices, sums over pairs, and the portable forms against the float64 definition."""

from __future__ import annotations

import math

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from kernels import backend, flops
from kernels.attention.op import attention
from kernels.sparse import op, portable, portable_blocks, portable_masked
from kernels.sparse.op import compressed_attention, select_blocks, selected_attention
from kernels.sparse.portable_compressed import block_scores

# block, stride, select_block, n: of the paper's shape, and such that divide nothing.
SIZES = ((8, 4, 16, 5), (6, 2, 4, 4), (3, 1, 5, 2), (4, 4, 8, 1), (8, 2, 2, 5))


def normal(*shape, seed=0, dtype=torch.float64):
    make = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=make, dtype=torch.float64).to(dtype).requires_grad_()


def places(lengths, time, block, stride):
    """Of documents in a row: starts of tokens, starts of compressed blocks, positions; pads behind them."""
    starts, blocks, positions, done = [], [], [], 0
    for length in lengths:
        starts += [len(positions)] * length
        blocks += [done] * length
        positions += range(length)
        done += max(0, (length - block) // stride + 1)
    pads = time - len(positions)
    return [torch.tensor([row + [fill] * pads]) for row, fill in ((starts, 0), (blocks, 0), (positions, -1))]


def results(name, queries, keys, heads, groups, sizes, packed, width=8):
    """Outputs, choices and gradients of both branches, the second on the choices of the first."""
    block, stride, select, n = sizes
    q, k, v = normal(1, queries, heads, 8), normal(1, keys, groups, 8, seed=1), normal(1, keys, groups, width, seed=2)
    count = max(0, (keys - block) // stride + 1)
    kc, vc = normal(1, count, groups, 8, seed=3), normal(1, count, groups, width, seed=4)
    first, second = {"offset": keys - queries}, {"offset": keys - queries}
    if packed:
        lengths = [keys // 3, 1, keys - keys // 3 - 3]
        starts, blocks, positions = (t[:, keys - queries :] for t in places(lengths, keys, block, stride))
        first |= {"starts": blocks, "positions": positions}
        second |= {"starts": starts, "positions": positions}
    with backend.using(name):
        y, indices = compressed_attention(
            q, kc, vc, block=block, stride=stride, select_block=select, n_selected=n, **first
        )
        z = selected_attention(q, k, v, indices, block=select, **second)
    tensors = [q, kc, vc, k, v]
    grads = torch.autograd.grad((y.square() + z.sin()).sum(), tensors, materialize_grads=True, allow_unused=True)
    return indices, [y, z, *grads]


@pytest.mark.parametrize("way", ["gathered", "masked", "blocks"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_portable_form_equals_the_definition(way, sizes, monkeypatch):
    """Prompts, later pieces and packed rows; a block that is not full at either end."""
    monkeypatch.setattr(portable, "FEW", 1000 if way == "gathered" else 0)
    monkeypatch.setattr(portable, "SHORT", 1000 if way == "masked" else 0)
    monkeypatch.setattr(portable, "SHORT_BY_BLOCK", 0)
    monkeypatch.setattr(portable_masked, "ROWS", 32)
    monkeypatch.setattr(portable_blocks, "ROWS", 16)
    for queries, keys in ((1, 1), (3, 40), (17, 17), (37, 77), (90, 90)):
        for heads, groups in ((2, 2), (4, 1)):
            for packed in (False, True)[: 1 if keys < 10 else 2]:
                cell = queries, keys, heads, groups, sizes, packed
                choice, got = results("portable", *cell)
                truth, expected = results("reference", *cell)
                assert torch.equal(choice, truth), cell
                for a, b in zip(got, expected, strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11, msg=str(cell))


def test_values_may_be_narrower_or_wider_than_keys():
    for width in (5, 11):
        got, expected = (results(name, 40, 40, 4, 2, SIZES[1], False, width)[1] for name in ("portable", "reference"))
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_chosen_blocks_by_hand():
    """Block 4 is a query's own: it, the first and the third are kept; of equal scores the lower block is taken."""
    scores = torch.tensor([0.1, 0.4, 0.4, 0.2, 0.0, 9.0]).view(1, 1, 1, 6)
    own = torch.tensor([[4]])
    wanted = {1: [4], 2: [0, 4], 3: [0, 3, 4], 4: [0, 1, 3, 4], 5: [0, 1, 2, 3, 4], 7: [0, 1, 2, 3, 4, -1, -1]}
    for name in ("portable", "reference"):
        with backend.using(name):
            for n, expected in wanted.items():
                assert select_blocks(scores, own, n).flatten().tolist() == expected
            assert select_blocks(scores, torch.tensor([[-1]]), 2).flatten().tolist() == [-1, -1]


def test_ties_are_broken_alike_everywhere():
    make = torch.Generator().manual_seed(0)
    for n in (1, 3, 6, 20):
        scores = torch.randint(0, 3, (2, 40, 2, 15), generator=make).float()
        own = torch.randint(-1, 15, (2, 40), generator=make)
        with backend.using("reference"):
            expected = select_blocks(scores, own, n)
        assert torch.equal(select_blocks(scores, own, n), expected)


def test_scores_weigh_blocks_as_equation_9_does():
    """Block 32, stride 16, selection block 64: 1 2 2 2 1 on 4 j - 1 .. 4 j + 3."""
    shared = torch.eye(12)[None, None]
    scores = block_scores(shared, 3, 2, 4)[0, 0].T
    assert scores[0].tolist() == [2, 2, 2, 1, 0, 0, 0, 0, 0, 0, 0, 0]
    assert scores[1].tolist() == [0, 0, 0, 1, 2, 2, 2, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("name", ["portable", "reference"])
def test_only_blocks_that_are_wholly_past_are_seen(name):
    """C08: block = stride = 4, 8 tokens: rows 0 to 2 see none, 3 to 6 the first, 7 both."""
    k, v = torch.zeros(1, 2, 1, 4), torch.eye(2, 4).view(1, 2, 1, 4)
    with backend.using(name):
        y, _ = compressed_attention(torch.ones(1, 8, 1, 4), k, v, block=4, stride=4)
    assert y[0, :, 0, :2].tolist() == 3 * [[0, 0]] + 4 * [[1, 0]] + [[0.5, 0.5]]


def test_all_blocks_selected_is_causal_attention():
    q, k, v = normal(1, 50, 4, 8), normal(1, 50, 2, 8, seed=1), normal(1, 50, 2, 8, seed=2)
    every = torch.arange(13, dtype=torch.int32).expand(1, 50, 2, 13).contiguous()
    torch.testing.assert_close(selected_attention(q, k, v, every, block=4), attention(q, k, v), rtol=1e-12, atol=1e-12)


def test_a_query_that_sees_nothing_gets_zero_and_finite_gradients():
    q, k, v = normal(1, 3, 2, 4), normal(1, 5, 1, 4, seed=1), normal(1, 5, 1, 4, seed=2)
    pads = torch.full((1, 3), -1)
    none = torch.full((1, 3, 1, 2), -1, dtype=torch.int32)
    for name in ("portable", "reference"):
        with backend.using(name):
            y, _ = compressed_attention(q, k, v, block=4, stride=2)
            z = selected_attention(q, k, v, none, block=2, positions=pads)
        assert not y.any() and not z.any()
        assert all(not g.any() for g in torch.autograd.grad((y + z).sum(), [q, k, v]))


def test_choices_carry_no_gradient():
    q, k = normal(1, 30, 2, 4), normal(1, 14, 1, 4, seed=1)
    y, indices = compressed_attention(q, k, k[..., :0], block=4, stride=2, n_selected=3, select_block=4)
    assert y.shape == (1, 30, 2, 0) and not indices.requires_grad


def test_huge_scores_stay_finite():
    q, k, v = (1e4 * normal(1, 90, 2, 8, seed=i, dtype=torch.float32).detach() for i in range(3))
    for t in (q, k, v):
        t.requires_grad_()
    y, indices = compressed_attention(q, k[:, :44], v[:, :44], block=4, stride=2, n_selected=4, select_block=4)
    for short in (0, 1000):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(portable, "SHORT", short)
            patch.setattr(portable, "SHORT_BY_BLOCK", 0)
            z = selected_attention(q, k, v, indices, block=4)
        assert all(g.isfinite().all() for g in torch.autograd.grad((y + z).sum(), [q, k, v], retain_graph=True))


def test_memory_is_far_from_a_score_matrix():
    """Forward and backward at 4096: less than a tenth of one T x S matrix of the four heads."""
    q, k, v = (normal(1, 4096, heads, 16, dtype=torch.float32) for heads in (4, 2, 2))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        y, indices = compressed_attention(q, k[:, :255], v[:, :255], block=32, stride=16, n_selected=16)
        torch.autograd.grad((y + selected_attention(q, k, v, indices, block=64)).sum(), [q, k, v])
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    assert most < 4 * 4096 * 4096 * 4 / 10


def test_flops_are_the_sum_over_pairs():
    cells = [(0, 3, SIZES[0]), *((40, offset, sizes) for offset in (0, 19) for sizes in SIZES)]
    for queries, offset, (block, stride, select, n) in cells:
        blocks = max(0, (queries + offset - block) // stride + 1)
        seen = sum(i * stride + block - 1 <= offset + t for t in range(queries) for i in range(blocks))
        assert op.compressed_pairs(queries, offset, block, stride, blocks) == seen
        chosen = 0
        for p in range(offset, offset + queries):
            own = p // select
            kept = {own, *range(min(own, n - 1))}
            chosen += sum(s // select in kept for s in range(p + 1))
        assert op.selected_pairs(queries, offset, select, n) == chosen


def test_counted_bytes_of_a_token_are_those_of_what_it_sees():
    """One query of 4 heads behind 999 tokens: 124 compressed blocks, three of 16 tokens and its own, partly."""
    q, k = torch.empty(1, 1, 4, 8, device="meta"), torch.empty(1, 1000, 2, 8, device="meta")
    kc = torch.empty(1, 124, 2, 8, device="meta")
    with flops.FlopCounter() as count:
        _, indices = compressed_attention(
            q, kc, kc, block=16, stride=8, n_selected=4, select_block=16, offset=999
        )
        assert count.attention_bytes == 4 * (2 * 4 * 8 + 2 * 124 * 2 * 8)
        selected_attention(q, k, k, indices, block=16, offset=999)
    keys = 3 * 16 + 999 % 16 + 1
    assert count.attention_bytes == 4 * (2 * (2 * 4 * 8) + 2 * (124 + keys) * 2 * 8)
    assert count.flops["selected_attention"] == 2 * 4 * 16 * keys


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(stride=3), "block=8 must be a multiple of stride=3"),
        (dict(select_block=6), "select_block=6 must be a multiple of stride=4"),
        (dict(block=0), "block=0 must be a whole number of at least 1"),
        (dict(n_selected=-1), "n_selected=-1 must be"),
        (dict(scale=math.inf), "scale=inf must be above 0"),
        (dict(offset=-1), "offset=-1 must be at least 0"),
        (dict(starts=torch.zeros(1, 9, dtype=torch.int32)), "starts need positions"),
        (dict(positions=torch.zeros(1, 8, dtype=torch.int32)), r"positions must be integers \[B, T\] = \[1, 9\]"),
    ],
)
def test_wrong_sizes_are_named(change, message):
    q, k = torch.zeros(1, 9, 2, 4), torch.zeros(1, 2, 1, 4)
    with pytest.raises(ValueError, match=message):
        compressed_attention(q, k, k, **dict(block=8, stride=4, select_block=8, n_selected=2) | change)


def test_wrong_shapes_are_named():
    q, k = torch.zeros(1, 9, 3, 4), torch.zeros(1, 9, 2, 4)
    indices = torch.zeros(1, 9, 2, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="H=3 query heads must be a multiple of G=2"):
        selected_attention(q, k, k, indices, block=4)
    with pytest.raises(ValueError, match=r"indices must be .* int32; got \[1, 9, 2, 1\] of torch.int64"):
        selected_attention(q[:, :, :2], k, k, indices.long(), block=4)
    with pytest.raises(ValueError, match="n=0 must be a whole number"):
        select_blocks(torch.zeros(1, 9, 2, 3), torch.zeros(1, 9), 0)
