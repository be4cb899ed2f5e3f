"""The Triton kernels of NSA's branches against the float64 definition: on the GPU, or in Triton's interpreter.

Error budget: where the definition, computed in the kernels' own dtype, is off by e, a kernel may be off by 2 e and one
rounding. Outputs lie between fences of NaN.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from kernels import backend
from kernels.sparse.op import compressed_attention, selected_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.usefixtures("small_tiles", "fences")


def example(queries, keys, heads, groups, width=16, values=16, dtype=torch.float32, batch=2):
    """q, k, v and the gradient of the result, in float64, exact in the dtype."""
    torch.manual_seed(queries + keys)
    shapes = (queries, heads, width), (keys, groups, width), (keys, groups, values), (queries, heads, values)
    return [torch.randn(batch, *s).to(dtype).double().to(DEVICE) for s in shapes]


def packed(block, stride):
    """Two rows of 20 tokens, documents of 9 and 10 and of 3 and 15, then pads: positions, and starts in tokens and in
    compressed blocks."""
    starts, slots, positions = (torch.zeros(2, 20, dtype=torch.int64) for _ in range(3))
    positions[:] = -1
    for row, lengths in enumerate(((9, 10), (3, 15))):
        token = slot = 0
        for length in lengths:
            part = slice(token, token + length)
            starts[row, part], slots[row, part], positions[row, part] = token, slot, torch.arange(length)
            token, slot = token + length, slot + max(0, (length - block) // stride + 1)
    return tuple(t.to(DEVICE) for t in (positions, starts, slots))


def results(op, name, precision, inputs, *rest, **options):
    """What the op gives and the gradients of q, k, v; floating results in float64."""
    *inputs, dy = (t.to(precision) for t in inputs)
    inputs = [t.clone().requires_grad_() for t in inputs]
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in inputs)
    with backend.using(name):
        found = op(q, k, v, *rest, **options)
    y, *choice = found if isinstance(found, tuple) else (found,)
    gradients = torch.autograd.grad(y, inputs, dy)
    return [t.detach().double() for t in (y, *gradients)], choice


def largest(x):
    return x.abs().max().item() if x.numel() else 0.0


def assert_within_budget(op, dtype, inputs, *rest, **options):
    truth, right_choice = results(op, "reference", torch.float64, inputs, *rest, **options)
    plain, _ = results(op, "reference", dtype, inputs, *rest, **options)
    got, choice = results(op, "triton", dtype, inputs, *rest, **options)
    for name, right, base, mine in zip(("y", "dq", "dk", "dv"), truth, plain, got, strict=True):
        rounding = 2 * torch.finfo(dtype).eps * max(1, largest(right))
        assert largest(mine - right) <= 2 * largest(base - right) + rounding, name
    assert all(torch.equal(a, b) for a, b in zip(choice, right_choice, strict=True))


# T, offset, heads, groups, block, stride, select_block, n: above 3, so that scores decide
COMPRESSED = {
    "a group of two": (40, 0, 4, 2, 4, 2, 4, 5),
    "a group of two, bfloat16": (40, 0, 4, 2, 4, 2, 4, 5),
    "no group": (40, 0, 2, 2, 4, 4, 8, 4),
    "a group of three, odd sizes": (37, 0, 3, 1, 6, 3, 6, 4),
    "selection blocks below compression blocks": (40, 0, 2, 1, 8, 2, 2, 5),
    "all blocks": (20, 0, 2, 1, 4, 2, 8, 16),
    "one query behind others": (1, 50, 8, 2, 4, 2, 8, 4),
    "shorter than a block": (3, 0, 2, 1, 4, 2, 8, 3),
}


@pytest.mark.parametrize("case", COMPRESSED)
def test_compressed_attention_and_its_choice_equal_the_definition(case):
    queries, offset, heads, groups, block, stride, select_block, n = COMPRESSED[case]
    dtype = torch.bfloat16 if "bfloat16" in case else torch.float32
    keys = max(0, (offset + queries - block) // stride + 1)
    inputs = example(queries, keys, heads, groups, dtype=dtype, batch=1)
    options = dict(block=block, stride=stride, n_selected=n, select_block=select_block, offset=offset)
    assert_within_budget(compressed_attention, dtype, inputs, **options)


def test_compressed_attention_stays_in_documents():
    positions, _, slots = packed(4, 2)
    inputs = example(20, 8, 4, 2)
    options = dict(block=4, stride=2, n_selected=5, select_block=2, positions=positions, starts=slots)
    assert_within_budget(compressed_attention, torch.float32, inputs, **options)


def test_equal_scores_take_the_lower_block():
    """Queries of 0: all weights are equal, so inner blocks tie."""
    q, k, v, dy = example(64, 31, 2, 1, batch=1)
    options = dict(block=4, stride=2, n_selected=5, select_block=8)
    inputs = [0 * q, k, v, dy]
    _, right = results(compressed_attention, "reference", torch.float64, inputs, **options)
    _, choice = results(compressed_attention, "triton", torch.float32, inputs, **options)
    assert torch.equal(choice[0], right[0]) and choice[0][0, -1, 0].tolist() == [0, 1, 2, 6, 7]


def test_no_width_of_values_gives_the_choice_alone():
    q, k, v, _ = (t.float() for t in example(40, 19, 2, 1, batch=1))
    options = dict(block=4, stride=2, n_selected=3, select_block=4)
    with backend.using("triton"):
        y, choice = compressed_attention(q, k, v[..., :0], **options)
        assert y.shape == (1, 40, 2, 0) and torch.equal(choice, compressed_attention(q, k, v, **options)[1])


def chosen(positions, groups, block, n):
    """Each query's own block and others at random, ascending, then -1: [B, T, G, n]."""
    make = torch.Generator().manual_seed(0)
    found = torch.full((*positions.shape, groups, n), -1, dtype=torch.int32)
    for b, t, g in torch.cartesian_prod(*map(torch.arange, found.shape[:3])).tolist():
        own = int(positions[b, t]) // block
        if own >= 0:
            others = torch.randperm(own, generator=make)[: n - 1]
            picked = torch.cat([others, torch.tensor([own])]).sort().values
            found[b, t, g, : len(picked)] = picked.int()
    return found.to(DEVICE)


# T, offset, heads, groups, K, V, block, n
SELECTED = {
    "a group of two": (20, 0, 4, 2, 16, 16, 4, 3),
    "a group of two, bfloat16": (20, 0, 2, 1, 16, 16, 4, 3),
    "no group, odd widths": (19, 0, 1, 1, 20, 9, 5, 2),
    "a group of three": (18, 0, 3, 1, 16, 16, 4, 4),
    "one query behind others": (1, 50, 8, 2, 16, 16, 8, 3),
    "a few queries and blocks of two tiles": (5, 76, 2, 1, 16, 16, 40, 2),
    "a group of more rows than a tile of 16": (12, 0, 18, 1, 16, 16, 4, 2),
}


@pytest.mark.parametrize("case", SELECTED)
def test_selected_attention_equals_the_definition(case):
    queries, offset, heads, groups, width, values, block, n = SELECTED[case]
    dtype = torch.bfloat16 if "bfloat16" in case else torch.float32
    inputs = example(queries, offset + queries, heads, groups, width, values, dtype, batch=1)
    indices = chosen(torch.arange(offset, offset + queries)[None], groups, block, n)
    assert_within_budget(selected_attention, dtype, inputs, indices, block=block, offset=offset)


def test_selected_attention_stays_in_documents():
    positions, starts, _ = packed(4, 2)
    inputs = example(20, 20, 2, 1)
    indices = chosen(positions, 1, 4, 2)
    places = dict(positions=positions, starts=starts)
    assert_within_budget(selected_attention, torch.float32, inputs, indices, block=4, **places)


def test_all_blocks_chosen_is_causal_attention():
    inputs = example(12, 12, 2, 1, batch=1)
    indices = torch.arange(3, dtype=torch.int32, device=DEVICE).expand(1, 12, 1, 3)
    got, _ = results(selected_attention, "triton", torch.float32, inputs, indices, block=4)
    q, k, v = (t.transpose(1, 2) for t in inputs[:3])
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    assert torch.allclose(got[0], y, atol=1e-6)


def test_two_runs_are_equal_to_the_last_bit():
    inputs = example(12, 12, 2, 1, batch=1)
    indices = chosen(torch.arange(12)[None], 1, 4, 2)
    first, second = (
        results(selected_attention, "triton", torch.float32, inputs, indices, block=4)[0] for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_compiled_without_a_break_equals_eager():
    q, k, v, _ = (t.float().requires_grad_() for t in example(12, 12, 2, 1, batch=1))

    def step(q, k, v):
        with backend.using("triton"):
            y, indices = compressed_attention(q, k[:, :5], v[:, :5], block=4, stride=2, n_selected=2, select_block=4)
            return y + selected_attention(q, k, v, indices, block=4)

    outcomes = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        y = function(q, k, v)
        outcomes.append([y, *torch.autograd.grad(y.square().sum(), (q, k, v))])
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))


def test_a_group_that_no_tile_holds_is_named():
    q, k, v, _ = (t.float() for t in example(3, 3, 65, 1, batch=1))
    indices = torch.zeros(1, 3, 1, 1, dtype=torch.int32, device=DEVICE)
    with backend.using("triton"), pytest.raises(ValueError, match="H=65 query heads must be at most 64 for each"):
        selected_attention(q, k, v, indices, block=4)
