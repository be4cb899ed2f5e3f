"""The Triton kernels of the causal convolution against the float64 definition, on a GPU or in the interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from kernels import backend
from kernels.conv import dispatch, triton_run
from kernels.conv.op import causal_conv

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def small_blocks(monkeypatch):
    """Tiles of 8 x 16, so that short inputs have several."""
    monkeypatch.setattr(triton_run, "BLOCK_T", 8)
    monkeypatch.setattr(triton_run, "BLOCK_D", 16)


def fenced(t):
    """The same numbers as a view into memory that is NaN around every row of channels."""
    memory = torch.full((*t.shape[:-1], t.shape[-1] + 8), float("nan"), dtype=t.dtype, device=t.device)
    return memory[..., 3 : 3 + t.shape[-1]].copy_(t)


def documents(time, before):
    """[2, T] and [2, P]: documents that go on from the tail or not, and pads at the end."""
    ids = torch.ones(2, before + time, dtype=torch.int32)
    ids[0, before + time // 3 :], ids[0, before + time // 2 :], ids[1, before:] = 2, 0, 5
    ids[1, : before // 2] = 9
    return ids[:, before:].to(DEVICE), ids[:, :before].to(DEVICE)


def results(implementation, precision, inputs, dy, packed):
    """y and all gradients, computed in `precision`, in float64."""
    x, weight, bias, tail = (None if t is None else fenced(t.to(precision)).requires_grad_() for t in inputs)
    ids, tail_ids = documents(x.shape[1], 0 if tail is None else tail.shape[1])
    places = dict(documents=ids, tail_documents=tail_ids) if packed else {}
    with backend.using(implementation):
        y = causal_conv(x, weight, bias, tail=tail, **places)
    leaves = [t for t in (x, weight, bias, tail) if t is not None]
    return [t.detach().double() for t in (y, *torch.autograd.grad(y, leaves, dy.to(precision)))]


CASES = [
    # time, taps, tail (None: none), bias, packed, dtype
    (19, 4, None, False, False, torch.float32),
    (19, 4, 3, True, True, torch.float32),
    (16, 4, 1, True, False, torch.bfloat16),
    (17, 4, None, True, True, torch.float16),
    (2, 5, 4, False, True, torch.float32),
    (1, 4, 3, True, False, torch.bfloat16),
    (1, 4, 3, False, True, torch.float32),
    (9, 1, None, True, False, torch.float32),
    (9, 16, 15, False, False, torch.bfloat16),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.usefixtures("small_blocks", "fences")
def test_error_is_within_twice_that_of_the_definition_in_the_same_precision(case):
    time, taps, before, bias, packed, dtype = case
    torch.manual_seed(0)
    shapes = ((2, time, 20), (taps, 20), (20,) if bias else None, None if before is None else (2, before, 20))
    inputs = [None if s is None else torch.randn(s, device=DEVICE).to(dtype).double() for s in shapes]
    dy = torch.randn(2, time, 20, device=DEVICE).to(dtype).double()
    truth = results("reference", torch.float64, inputs, dy, packed)
    plain = results("reference", dtype, inputs, dy, packed)
    for right, base, got in zip(truth, plain, results("triton", dtype, inputs, dy, packed), strict=True):
        allowed = 2 * (base - right).abs().amax() + torch.finfo(dtype).eps * right.abs().amax()
        assert (got - right).abs().amax() <= allowed


def test_empty_inputs_give_empty_outputs_and_gradients_of_zero():
    x, tail = (torch.randn(2, n, 4, device=DEVICE, requires_grad=True) for n in (0, 2))
    weight = torch.randn(3, 4, device=DEVICE, requires_grad=True)
    with backend.using("triton"):
        y = causal_conv(x, weight, tail=tail)
        none = causal_conv(x[:0], weight)
    assert y.shape == x.shape and none.shape == (0, 0, 4)
    assert all((g == 0).all() for g in torch.autograd.grad(y.sum() + none.sum(), (x, weight, tail)))


def test_what_another_document_holds_does_not_matter_even_if_it_is_no_number():
    tail = torch.full((1, 3, 2), float("nan"), device=DEVICE)
    ids = torch.full((1, 6), 2, device=DEVICE)
    x, weight = (torch.randn(s, device=DEVICE, requires_grad=True) for s in ((1, 6, 2), (4, 2)))
    with backend.using("triton"):
        y = causal_conv(x, weight, tail=tail, documents=ids, tail_documents=ids[:, :3] - 1)
        assert torch.allclose(y, causal_conv(x, weight), atol=1e-6)
    assert all(g.isfinite().all() for g in torch.autograd.grad(y.sum(), (x, weight)))


def test_offsets_beyond_32_bits():
    """C46: rows 2**30 + 64 elements apart, so that the third starts beyond 2**31; only what is used takes memory."""
    torch.manual_seed(0)
    stride, shape = 2**30 + 64, (3, 5, 8)
    memory = torch.empty(2 * stride + 40, dtype=torch.bfloat16, device=DEVICE)
    apart = memory.as_strided(shape, (stride, 8, 1)).copy_(torch.randn(shape))
    found = []
    for x in (apart, apart.clone()):
        x, weight = x.detach().requires_grad_(), torch.ones(4, 8, device=DEVICE, requires_grad=True)
        with backend.using("triton"):
            y = causal_conv(x, weight)
        found.append((y, *torch.autograd.grad(y.square().sum(), (x, weight))))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_gradients_are_equal_to_the_last_bit_from_run_to_run():
    x, weight = (torch.randn(s, device=DEVICE, requires_grad=True) for s in ((2, 70, 8), (4, 8)))
    with backend.using("triton"):
        runs = [torch.autograd.grad(causal_conv(x, weight).square().sum(), (x, weight)) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_operator_is_registered_as_pytorch_wants_it():
    x, weight, bias, tail = (
        torch.randn(s, device=DEVICE, requires_grad=True) for s in ((1, 5, 4), (4, 4), (4,), (1, 2, 4))
    )
    ids = torch.ones(1, 5, dtype=torch.int32, device=DEVICE)
    torch.library.opcheck(dispatch.forward, (x, weight, bias, tail, ids, ids[:, :2]))
    plain = (x.detach(), x.detach(), weight.detach(), None, None, None)
    torch.library.opcheck(dispatch.backward, plain)


@pytest.mark.parametrize(
    ("taps", "dtype", "message"),
    [(17, torch.float32, "W=17 taps must be at most 16"), (4, torch.float64, "dtype torch.float64 of x must be")],
)
def test_what_the_kernels_lack_is_refused_and_auto_goes_on_without_them(taps, dtype, message):
    x, weight = torch.randn(1, 3, 2, dtype=dtype, device=DEVICE), torch.randn(taps, 2, device=DEVICE, dtype=dtype)
    with backend.using("triton"), pytest.raises(ValueError, match=f"cannot run causal_conv here: {message}"):
        causal_conv(x, weight)
    assert causal_conv(x, weight).isfinite().all()
