"""What only a GPU shows of the kernels of linear attention and ssd: real sizes, large grids, TF32, races (`make gpu`).

The truth is the portable form in float64, on the device; it is held against the recurrence in tests/kernels.
"""

from __future__ import annotations

import pytest
import torch

from kernels import backend
from kernels.linear.op import linear_attention
from kernels.ssm.ssd import ssd

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: `make gpu`")

# batch, time, heads, groups, K, V
SHAPES = [(2, 4096, 8, 8, 64, 64), (1, 1025, 8, 2, 128, 80), (2, 777, 4, 1, 256, 256), (1, 130, 2, 2, 273, 64)]


def gradients(name, dtype, shape, decay, normalise):
    """y, the state, and the gradients of q, k, v and the log-decay, in float64."""
    batch, time, heads, groups, key_dim, value_dim = shape
    torch.manual_seed(0)
    q, k = (torch.rand(batch, time, groups, key_dim, device="cuda") / key_dim**0.5 for _ in range(2))
    v, dy = (torch.randn(batch, time, heads, value_dim, device="cuda") for _ in range(2))
    leaves = [t.bfloat16().to(dtype).requires_grad_() for t in (q, k, v)]
    options = {}
    if decay:
        wide = torch.promote_types(dtype, torch.float32)
        options["log_decay"] = (-torch.rand(batch, time, heads, device="cuda") / 8).to(wide).requires_grad_()
    torch.backends.cuda.matmul.allow_tf32 = False
    with backend.using(name):
        y, kv, _ = linear_attention(*leaves, normalise=normalise, **options)
    found = torch.autograd.grad((y, kv), [*leaves, *options.values()], (dy.to(y.dtype), kv.detach()))
    return [t.detach().double() for t in (y, kv, *found)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("decay", "normalise"), [(True, False), (False, True)], ids=["gates", "normaliser"])
def test_equals_float64(shape, dtype, decay, normalise):
    """By norm: fp32 products are exact to 1e-5 over three passes of TF32, half precision ones to a rounding of TF32."""
    allowed = 1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    truth = gradients("portable", torch.float64, shape, decay, normalise)
    for got, right in zip(gradients("triton", dtype, shape, decay, normalise), truth, strict=True):
        assert (got - right).norm() <= allowed * right.norm()


def test_two_runs_are_equal_to_the_last_bit():
    """C48."""
    first, second = (gradients("triton", torch.bfloat16, SHAPES[0], True, False) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_ssd_equals_float64():
    """Mamba-2 2.7B's shape: 80 heads of 64 on one group of 128 states."""
    torch.manual_seed(0)
    x, b, c = (torch.randn(1, 2048, n, p, device="cuda") for n, p in ((80, 64), (1, 128), (1, 128)))
    dt, a = torch.rand(1, 2048, 80, device="cuda") / 10, -1 - 15 * torch.rand(80, device="cuda")

    def run(name, kind):
        wide = torch.promote_types(kind, torch.float32)
        with backend.using(name):
            y, state = ssd(*(t.bfloat16().to(kind) if t.dim() == 4 else t.to(wide) for t in (x, dt, a, b, c)))
        return y.double(), state.double()

    for got, right in zip(run("triton", torch.bfloat16), run("portable", torch.float64), strict=True):
        assert (got - right).norm() <= 2 * torch.finfo(torch.bfloat16).eps * right.norm()
