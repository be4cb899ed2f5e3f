"""What only a GPU shows of additive attention: real sizes, the approximate tanh, races (`make gpu`)."""

from __future__ import annotations

import pytest
import torch

from kernels import backend
from kernels.additive.op import additive_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: `make gpu`")


def example(batch, queries, keys, heads, width, values, dtype):
    """q, k, v, weight, bias and the gradient of the result."""
    torch.manual_seed(queries + keys)
    shapes = (batch, queries, heads, width), (batch, keys, heads, width), (batch, keys, heads, values)
    made = [torch.randn(s, device="cuda", dtype=dtype) for s in (*shapes, (batch, queries, heads, values))]
    weight, bias = torch.randn(2, heads, width, device="cuda") * width**-0.5
    return [*made[:3], weight, bias, made[3]]


def results(name, precision, inputs, **options):
    """y and all gradients in float64."""
    *inputs, dy = (t.to(precision) for t in inputs)
    inputs = [t.detach().requires_grad_() for t in inputs]
    torch.backends.cuda.matmul.allow_tf32 = False
    with backend.using(name):
        y = additive_attention(*inputs[:4], bias=inputs[4], **options)
    return [t.detach().double() for t in (y, *torch.autograd.grad(y, inputs, dy))]


SHAPES = [
    # batch, queries, keys, heads, A, V
    (2, 512, 512, 4, 64, 64),
    (1, 301, 777, 2, 128, 128),
    (1, 257, 100, 2, 33, 80),
    (1, 130, 130, 1, 256, 256),
    (3, 1, 1025, 4, 64, 64),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("options", [{}, dict(causal=False), dict(window=50)], ids=str)
def test_error_is_within_budget(shape, dtype, options):
    """Relative to the norm: twice the error of the definition in the same precision, and one rounding."""
    inputs = example(*shape, dtype)
    truth, plain = (results("reference", kind, inputs, **options) for kind in (torch.float64, dtype))
    got = results("triton", dtype, inputs, **options)
    for name, right, base, mine in zip(("y", "dq", "dk", "dv", "dw", "db"), truth, plain, got, strict=True):
        assert (mine - right).norm() <= 2 * (base - right).norm() + 4 * torch.finfo(dtype).eps * right.norm(), name


def test_approximate_tanh_is_near_and_not_exact():
    """Its error is up to 5e-4 a channel (PTX: tanh.approx.f32, 2**-10.987)."""
    inputs = example(1, 300, 300, 2, 64, 64, torch.float32)
    exact, near = (results("triton", torch.float32, inputs, tanh=tanh) for tanh in ("exact", "approximate"))
    for right, mine in zip(exact, near, strict=True):
        assert 0 < (mine - right).norm() <= 1e-2 * right.norm()


def test_gradients_are_equal_to_the_last_bit_from_run_to_run():
    inputs = example(2, 1024, 1024, 4, 64, 64, torch.bfloat16)
    first = results("triton", torch.bfloat16, inputs)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, results("triton", torch.bfloat16, inputs), strict=True))


def test_memory_is_linear_in_the_length():
    """All pairs and channels of 8192 tokens would take 69 GB."""
    inputs = example(1, 8192, 8192, 8, 64, 64, torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results("triton", torch.bfloat16, inputs)
    assert torch.cuda.max_memory_allocated() - before < 2**30
