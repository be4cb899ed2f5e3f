"""The Triton kernels of the selective scan against the float64 definition: on a GPU, or in the interpreter without one.

Inputs lie in memory full of NaN and outputs between fences of it; an error of twice that of the definition in the same
precision, and one rounding, is allowed.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from kernels import backend
from kernels.ssm import dispatch, triton_run
from kernels.ssm.scan import selective_scan
from mixers import registry
from mixers.base import Packing

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch):
    """States kept each third token: short inputs have several pieces."""
    monkeypatch.setattr(dispatch, "PIECE", 3)


def fenced(t):
    """The same numbers as a view into memory that is NaN around every row."""
    memory = torch.full((*t.shape[:-1], t.shape[-1] + 8), float("nan"), dtype=t.dtype, device=t.device)
    return memory[..., 3 : 3 + t.shape[-1]].copy_(t)


def random_inputs(time, width, states, skip, dtype):
    """x, dt, a, b, c, d and the state in float64, x, b and c such that `dtype` holds them exactly."""
    torch.manual_seed(0)
    x, b, c = (torch.randn(2, time, n).to(dtype).double() for n in (width, states, states))
    dt, a = torch.rand(2, time, width).float().double(), -4 * torch.rand(width, states).float().double()
    d = torch.randn(width).float().double() if skip else None
    return [t if t is None else t.to(DEVICE) for t in (x, dt, a, b, c, d, torch.randn(2, width, states).double())]


def documents(time):
    """Ids [2, T] and of the state [2]: one document goes on and another starts; one that is new, and pads."""
    ids = torch.ones(2, time, dtype=torch.int32)
    ids[0, time // 2 :], ids[1, time - 2 :] = 2, 0
    return dict(documents=ids.to(DEVICE), document=torch.tensor([1, 7], device=DEVICE))


def results(implementation, precision, inputs, packed):
    """y, the last state and all gradients, computed in `precision`, in float64."""
    wide = torch.promote_types(precision, torch.float32)
    leaves = [
        t if t is None else fenced(t.to(precision if i in (0, 3, 4) else wide)).requires_grad_()
        for i, t in enumerate(inputs)
    ]
    with backend.using(implementation):
        y, last = selective_scan(
            *leaves[:5], d=leaves[5], state=leaves[6], **(documents(inputs[0].shape[1]) if packed else {})
        )
    torch.manual_seed(1)
    dy, dlast = (torch.randn(t.shape).to(torch.bfloat16).to(t) for t in (y, last))
    gradients = torch.autograd.grad((y, last), [t for t in leaves if t is not None], (dy, dlast))
    return [t.detach().double() for t in (y, last, *gradients)]


CASES = [
    # time, width, states, skip, documents, segments, dtype
    (8, 20, 5, True, True, False, torch.float32),
    (8, 20, 4, False, False, True, torch.float32),
    (10, 16, 16, True, True, True, torch.bfloat16),
    (7, 3, 33, True, False, False, torch.float16),
    (1, 18, 16, True, False, True, torch.float32),
    (3, 4, 1, False, True, True, torch.float32),
    (2, 9, 129, True, True, False, torch.float32),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.usefixtures("fences")
def test_error_is_within_twice_that_of_the_definition_in_the_same_precision(case, monkeypatch):
    time, width, states, skip, packed, several, dtype = case
    monkeypatch.setattr(triton_run, "RESIDENT", 12 if several else 0)
    inputs = random_inputs(time, width, states, skip, dtype)
    segments, span = triton_run.segments(inputs[0], states)
    assert (segments > 1) == (several and time > 6) and segments * span >= time
    truth = results("reference", torch.float64, inputs, packed)
    plain = results("reference", dtype, inputs, packed)
    for right, base, got in zip(truth, plain, results("triton", dtype, inputs, packed), strict=True):
        allowed = 2 * (base - right).abs().amax() + torch.finfo(dtype).eps * right.abs().amax()
        assert (got - right).abs().amax() <= allowed


def test_strong_decay_and_long_steps_stay_finite_and_right(monkeypatch):
    """Decays of exp(-8 * 2) a token: sums of logarithms, or a quotient of decays, would overflow."""
    x, dt, a, b, c, _, state = random_inputs(9, 4, 4, False, torch.float32)
    inputs = [x, 2 + 0 * dt, -8 + 0 * a, b, c, None, state]
    right = results("reference", torch.float64, inputs, False)
    for got, wanted in zip(results("triton", torch.float32, inputs, False), right, strict=True):
        assert torch.allclose(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(2, 0, 4), (0, 3, 4)], ids=str)
def test_empty_inputs_leave_the_state_as_it_is(shape):
    batch, time, width = shape
    x = torch.randn(shape, device=DEVICE, requires_grad=True)
    b, state = torch.randn(batch, time, 3, device=DEVICE), torch.randn(batch, width, 3, device=DEVICE)
    with backend.using("triton"):
        y, last = selective_scan(x, x.detach(), -b.new_ones(width, 3), b, b, state=state.requires_grad_())
    assert y.shape == x.shape and torch.equal(last, state)
    assert torch.equal(torch.autograd.grad(last.sum(), state)[0], torch.ones_like(state))


def test_offsets_beyond_32_bits():
    """C46: rows 2**30 + 64 elements apart, so that the third starts beyond 2**31; only what is used takes memory."""
    torch.manual_seed(0)
    stride, shape = 2**30 + 64, (3, 2, 8)
    memory = torch.empty(2 * stride + 16, dtype=torch.bfloat16, device=DEVICE)
    apart = memory.as_strided(shape, (stride, 8, 1)).copy_(torch.randn(shape))
    dt, a = torch.rand(shape, device=DEVICE), -torch.rand(8, 8, device=DEVICE)
    found = []
    for x in (apart, apart.clone()):
        x = x.detach().requires_grad_()
        with backend.using("triton"):
            y, _ = selective_scan(x, dt, a, x, x)
        found.append((y, *torch.autograd.grad(y.square().sum(), x)))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_gradients_are_equal_to_the_last_bit_from_run_to_run():
    inputs = random_inputs(4, 33, 4, True, torch.float32)
    runs = [results("triton", torch.float32, inputs, False) for _ in range(2)]
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


def test_operator_is_registered_as_pytorch_wants_it():
    x, dt, a, b, c, d, state = (t.float().requires_grad_() for t in random_inputs(4, 3, 2, True, torch.float32))
    fresh = torch.tensor([[False, False, True, False]] * 2, device=DEVICE)
    torch.library.opcheck(dispatch.forward, (x, dt, a, b, c, d, state, fresh))
    plain = [t.detach() for t in (x, dt, a, b, c)]
    y, last, before = dispatch.forward(*plain, None, state.detach(), None)
    torch.library.opcheck(dispatch.backward, (y, last, before, *plain, None, None))


def test_a_mixer_on_the_kernels_packs_and_decodes_as_on_the_portable_path():
    torch.manual_seed(0)
    mixer = registry.build("mamba", 8, d_state=4).to(DEVICE)
    x = torch.randn(2, 9, 8, device=DEVICE)
    ids = torch.tensor([[1] * 4 + [2] * 5, [0] * 2 + [1] * 5 + [0] * 2], dtype=torch.int32, device=DEVICE)

    def outputs():
        packed = mixer(x, Packing(ids))
        first, state = mixer.extend(x[:, :7], mixer.start(2, x), Packing(ids[:, :7]))
        return packed, first, mixer.extend(x[:, 7:8], state, Packing(ids[:, 7:8]))[0]

    with torch.no_grad(), backend.using("portable"):
        right = outputs()
    with torch.no_grad(), backend.using("triton"):
        for got, wanted in zip(outputs(), right, strict=True):
            assert torch.allclose(got, wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "states", "message"),
    [
        (torch.float32, 257, "N=257 must be between 1 and 256"),
        (torch.float64, 2, "dtype torch.float64 must be one of torch.float32, torch.bfloat16, torch.float16"),
    ],
)
def test_what_the_kernels_lack_is_refused_and_auto_goes_on_without_them(dtype, states, message):
    x, b = (torch.randn(1, 2, n, dtype=dtype, device=DEVICE) for n in (3, states))
    arguments = (x, x.square(), -torch.ones(3, states, dtype=dtype, device=DEVICE), b, b)
    with backend.using("triton"), pytest.raises(ValueError, match=f"cannot run selective_scan here: {message}"):
        selective_scan(*arguments)
    assert selective_scan(*arguments)[0].isfinite().all()
