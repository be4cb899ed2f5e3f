"""kernels/ssm/ssd against sums over pairs, in float64."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from kernels import backend, flops
from kernels.linear import portable
from kernels.ssm.ssd import ssd


@pytest.fixture(params=("portable", "reference"))
def implementation(request):
    with backend.using(request.param):
        yield request.param


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(portable, "CHUNK", 4)


def inputs(time=11, batch=2, heads=4, groups=2, width=3, state_dim=5, grad=False, dtype=torch.float64):
    """x, dt, a, b, c"""
    torch.manual_seed(time)
    shapes = (batch, time, heads, width), (batch, time, heads), (heads,), *[(batch, time, groups, state_dim)] * 2
    x, dt, a, b, c = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    return [t.to(dtype).requires_grad_(grad) for t in (x, dt.abs(), -a.abs(), b, c)]


def by_pairs(x, dt, a, b, c, d, ids=None):
    """d x_i + sum_j (c_i . b_j) exp(a * sum of dt over (j, i]) dt_j x_j over visible j."""
    y = torch.zeros_like(x)
    for r, h, i in ((r, h, i) for r in range(x.shape[0]) for h in range(x.shape[2]) for i in range(x.shape[1])):
        if ids is not None and ids[r, i] == 0:
            continue
        group = h * b.shape[2] // x.shape[2]
        y[r, i, h] = d[h] * x[r, i, h]
        for j in range(i + 1):
            if ids is None or ids[r, i] == ids[r, j]:
                weight = c[r, i, group] @ b[r, j, group] * torch.exp(a[h] * dt[r, j + 1 : i + 1, h].sum())
                y[r, i, h] += weight * dt[r, j, h] * x[r, j, h]
    return y


IDS = torch.tensor([[1, 1, 1, 2, 2, 2, 2, 2, 5, 0, 0], [3, 3, 3, 3, 3, 3, 3, 4, 4, 4, 4]], dtype=torch.int32)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_equals_sum_over_pairs(implementation, small_chunks, packed, groups):
    x, dt, a, b, c = inputs(groups=groups)
    d, ids = torch.randn(4).double(), IDS if packed else None
    y, state = ssd(x, dt, a, b, c, d=d, documents=ids)
    assert torch.allclose(y, by_pairs(x, dt, a, b, c, d, ids), atol=1e-12) and state.shape == (2, 4, 3, 5)
    alone, none = ssd(x, dt, a, b, c, d=d[:, None].expand(4, 3), documents=ids, return_state=False)
    assert torch.allclose(alone, y, atol=1e-12) and none is None


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("cuts", [[0, 5, 11], [*range(12)], [0, 0, 9, 11]], ids=str)
def test_state_carries_over_any_cut(implementation, small_chunks, packed, cuts):
    x, dt, a, b, c = inputs()
    whole, end = ssd(x, dt, a, b, c, documents=IDS if packed else None)
    state, pieces, document = None, [], torch.zeros(2, dtype=torch.int32)
    for i, j in pairwise(cuts):
        part = dict(documents=IDS[:, i:j], document=document) if packed else {}
        y, state = ssd(x[:, i:j], dt[:, i:j], a, b[:, i:j], c[:, i:j], state=state, **part)
        pieces.append(y)
        document = IDS[:, :j].amax(1) if j else document
    assert torch.allclose(torch.cat(pieces, 1), whole, atol=1e-12) and torch.allclose(state, end, atol=1e-12)


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_pass_through_state_in_and_out(implementation, small_chunks, packed):
    x, dt, a, b, c = inputs(time=6, batch=1, heads=2, groups=1, width=2, state_dim=2, grad=True)
    d, state = torch.rand(2).double().requires_grad_(), torch.rand(1, 2, 2, 2).double().requires_grad_()
    part = dict(documents=torch.tensor([[2, 2, 2, 3, 3, 0]]), document=torch.tensor([2])) if packed else {}

    def run(x, dt, a, b, c, d, state):
        return ssd(x, dt, a, b, c, d=d, state=state, **part)

    assert torch.autograd.gradcheck(run, (x, dt, a, b, c, d, state))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("decay", [0.3, 1.9, 9.0])
@pytest.mark.parametrize("groups", [1, 4])
def test_gradients_equal_those_of_the_recurrence(packed, decay, groups):
    """Of decays that a chunk, or half of one, is taken apart for, and of stronger ones; some steps are 0."""
    x, dt, a, b, c = inputs(time=75, groups=groups)
    dt, a, state = (dt / dt.max()).where(dt > 0.2, 0), decay * a / a.abs().max(), torch.randn(2, 4, 3, 5).double()
    tensors = [t.requires_grad_() for t in (x, dt, a, b, c, state)]
    ids = torch.tensor([[4] * 20 + [5] * 40 + [0] * 15, [1] * 64 + [2] * 11])
    part = dict(documents=ids, document=torch.tensor([4, 3])) if packed else {}

    def gradients(name):
        with backend.using(name):
            outputs = ssd(*tensors[:5], state=state, **part)
        torch.manual_seed(0)
        return torch.autograd.grad(outputs, tensors, [torch.randn(t.shape).double() for t in outputs])

    for got, expected in zip(gradients("portable"), gradients("reference"), strict=True):
        assert (got - expected).norm() < 1e-12 * expected.norm()


def test_strong_and_long_decays_are_finite_and_right():
    """C09: -8 a step over 4096 steps, and steps of 2 with A = -16."""
    x, dt, a, b, c = inputs(time=4096, batch=1, heads=2, groups=1)
    dt, a = torch.full_like(dt, 2.0), torch.tensor([-4.0, -16.0]).double()
    with backend.using("reference"):
        expected, end = ssd(x, dt, a, b, c)
    y, state = ssd(*(t.float() for t in (x, dt, a, b, c)))
    assert (y - expected).abs().max() < 1e-5 * expected.abs().max()
    assert (state - end).abs().max() < 1e-5 * end.abs().max()


def test_what_stands_at_pads_is_not_looked_at(implementation, small_chunks):
    x, dt, a, b, c = inputs()
    clean, end = ssd(x, dt, a, b, c, documents=IDS)
    pads = IDS == 0
    for tensor in (x, dt, b, c):
        tensor[pads] = torch.nan
    y, state = ssd(x, dt, a, b, c, documents=IDS)
    assert torch.equal(y, clean) and torch.equal(state, end)


def test_half_precision_inputs_keep_a_wide_state(implementation):
    x, dt, a, b, c = inputs()
    y, state = ssd(x.bfloat16(), dt.float(), a.float(), b.bfloat16(), c.bfloat16())
    assert y.dtype == torch.bfloat16 and state.dtype == torch.float32


def test_what_half_precision_cannot_hold_is_there_on_demand(implementation):
    x, dt, a, b, c = inputs()
    x, b, c = x.half(), (400 * b).half(), (400 * c).half()
    exact, _ = ssd(x.double(), dt, a, b.double(), c.double())
    y, _ = ssd(x, dt.float(), a.float(), b, c, dtype=torch.float32)
    assert y.dtype == torch.float32 and exact.abs().max() > 65_504
    assert (y - exact).abs().max() < 1e-5 * exact.abs().max()


def test_flops_are_the_multiply_adds_of_the_recurrence():
    x, dt, a, b, c = inputs()
    count = 0
    for _ in range(2 * 11 * 4):
        count += 3 * 5 + 3 * 5  # h += dt x b^T, then h c
    with flops.FlopCounter() as counter:
        y, state = ssd(x, dt, a, b, c)
    assert counter.flops == {"ssd": 2 * count} and y.shape == x.shape and state.shape == (2, 4, 3, 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(state=torch.zeros(2, 4, 5, 3).double()), r"state must have shape \[2, 4, 3, 5\]; got \[2, 4, 5, 3\]"),
        (dict(state=torch.zeros(1, 4, 3, 5).double()), r"state must have shape \[2, 4, 3, 5\]; got \[1, 4, 3, 5\]"),
        (dict(state=torch.zeros(2, 4, 3, 5)), "state must be of dtype torch.float64 or wider"),
        (dict(state=torch.zeros(2, 4, 3, 5).double(), documents=IDS), "needs `document`"),
        (dict(d=torch.zeros(3)), r"d must have shape \[4\] or \[4, 3\]; got \[3\]"),
    ],
    ids=lambda part: None if isinstance(part, dict) else part[:12],
)
def test_bad_input_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        ssd(*inputs(), **change)


def test_groups_must_divide_heads():
    with pytest.raises(ValueError, match="H=4 heads of x must be a multiple of G=3 groups of b and c"):
        ssd(*inputs(groups=3))


def test_gradients_of_strong_decays_keep_their_digits():
    """What little crosses a strong decay is no difference of large sums: as exact as the recurrence in fp32."""

    def slopes(dtype, name, seed):
        make = torch.Generator().manual_seed(seed)
        normal = lambda *shape: torch.randn(shape, generator=make).to(dtype)  # noqa: E731
        x, b, c, weight = normal(2, 64, 3, 4), normal(2, 64, 1, 5), normal(2, 64, 1, 5), normal(2, 64, 3, 4)
        dt, a = 3 + normal(2, 64, 3).sigmoid(), torch.tensor([-0.5, -2.0, -4.0], dtype=dtype, requires_grad=True)
        with backend.using(name):
            y, _ = ssd(x, dt, a, b, c)
        return torch.autograd.grad((y * weight).sum(), a)[0].double()

    truth = torch.stack([slopes(torch.float64, "reference", seed) for seed in range(4)])
    errors = []
    for name in ("portable", "reference"):
        found = torch.stack([slopes(torch.float32, name, seed) for seed in range(4)])
        errors.append(((found - truth).abs().sum(0) / truth.abs().sum(0)).max())
    assert errors[0] < 4 * errors[1]
