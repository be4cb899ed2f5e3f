"""What only a GPU shows of the attention kernels: real sizes, 64-bit offsets, large grids, TF32, races (`make gpu`).

The truth is the definition in float64, on the device.
"""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from kernels import backend
from kernels.attention.op import attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: `make gpu`")
ROOT = Path(__file__).resolve().parents[2]


def random_qkv(batch, queries, keys, heads, groups, width, dtype, values=None, device="cuda"):
    torch.manual_seed(queries + keys)
    shapes = (
        (batch, queries, heads, width),
        (batch, keys, groups, width),
        (batch, keys, groups, values or width),
        (batch, queries, heads, values or width),
    )
    return [torch.randn(s, dtype=dtype, device=device) for s in shapes]


def results(precision, name, q, k, v, dy, **options):
    """y and the gradients of q, k and v in float64."""
    q, k, v = (t.detach().to(precision).requires_grad_() for t in (q, k, v))
    torch.backends.cuda.matmul.allow_tf32 = False
    with backend.using(name):
        y = attention(q, k, v, **options)
    return [t.detach().double() for t in (y, *torch.autograd.grad(y, (q, k, v), dy.to(precision)))]


def assert_within_budget(dtype, q, k, v, dy, **options):
    """Relative to the norm: twice the error of the definition in the same precision, and one rounding."""
    truth = results(torch.float64, "reference", q, k, v, dy, **options)
    plain = results(dtype, "reference", q, k, v, dy, **options)
    got = results(dtype, "triton", q, k, v, dy, **options)
    for name, right, base, mine in zip(("y", "dq", "dk", "dv"), truth, plain, got, strict=True):
        allowed = 2 * (base - right).norm() + torch.finfo(dtype).eps * right.norm()
        error = (mine - right).norm()
        assert error <= allowed, f"{name}: error {error:.2e} is over {allowed:.2e}"


SHAPES = [
    # batch, queries, keys, heads, groups, K, V
    (2, 1024, 1024, 8, 2, 64, 64),
    (1, 1025, 1025, 4, 4, 128, 128),
    (2, 777, 1311, 4, 1, 96, 80),
    (1, 63, 127, 4, 2, 16, 16),
    (1, 512, 512, 2, 2, 256, 256),
    (3, 1, 4097, 16, 2, 128, 128),
    (2, 5, 2049, 8, 2, 64, 64),
    (1, 300, 200, 2, 2, 192, 128),
]


OPTIONS = [
    dict(causal=False),
    dict(window=100),
    dict(window=100, causal=False),
    dict(softcap=5.0),
    dict(alibi_slopes=True, sinks=True),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_error_is_within_budget(shape, dtype):
    """float32 runs as three products of TF32; the definition's own products stay in full float32."""
    batch, queries, keys, heads, groups, width, values = shape
    assert_within_budget(dtype, *random_qkv(batch, queries, keys, heads, groups, width, dtype, values))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("width", [64, 128])
def test_error_of_options_is_within_budget(width, options):
    inputs = random_qkv(1, 1000, 1300, 8, 2, width, torch.bfloat16)
    heads = {name: torch.rand(8, device="cuda") for name, given in options.items() if given is True}
    assert_within_budget(torch.bfloat16, *inputs, **options | heads)


@pytest.mark.parametrize("width", [64, 128])
def test_packed_documents_equal_each_alone(width):
    q, k, v, dy = random_qkv(1, 4000, 4000, 8, 2, width, torch.bfloat16)
    cuts = (0, 700, 701, 2900, 4000)
    ids = torch.zeros(1, 4000, dtype=torch.int32, device="cuda")
    for number, (first, last) in enumerate(pairwise(cuts), 1):
        ids[:, first:last] = number
    whole = results(torch.bfloat16, "triton", q, k, v, dy, q_documents=ids, k_documents=ids)
    for first, last in pairwise(cuts):
        alone = results(torch.bfloat16, "triton", *(t[:, first:last] for t in (q, k, v, dy)))
        for a, b in zip(whole, alone, strict=True):
            assert (a[:, first:last] - b).norm() <= 1e-2 * b.norm()


def test_offsets_beyond_32_bits():
    """C46: samples 2**30 + 64 elements apart, the third beyond 2**31; and a dense tensor of more than 2**31."""
    torch.manual_seed(0)
    stride, shape = 2**30 + 64, (3, 64, 1, 16)
    memory = torch.empty(2 * stride + 64 * 16, dtype=torch.bfloat16, device="cuda")
    q = memory.as_strided(shape, (stride, 16, 16, 1))
    q.copy_(torch.randn(shape))
    dy = torch.randn(shape, device="cuda").to(torch.bfloat16)
    together = results(torch.bfloat16, "triton", q, q, q, dy)
    last = q[2:].clone()
    for a, b in zip(together, results(torch.bfloat16, "triton", last, last, last, dy[2:]), strict=True):
        assert torch.equal(a[2:], b)
    del memory, q
    q, k, v, _ = random_qkv(2, 131_073, 64, 64, 1, 128, torch.bfloat16)
    with backend.using("triton"):
        end = attention(q[1:, -64:], k[1:], v[1:], causal=False)[0]
        assert torch.allclose(attention(q, k, v, causal=False)[1, -64:], end, atol=1e-2)


def test_more_than_65535_tiles():
    q, k, v, _ = random_qkv(70_000, 1, 33, 2, 1, 16, torch.float16)
    with backend.using("triton"):
        # Fewer programs split their keys, which rounds in another order.
        assert torch.allclose(attention(q, k, v)[-5:], attention(q[-5:], k[-5:], v[-5:]), atol=1e-3)


def test_gradients_are_equal_to_the_last_bit_from_run_to_run():
    """C48: nothing is added in the order of arrival."""
    inputs = random_qkv(2, 2048, 2048, 16, 2, 64, torch.bfloat16)
    first = results(torch.bfloat16, "triton", *inputs)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, results(torch.bfloat16, "triton", *inputs), strict=True))


def test_first_call_of_a_process_is_right():
    """C45: no tuning runs a kernel over its own output."""
    code = """
import torch
from kernels import backend
from kernels.attention.op import attention
q, k, v = (torch.randn(1, 500, 4, 64, device="cuda", dtype=torch.float16) for _ in range(3))
backend.use("triton")
first, second = attention(q, k, v), attention(q, k, v)
backend.use("reference")
assert torch.equal(first, second) and (first - attention(q, k, v)).abs().max() < 1e-2
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_second_device_gives_what_the_first_gives():
    """C47: a kernel starts on the device of its tensors, whatever the current one is."""
    inputs = random_qkv(1, 300, 300, 4, 2, 64, torch.bfloat16)
    second = results(torch.bfloat16, "triton", *(t.to("cuda:1") for t in inputs))
    for a, b in zip(results(torch.bfloat16, "triton", *inputs), second, strict=True):
        assert torch.equal(a, b.to(a.device))


def test_compiled_by_inductor_equals_eager():
    q, k, v, _ = random_qkv(2, 300, 300, 4, 2, 64, torch.bfloat16)
    with backend.using("triton"):
        eager = attention(q, k, v, window=50)
        assert torch.equal(torch.compile(attention, fullgraph=True)(q, k, v, window=50), eager)


def test_automatic_choice_is_triton():
    q, k, v, _ = random_qkv(1, 100, 100, 2, 1, 64, torch.bfloat16)
    y = attention(q, k, v)
    with backend.using("triton"):
        assert torch.equal(y, attention(q, k, v))
