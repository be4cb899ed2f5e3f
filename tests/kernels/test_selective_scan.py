"""kernels/ssm's selective scan against sums over pairs of tokens, in float64."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from kernels import backend, flops
from kernels.ssm import scan_portable
from kernels.ssm.scan import selective_scan

NAMES = ("x", "dt", "a", "b", "c", "d", "state")


@pytest.fixture(params=("portable", "reference"))
def implementation(request, monkeypatch):
    monkeypatch.setattr(scan_portable, "PIECE", 4)
    with backend.using(request.param):
        yield request.param


def inputs(time=11, batch=2, width=3, states=4, dtype=torch.float64, grad=False):
    """x, dt, a, b, c, d, state."""
    make = torch.Generator().manual_seed(time)
    normal = lambda *shape: torch.randn(shape, generator=make, dtype=torch.float64)  # noqa: E731
    found = (
        normal(batch, time, width),
        normal(batch, time, width).abs(),
        -normal(width, states).exp(),
        normal(batch, time, states),
        normal(batch, time, states),
        normal(width),
        normal(batch, width, states),
    )
    return {n: t.to(dtype).requires_grad_(grad) for n, t in zip(NAMES, found, strict=True)}


def call(arguments, **options):
    """`selective_scan` of named tensors."""
    x, dt, a, b, c = (arguments[name] for name in NAMES[:5])
    return selective_scan(x, dt, a, b, c, **{n: arguments.get(n) for n in NAMES[5:]}, **options)


def by_pairs(x, dt, a, b, c, d, state, ids=None, document=None):
    """y_i = sum over visible j <= i of exp(a (dt_{j+1} + .. + dt_i)) dt_j x_j (b_j . c_i), and the state."""
    batch, time, _ = x.shape
    ids = torch.ones(batch, time, dtype=torch.int32) if ids is None else ids
    document = torch.ones(batch) if document is None else document
    dt = dt.masked_fill(ids[..., None] == 0, 0)
    y = torch.zeros_like(x)
    for row in range(batch):
        for i in range(time):
            if not ids[row, i]:
                continue
            y[row, i] = d * x[row, i]
            for j in range(i + 1):
                if ids[row, j] == ids[row, i]:
                    decay = torch.exp(a * dt[row, j + 1 : i + 1].sum(0)[:, None])
                    y[row, i] += dt[row, j] * x[row, j] * (decay @ (b[row, j] * c[row, i]))
            if document[row] == ids[row, i]:
                y[row, i] += (torch.exp(a * dt[row, : i + 1].sum(0)[:, None]) * state[row]) @ c[row, i]
    return y


IDS = torch.tensor([[1, 1, 1, 2, 2, 2, 2, 2, 5, 0, 0], [3, 3, 3, 3, 3, 3, 3, 4, 4, 4, 4]], dtype=torch.int32)


@pytest.mark.parametrize("document", [None, (1, 2), (0, 3)], ids=str)
def test_equals_sum_over_pairs(implementation, document):
    """Without documents, and with a state of the first document, of an earlier one, of none."""
    arguments = inputs()
    packing = {} if document is None else dict(documents=IDS, document=torch.tensor(document))
    y, _ = call(arguments, **packing)
    expected = by_pairs(*arguments.values(), packing.get("documents"), packing.get("document"))
    assert torch.allclose(y, expected, atol=1e-12)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("cuts", [[0, 5, 11], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [0, 0, 9, 11]], ids=str)
def test_state_carries_over_any_cut(implementation, packed, cuts):
    arguments = inputs()
    first = torch.tensor([1, 2])
    whole = call(arguments, **(dict(documents=IDS, document=first) if packed else {}))
    state, pieces = arguments["state"], []
    for start, end in pairwise(cuts):
        part = {n: t[:, start:end] if n in ("x", "dt", "b", "c") else t for n, t in arguments.items()}
        document = torch.where(IDS[:, :start].amax(1) > 0, IDS[:, :start].amax(1), first) if start else first
        packing = dict(documents=IDS[:, start:end], document=document) if packed else {}
        y, state = call(part | {"state": state}, **packing)
        pieces.append(y)
    assert torch.allclose(torch.cat(pieces, 1), whole[0], atol=1e-12) and torch.allclose(state, whole[1], atol=1e-12)


def test_padding_changes_nothing(implementation):
    """C39: a pad takes no decay step and gives nothing, whatever stands there."""
    arguments = inputs()
    other = {n: t.clone() for n, t in arguments.items()}
    for name in ("x", "dt", "b", "c"):
        other[name][0, 9:] = float("nan")
    ids, document = IDS[:1], torch.tensor([1])
    rows = [{n: t if n in ("a", "d") else t[:1] for n, t in them.items()} for them in (arguments, other)]
    (y, state), (y_other, state_other) = (call(row, documents=ids, document=document) for row in rows)
    short = {n: t[:, :9] if n in ("x", "dt", "b", "c") else t for n, t in rows[0].items()}
    alone, state_alone = call(short, documents=ids[:, :9], document=document)
    assert torch.equal(y, y_other) and torch.equal(state, state_other) and torch.equal(state, state_alone)
    assert torch.equal(y[:, :9], alone) and not y[:, 9:].any()


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_pass_through_state_in_and_out(implementation, packed):
    arguments = inputs(time=6, batch=1, width=2, states=2, grad=True)
    packing = dict(documents=torch.tensor([[2, 2, 2, 3, 3, 0]]), document=torch.tensor([2])) if packed else {}
    run = lambda *tensors: call(dict(zip(NAMES, tensors, strict=True)), **packing)  # noqa: E731
    assert torch.autograd.gradcheck(run, tuple(arguments.values()))


@pytest.mark.parametrize("time", [1, 2, 31, 32, 33, 63, 127])
def test_pieces_equal_recurrence_at_odd_lengths(time):
    arguments = inputs(time=time, grad=True)
    results = []
    for name in ("portable", "reference"):
        with backend.using(name):
            y, state = call(arguments)
        results.append((y, state, *torch.autograd.grad(y.square().sum() + state.sum(), list(arguments.values()))))
    assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-10) for a, b in zip(*results, strict=True))


def test_large_steps_and_strong_decay_stay_right():
    """C09: steps up to 2, decays of -8 a step and more, over 4096 steps; gradients against those of float64."""
    make = torch.Generator().manual_seed(0)
    arguments = inputs(time=4096, batch=1)
    arguments["dt"] = 2 * torch.rand(1, 4096, 3, generator=make, dtype=torch.float64)
    arguments["dt"][:, ::5] = 2
    arguments["a"] = -torch.tensor([0.02, 0.5, 4.0, 16.0]).double().repeat(3, 1)
    results = []
    for dtype in (torch.float32, torch.float64):
        tensors = {n: t.to(dtype).requires_grad_() for n, t in arguments.items()}
        y, state = call(tensors)
        results.append((y, state, *torch.autograd.grad(y.sum() + state.sum(), list(tensors.values()))))
    with backend.using("reference"), torch.no_grad():
        results[1] = (*call(arguments), *results[1][2:])
    for got, expected in zip(*results, strict=True):
        assert torch.isfinite(got).all() and (got - expected).norm() < 1e-5 * expected.norm()


def test_strides_do_not_matter(implementation):
    """C32."""
    arguments = inputs()
    strided = {n: t.transpose(0, -1).contiguous().transpose(0, -1) for n, t in arguments.items()}
    assert all(torch.equal(a, b) for a, b in zip(call(arguments), call(strided), strict=True))


def test_an_empty_batch_or_row_is_an_empty_result(implementation):
    arguments = inputs(time=0)
    y, state = call(arguments)
    assert y.shape == (2, 0, 3) and torch.equal(state, arguments["state"])
    y, state = call(inputs(batch=0))
    assert y.shape == (0, 11, 3) and state.shape == (0, 3, 4)


def test_sums_are_at_least_fp32(implementation):
    arguments = inputs(dtype=torch.float32)
    narrow = arguments | {n: arguments[n].bfloat16() for n in ("x", "b", "c")}
    y, state = call(narrow)
    rounded = {n: t.float() for n, t in narrow.items()}
    expected, expected_state = call(rounded)
    assert y.dtype == torch.bfloat16 and state.dtype == torch.float32
    assert torch.equal(y, expected.bfloat16()) and torch.equal(state, expected_state)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(call(rounded)[0], expected)


def test_only_a_wanted_state_is_given():
    y, state = call(inputs(), return_state=False)
    assert state is None and torch.equal(y, call(inputs())[0])


def test_the_operator_is_registered_right():
    """torch's own check: schema, fake tensors, gradients, tracing."""
    arguments = inputs(time=40, grad=True)
    fresh = torch.zeros(2, 40, dtype=torch.bool)
    torch.library.opcheck(torch.ops.mixerlab.selective_scan_portable.default, (*arguments.values(), fresh))


def test_flops_are_the_multiply_adds_of_the_recurrence():
    batch, time, width, states = 2, 7, 3, 4
    count = 0
    for _ in range(batch * time * width):
        count += states + states  # h += taken b, then h . c
    arguments = inputs(time, batch, width, states)
    with flops.FlopCounter() as counter:
        y, state = call(arguments)
    assert counter.total == 2 * count and y.shape == (2, 7, 3) and state.shape == (2, 3, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(state=torch.zeros(3, 3, 4).double()), r"state must have shape \[2, 3, 4\]; got \[3, 3, 4\]"),
        (dict(state=torch.zeros(2, 3, 4).bfloat16()), "state must be of dtype torch.float64 or wider .* got"),
        (dict(dt=torch.zeros(2, 11, 3).half()), "dt must be of dtype torch.float64 or wider"),
        (dict(dt=torch.zeros(2, 10, 3).double()), r"dt must have shape \[2, 11, 3\]"),
        (dict(a=torch.zeros(3, 5).double()), r"b must have shape \[2, 11, 5\]"),
        (dict(b=torch.zeros(2, 11, 4)), "x, b, c must have one floating dtype"),
        (dict(d=torch.zeros(4).double()), r"d must have shape \[3\]"),
        (dict(x=torch.zeros(2, 11).double()), r"wants x \[B, T, D\]"),
    ],
    ids=lambda part: next(iter(part)) if isinstance(part, dict) else part[:8],
)
def test_bad_input_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        call(inputs() | change)


def test_a_state_without_its_document_is_named():
    with pytest.raises(ValueError, match="needs `document`"):
        call(inputs(), documents=IDS)
