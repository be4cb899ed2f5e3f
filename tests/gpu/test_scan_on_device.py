"""What only a GPU shows of the selective scan's kernels: real sizes, segments of time, 64-bit offsets, races.

The truth is the definition in float64, on the device.
"""

from __future__ import annotations

import pytest
import torch

from kernels import backend
from kernels.ssm import triton_run
from kernels.ssm.scan import selective_scan

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: `make gpu`")


def random_inputs(batch, time, width, states, dtype, device="cuda"):
    """x, dt, a, b, c, d and the state; steps as Mamba draws them, from 1e-3 to 1e-1, and some that forget all."""
    torch.manual_seed(time)
    x, b, c = (torch.randn(batch, time, n, device=device, dtype=dtype) for n in (width, states, states))
    dt = torch.rand(batch, time, width, device=device).mul(4.6).sub(6.9).exp()
    dt[:, ::97] = 2.0
    a = -torch.arange(1.0, states + 1, device=device).expand(width, -1)
    return [x, dt, a, b, c, torch.randn(width, device=device), torch.randn(batch, width, states, device=device)]


def results(precision, name, inputs, **options):
    """y, the last state and all gradients, in float64."""
    wide = torch.promote_types(precision, torch.float32)
    leaves = [
        t.detach().to(precision if i in (0, 3, 4) else wide).requires_grad_() for i, t in enumerate(inputs)
    ]
    with backend.using(name):
        y, last = selective_scan(*leaves[:5], d=leaves[5], state=leaves[6], **options)
    torch.manual_seed(1)
    dy, dlast = (torch.randn(t.shape).to(torch.bfloat16).to(t) for t in (y, last))
    return [t.detach().double() for t in (y, last, *torch.autograd.grad((y, last), leaves, (dy, dlast)))]


SHAPES = [
    # batch, time, width, states
    (2, 1025, 256, 16),
    (1, 2048, 24, 16),
    (8, 127, 1536, 16),
    (2, 300, 100, 7),
    (1, 200, 64, 256),
    (3, 1, 2048, 16),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_error_is_within_twice_that_of_the_definition_in_the_same_precision(shape, dtype):
    inputs = random_inputs(*shape, dtype)
    truth = results(torch.float64, "reference", inputs)
    plain = results(dtype, "reference", inputs)
    for right, base, got in zip(truth, plain, results(dtype, "triton", inputs), strict=True):
        assert (got - right).norm() <= 2 * (base - right).norm() + torch.finfo(dtype).eps * right.norm()


def test_segments_of_time_change_nothing(monkeypatch):
    inputs = random_inputs(1, 4000, 64, 16, torch.float32)
    assert triton_run.segments(inputs[0], 16)[0] > 8
    several = results(torch.float32, "triton", inputs)
    monkeypatch.setattr(triton_run, "RESIDENT", 0)
    assert triton_run.segments(inputs[0], 16)[0] == 1
    for one, other in zip(results(torch.float32, "triton", inputs), several, strict=True):
        assert (one - other).norm() <= 1e-5 * one.norm()


def test_packed_documents_equal_each_alone():
    *inputs, state = random_inputs(1, 3000, 256, 16, torch.float32)
    ids = torch.ones(1, 3000, dtype=torch.int32, device="cuda")
    ids[:, 1111:] = 2
    with backend.using("triton"):
        whole, last = selective_scan(*inputs[:5], documents=ids, document=ids[:, 0], state=state)
        parts = [[t if t.dim() == 2 else t[:, now] for t in inputs[:5]] for now in (slice(1111), slice(1111, None))]
        first, _ = selective_scan(*parts[0], state=state)
        second, end = selective_scan(*parts[1])
    assert torch.allclose(whole, torch.cat([first, second], 1), atol=1e-4) and torch.allclose(last, end, atol=1e-4)


def test_offsets_beyond_32_bits():
    """C46: a dense tensor of more than 2**31 elements; its last row equals that row alone."""
    x = torch.randn(2, 1, 16, 65_600, dtype=torch.bfloat16, device="cuda").expand(-1, 1024, -1, -1).flatten(2)
    dt, a = torch.full((2, 1024, 1), 0.1, device="cuda").expand_as(x), -torch.ones(x.shape[2], 1, device="cuda")
    b = torch.ones(2, 1024, 1, dtype=torch.bfloat16, device="cuda")
    assert x.numel() > 2**31
    with backend.using("triton"), torch.no_grad():
        whole = selective_scan(x, dt, a, b, b)[0][1, -1]
        assert torch.allclose(whole, selective_scan(x[1:], dt[1:], a, b[1:], b[1:])[0][0, -1], atol=1e-2)


def test_gradients_are_equal_to_the_last_bit_from_run_to_run():
    """C48: nothing is added in the order of arrival."""
    inputs = random_inputs(2, 2000, 512, 16, torch.bfloat16)
    first = results(torch.bfloat16, "triton", inputs)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, results(torch.bfloat16, "triton", inputs), strict=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_second_device_gives_what_the_first_gives():
    """C47: a kernel starts on the device of its tensors, whatever the current one is."""
    inputs = random_inputs(1, 500, 256, 16, torch.bfloat16)
    second = results(torch.bfloat16, "triton", [t.to("cuda:1") for t in inputs])
    for a, b in zip(results(torch.bfloat16, "triton", inputs), second, strict=True):
        assert torch.equal(a, b.to(a.device))


def test_compiled_by_inductor_equals_eager():
    inputs = random_inputs(2, 300, 128, 16, torch.bfloat16)[:5]
    with backend.using("triton"):
        eager, last = selective_scan(*inputs)
        compiled, end = torch.compile(selective_scan, fullgraph=True)(*inputs)
    assert torch.equal(compiled, eager) and torch.equal(end, last)
