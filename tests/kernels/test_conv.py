"""kernels/conv against sums over taps."""

from __future__ import annotations

import pytest
import torch

from kernels import backend, flops
from kernels.conv.op import causal_conv

IDS = torch.tensor([[1, 1, 2, 2, 2, 0], [3, 3, 3, 3, 4, 4]], dtype=torch.int32)


def by_taps(x, weight, bias, tail, ids, tail_ids):
    batch, time, _ = x.shape
    width = len(weight)
    inputs = torch.cat([tail, x], 1)
    all_ids = torch.cat([tail_ids, ids], 1)
    y = bias.expand_as(x).clone()
    for b in range(batch):
        for t in range(time):
            for i in range(width):
                if all_ids[b, t + i] == ids[b, t]:
                    y[b, t] += weight[i] * inputs[b, t + i]
    return y


@pytest.mark.parametrize("implementation", ["portable", "reference"])
@pytest.mark.parametrize("width", [1, 2, 4, 9])
@pytest.mark.parametrize("packed", [False, True])
def test_equals_sum_over_taps(implementation, width, packed):
    torch.manual_seed(width)
    x, weight, bias = torch.randn(2, 6, 3).double(), torch.randn(width, 3).double(), torch.randn(3).double()
    tail = torch.randn(2, width - 1, 3).double()
    ids = IDS if packed else torch.ones_like(IDS)
    tail_ids = (
        torch.randint(0, 3, (2, width - 1), dtype=torch.int32)
        if packed
        else torch.ones(2, width - 1, dtype=torch.int32)
    )
    expected = by_taps(x, weight, bias, tail, ids, tail_ids)
    with backend.using(implementation):
        got = causal_conv(
            x, weight, bias, tail=tail, **(dict(documents=ids, tail_documents=tail_ids) if packed else {})
        )
    real = ids > 0
    assert torch.allclose(got[real], expected[real], atol=1e-12)


def results(implementation, x, weight, bias, tail, ids, tail_ids):
    """y and all gradients."""
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias, tail)]
    places = {} if ids is None else dict(documents=ids, tail_documents=tail_ids)
    with backend.using(implementation):
        y = causal_conv(*leaves[:3], tail=leaves[3], **places)
    torch.manual_seed(0)
    return [y, *torch.autograd.grad(y, leaves, torch.randn_like(y), materialize_grads=True)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("time", "before"), [(0, 2), (1, 0), (1, 2), (1, 4), (2, 1), (3, 4), (6, 0), (6, 3)])
def test_gradients_match_definition(time, before, packed):
    """Five taps: pieces shorter than that, with tails as short."""
    torch.manual_seed(time)
    x, weight, bias, tail = (torch.randn(s).double() for s in ((2, time, 3), (5, 3), (3,), (2, before, 3)))
    tail_ids = torch.tensor([[7, 7, 1, 1], [0, 0, 0, 3]])[:, 4 - before :]
    places = (IDS[:, :time], tail_ids) if packed else (None, None)
    right = results("reference", x, weight, bias, tail, *places)
    for got, wanted in zip(results("portable", x, weight, bias, tail, *places), right, strict=True):
        assert torch.allclose(got, wanted, atol=1e-12)


@pytest.mark.parametrize("time", [1, 6])
def test_what_another_document_holds_does_not_matter_even_if_it_is_no_number(time):
    tail = torch.full((1, 3, 2), float("nan"))
    ids = torch.full((1, time), 2)
    x, weight = torch.randn(1, time, 2, requires_grad=True), torch.randn(4, 2, requires_grad=True)
    y = causal_conv(x, weight, tail=tail, documents=ids, tail_documents=ids.new_ones(1, 3))
    assert torch.allclose(y, causal_conv(x, weight), atol=1e-6)
    assert all(g.isfinite().all() for g in torch.autograd.grad(y.sum(), (x, weight)))


def test_strides_of_input_and_gradient_do_not_matter():
    x, dy = (torch.randn(2, 3, 6).double().transpose(1, 2) for _ in range(2))
    weight = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    found = []
    for convert in (lambda t: t, torch.Tensor.contiguous):
        leaf = convert(x).requires_grad_()
        found.append(torch.autograd.grad(causal_conv(leaf, weight), (leaf, weight), convert(dy)))
    assert all(torch.allclose(strided, dense) for strided, dense in zip(*found, strict=True))


def test_gradients_of_gradients_are_refused_and_not_wrong():
    x, weight = torch.randn(1, 5, 2, requires_grad=True), torch.randn(4, 2)
    (gradient,) = torch.autograd.grad(causal_conv(x, weight).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_sums_are_wide_and_the_result_has_the_dtype_of_x():
    """1 + 256 ones: in bfloat16, each added to the sum so far, they would stay 256."""
    x = torch.ones(1, 257, 1, dtype=torch.bfloat16)
    y = causal_conv(x, torch.ones(257, 1))
    assert y.dtype == torch.bfloat16 and y[0, -1, 0] == torch.tensor(257.0).bfloat16()
    x = torch.ones(1, 300, 1, dtype=torch.bfloat16)
    assert causal_conv(x, torch.ones(300, 1))[0, -1, 0] == 300


def test_last_tap_is_the_present_token():
    x = torch.tensor([[[1.0], [10.0], [100.0]]])
    assert causal_conv(x, torch.tensor([[2.0], [1.0]])).flatten().tolist() == [1, 12, 120]


def test_gradients_match_finite_differences():
    x, weight, tail = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 6, 2), (3, 2), (2, 2, 2)))
    tail_ids = torch.tensor([[0, 1], [3, 3]], dtype=torch.int32)
    assert torch.autograd.gradcheck(
        lambda x, w, t: causal_conv(x, w, tail=t, documents=IDS, tail_documents=tail_ids), (x, weight, tail)
    )


@pytest.mark.parametrize(("time", "width"), [(1, 4), (3, 4), (9, 4), (5, 1), (0, 3)])
def test_flops_count_the_taps_inside_the_row(time, width):
    for before in range(width):
        taps = sum(1 for t in range(time) for i in range(width) if t - i >= -before)
        with flops.FlopCounter() as counter:
            causal_conv(torch.empty(2, time, 3), torch.empty(width, 3), tail=torch.empty(2, before, 3))
        assert counter.total == 2 * 2 * 3 * taps


def test_a_short_tail_is_one_with_zeros_in_front():
    x, weight, tail = torch.randn(2, 5, 3), torch.randn(4, 3), torch.randn(2, 1, 3)
    full = torch.cat([torch.zeros(2, 2, 3), tail], 1)
    assert torch.equal(causal_conv(x, weight, tail=tail), causal_conv(x, weight, tail=full))


def test_bad_input_is_named():
    x = torch.zeros(1, 4, 3)
    with pytest.raises(ValueError, match=r"weight must be \[W, 3\]"):
        causal_conv(x, torch.zeros(4, 2))
    with pytest.raises(ValueError, match=r"weight must be \[W, 3\].* got \[3\]"):
        causal_conv(x, torch.zeros(3))
    with pytest.raises(ValueError, match="tail must have shape"):
        causal_conv(x, torch.zeros(4, 3), tail=torch.zeros(1, 4, 3))
    with pytest.raises(ValueError, match=r"bias must be \[3\] for x \[1, 4, 3\]; got \[1\]"):
        causal_conv(x, torch.zeros(4, 3), torch.zeros(1))
    ids = torch.ones(1, 4)
    with pytest.raises(ValueError, match=r"documents must have shape \[1, 4\]; got \[1, 3\]"):
        causal_conv(x, torch.zeros(4, 3), documents=ids[:, :3])
    with pytest.raises(ValueError, match=r"needs `tail_documents` \[1, 2\]; got None"):
        causal_conv(x, torch.zeros(4, 3), tail=x[:, :2], documents=ids)
