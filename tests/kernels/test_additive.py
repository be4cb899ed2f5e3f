"""Additive attention: hand-worked values, the float64 definition, huge numbers, memory, bad input."""

from __future__ import annotations

import math
import re
from itertools import product

import pytest
import torch

from kernels import backend, flops
from kernels.additive.op import additive_attention
from kernels.bench import peak_bytes


def example(queries=5, keys=5, heads=2, width=4, values=3, batch=2, dtype=torch.float64, size=1.0):
    """q, k, v, weight, bias: with gradients."""
    make = torch.Generator().manual_seed(queries + keys)
    shapes = (batch, queries, heads, width), (batch, keys, heads, width), (batch, keys, heads, values)
    made = [torch.randn(s, generator=make, dtype=torch.float64) for s in (*shapes, (heads, width), (heads, width))]
    made[:2] = [size * t for t in made[:2]]
    return [t.to(dtype).requires_grad_() for t in made]


def run(name, inputs, **options):
    """y and the gradients of all inputs."""
    with backend.using(name):
        y = additive_attention(*inputs[:4], bias=inputs[4], **options)
    weight = torch.linspace(-1, 1, max(1, y.numel()), dtype=y.dtype)[: y.numel()].view(y.shape)
    return [y, *torch.autograd.grad((y * weight).sum(), inputs)]


def pairwise(q, k, v, weight, bias, sees):
    """The formula of appendix A.1.2, a pair at a time; `sees` (b, i, j) -> bool."""
    rows = []
    for b, i, h in product(*map(range, q.shape[:3])):
        seen = [j for j in range(k.shape[1]) if sees(b, i, j)]
        scores = [(weight[h] * torch.tanh(q[b, i, h] + k[b, j, h] + bias[h])).sum() for j in seen]
        shares = torch.stack(scores).softmax(0) if seen else []
        rows.append(sum((p * v[b, j, h] for p, j in zip(shares, seen, strict=True)), v.new_zeros(v.shape[3])))
    return torch.stack(rows).view(*q.shape[:3], v.shape[3])


MASKS = {
    "causal": (dict(), lambda b, i, j, gap: j <= i + gap),
    "both ways": (dict(causal=False), lambda b, i, j, gap: True),
    "window": (dict(window=2), lambda b, i, j, gap: 0 <= i + gap - j < 2),
    "window both ways": (dict(window=2, causal=False), lambda b, i, j, gap: abs(i + gap - j) < 2),
}


@pytest.mark.parametrize("name", ["reference", "portable"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("lengths", [(1, 1), (5, 5), (3, 7), (7, 3)])
def test_values_equal_the_formula_pair_by_pair(name, mask, lengths):
    inputs = example(*lengths)
    options, sees = MASKS[mask]
    y = run(name, inputs, **options)[0]
    gap = lengths[1] - lengths[0]
    assert torch.allclose(y, pairwise(*inputs, lambda b, i, j: sees(b, i, j, gap)), rtol=0, atol=1e-12)


def test_by_hand():
    """One channel, weight ln 3 / tanh(1): keys 1 and -1 get scores +-ln 3 and shares 9/10 and 1/10."""
    weight = torch.tensor([[math.log(3) / math.tanh(1)]])
    q, k = torch.zeros(1, 1, 1, 1), torch.tensor([1.0, -1.0]).view(1, 2, 1, 1)
    y = additive_attention(q, k, torch.tensor([10.0, 20.0]).view(1, 2, 1, 1), weight)
    assert torch.allclose(y, torch.tensor(11.0))


def places(queries, keys):
    """Documents with pads, and keys in the order of a ring: another one in each row."""
    ids = torch.tensor([0, 0, 1, 1, 2], dtype=torch.int32).repeat_interleave(-(-max(queries, keys) // 5))
    ids = torch.stack([ids, ids.flip(0)])
    ring = torch.stack([torch.arange(keys).roll(5), torch.arange(keys).roll(-7)])
    return dict(
        q_documents=ids[:, :queries], k_documents=ids[:, :keys].gather(1, ring),
        q_positions=torch.arange(keys - queries, keys).expand(2, -1), k_positions=ring,
    )  # fmt: skip


@pytest.mark.parametrize("placed", [False, True], ids=["aligned", "placed"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("lengths", "size"), [((1, 40), 1.0), ((33, 33), 1.0), ((40, 17), 1.0), ((17, 600), 1.0), ((33, 33), 300.0)]
)
def test_gradients_match_the_definition(placed, mask, lengths, size):
    """At size 300 exponentials leave their range; several blocks of 16 queries, several tiles of 256 keys."""
    options = MASKS[mask][0] | (places(*lengths) if placed else {})
    inputs = example(*lengths, size=size)
    for got, right in zip(run("portable", inputs, **options), run("reference", inputs, **options), strict=True):
        assert torch.allclose(got, right, rtol=0, atol=1e-11 * max(1, right.abs().max().item()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_is_within_twice_that_of_the_definition_in_the_same_precision(dtype):
    given = example(70, 70, width=16, values=8, dtype=dtype)
    wide = [t.detach().double().requires_grad_() for t in given]
    truths = run("reference", wide), run("reference", given)
    for got, right, plain in zip(run("portable", given), *truths, strict=True):
        rounding = torch.finfo(dtype).eps * right.abs().amax()
        assert (got - right).abs().amax() <= 2 * (plain - right).abs().amax() + rounding


@pytest.mark.parametrize("name", ["reference", "portable"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_huge_scores_stay_finite(name, dtype):
    """Large queries and opposite keys cancel exactly; large weights make one key win."""
    q, k, v, weight, bias = example(9, 9, dtype=dtype)
    for shift in (1e2, 1e4, 1e30):
        far = [(q + shift).detach().requires_grad_(), (k - shift).detach().requires_grad_(), v, weight, bias]
        assert all(t.isfinite().all() for t in run(name, far))
    sharp = [q, k, v, (1e30 * weight).detach().requires_grad_(), bias]
    assert all(t.isfinite().all() for t in run(name, sharp))
    shifted = [(q + 64).detach().requires_grad_(), (k - 64).detach().requires_grad_(), v, weight, bias]
    for near, other in zip(run(name, shifted), run("reference", [q, k, v, weight, bias]), strict=True):
        assert torch.allclose(near, other, atol=1e3 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("name", ["reference", "portable"])
@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (5, 0), (0, 0)])
def test_empty_sides(name, queries, keys):
    y, *gradients = run(name, example(queries, keys))
    assert y.shape == (2, queries, 2, 3) and not y.any() and not any(g.any() for g in gradients)


def test_a_query_that_sees_nothing_gives_zero_and_no_gradient():
    inputs = example(4, 4)
    ids = torch.tensor([[1, 0, 1, 2], [1, 1, 1, 1]], dtype=torch.int32)
    for name in ("reference", "portable"):
        y, dq, *rest = run(name, inputs, q_documents=ids, k_documents=ids.clamp(max=1))
        assert not y[0, [1, 3]].any() and not dq[0, [1, 3]].any() and all(t.isfinite().all() for t in rest)


def test_compiled_without_a_break_equals_eager():
    inputs = example(20, 20)
    call = torch.compile(additive_attention, fullgraph=True, backend="aot_eager")
    results = [f(*inputs[:4], bias=inputs[4], window=7) for f in (call, additive_attention)]
    grads = [torch.autograd.grad(y.square().sum(), inputs) for y in results]
    assert torch.equal(*results) and all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.slow
def test_memory_grows_with_the_lengths_and_stays_below_a_block_of_pairs():
    """Forward and backward; all pairs of 2048 tokens and 16 channels would take 256 MB."""
    inputs = [example(n, n, 1, 16, 16, 1, torch.float32) for n in (512, 2048)]
    small, large = (peak_bytes(lambda given=given: run("portable", given)) for given in inputs)
    assert large < 4 * small and large < 8 * 2**20


def test_flops_count_adds_and_tanh():
    """Causal, 3 tokens: 6 pairs of 2 heads: 4 channels an add, a tanh, a multiply-add; a multiply-add for 3 values."""
    inputs = [t.detach().to("meta") for t in example(3, 3, batch=1)]
    with flops.FlopCounter() as count:
        y = additive_attention(*inputs[:4])
    assert count.total == 6 * 2 * (4 * (1 + 1 + 2) + 3 * 2) and y.shape == (1, 3, 2, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(q=torch.zeros(1, 3, 2)), "wants q [B, T, H, A], k [B, S, H, A], v [B, S, H, V]; got [1, 3, 2]"),
        (dict(k=torch.zeros(1, 3, 2, 5)), "wants q [B, T, H, A]"),
        (dict(v=torch.zeros(1, 3, 2, 4).double()), "one floating dtype; got torch.float32, torch.float32"),
        (dict(weight=torch.zeros(4)), "weight must be floating [H, A] = [2, 4]; got [4]"),
        (dict(bias=torch.zeros(2, 3)), "bias must be floating [H, A] = [2, 4]; got [2, 3]"),
        (dict(window=0), "window=0 must be a whole number of at least 1"),
        (dict(q_positions=torch.zeros(1, 3).long()), "give q_positions and k_positions together"),
        (dict(q_documents=torch.zeros(1, 4).int()), "q_documents must be integers [1, 3]; got torch.int32 [1, 4]"),
        (dict(tanh="fast"), "tanh='fast' is unknown; allowed: exact, approximate"),
        (dict(tanh="approximate"), "which the Triton kernels alone have; here runs kernels.additive.portable on cpu"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else None,
)
def test_what_does_not_fit_is_named(change, message):
    given = dict(zip(("q", "k", "v"), torch.zeros(3, 1, 3, 2, 4), strict=True), weight=torch.zeros(2, 4)) | change
    with pytest.raises(ValueError, match=re.escape(message)):
        additive_attention(given.pop("q"), given.pop("k"), given.pop("v"), given.pop("weight"), **given)
