"""What only a GPU shows of the causal convolution's kernels: real sizes, 64-bit offsets, races.

The truth is the definition in float64, on the device.
"""

from __future__ import annotations

import pytest
import torch

from kernels import backend
from kernels.conv.op import causal_conv

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: `make gpu`")


def random_inputs(batch, time, width, taps, dtype, device="cuda"):
    """x, weight, bias and tail."""
    torch.manual_seed(time)
    shapes = ((batch, time, width), (taps, width), (width,), (batch, taps - 1, width))
    return [torch.randn(s, device=device, dtype=dtype) for s in shapes]


def results(precision, name, inputs, packed=False):
    """y and all gradients, in float64."""
    leaves = [t.detach().to(precision).requires_grad_() for t in inputs]
    x, tail = leaves[0], leaves[3]
    ids = torch.arange(x.shape[1], device=x.device).div(100, rounding_mode="floor").expand(len(x), -1) + 1
    places = dict(documents=ids, tail_documents=ids.new_ones(tail.shape[:2])) if packed else {}
    with backend.using(name):
        y = causal_conv(*leaves[:3], tail=tail, **places)
    torch.manual_seed(1)
    dy = torch.randn(y.shape).to(torch.bfloat16).to(y)
    return [t.detach().double() for t in (y, *torch.autograd.grad(y, leaves, dy))]


@pytest.mark.parametrize("shape", [(2, 1025, 2048, 4), (4, 333, 100, 3), (16, 1, 2048, 4), (1, 4096, 64, 16)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_error_is_within_twice_that_of_the_definition_in_the_same_precision(shape, dtype, packed):
    inputs = random_inputs(*shape, dtype)
    truth = results(torch.float64, "reference", inputs, packed)
    plain = results(dtype, "reference", inputs, packed)
    for right, base, got in zip(truth, plain, results(dtype, "triton", inputs, packed), strict=True):
        assert (got - right).norm() <= 2 * (base - right).norm() + torch.finfo(dtype).eps * right.norm()


def test_offsets_beyond_32_bits():
    """C46: a dense tensor of more than 2**31 elements; its last row equals that row alone."""
    x, weight, _, _ = random_inputs(3, 350_000, 2048, 4, torch.bfloat16)
    assert x.numel() > 2**31
    with backend.using("triton"):
        assert torch.equal(causal_conv(x, weight)[2:], causal_conv(x[2:], weight))


def test_gradients_are_equal_to_the_last_bit_from_run_to_run():
    """C48: nothing is added in the order of arrival."""
    inputs = random_inputs(4, 2048, 2048, 4, torch.bfloat16)
    first = results(torch.bfloat16, "triton", inputs)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, results(torch.bfloat16, "triton", inputs), strict=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_second_device_gives_what_the_first_gives():
    """C47: a kernel starts on the device of its tensors, whatever the current one is."""
    inputs = random_inputs(2, 300, 256, 4, torch.bfloat16)
    second = results(torch.bfloat16, "triton", [t.to("cuda:1") for t in inputs])
    for a, b in zip(results(torch.bfloat16, "triton", inputs), second, strict=True):
        assert torch.equal(a, b.to(a.device))


def test_compiled_by_inductor_equals_eager():
    x, weight, bias, tail = random_inputs(2, 300, 256, 4, torch.bfloat16)
    with backend.using("triton"):
        eager = causal_conv(x, weight, bias, tail=tail)
        assert torch.equal(torch.compile(causal_conv, fullgraph=True)(x, weight, bias, tail=tail), eager)
