"""The interpreter gives what a GPU would: bfloat16 arithmetic against PyTorch's."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

import triton
import triton.language as tl

from kernels.triton_launch import launch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def _arithmetic_kernel(A, B, Product, Sum, Exponential, Narrowed, Wide, N: tl.constexpr):
    tile = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    a, b = tl.load(A + tile), tl.load(B + tile)
    tl.store(Product + tile, tl.dot(a, b))
    tl.store(Sum + tile, a + b)
    tl.store(Exponential + tile, tl.exp(a.to(tl.float32)).to(tl.bfloat16))
    tl.store(Narrowed + tile, tl.load(Wide + tile).to(tl.bfloat16))


def test_bfloat16_products_sums_and_roundings_are_those_of_pytorch():
    torch.manual_seed(0)
    wide = torch.randn(32, 32, device=DEVICE)
    wide[0, :2] = torch.tensor([float("nan"), float("inf")])
    a, b = (torch.randn(32, 32, device=DEVICE).bfloat16() for _ in range(2))
    total, power, narrowed = (torch.empty_like(a) for _ in range(3))
    product = torch.empty(32, 32, device=DEVICE)
    launch(_arithmetic_kernel, 1, a, b, product, total, power, narrowed, wide, N=32)
    assert torch.allclose(product, a.float() @ b.float(), atol=1e-5)
    assert torch.equal(total, a + b)
    assert torch.allclose(power, a.float().exp().bfloat16(), rtol=2**-7)
    assert torch.equal(narrowed.isnan(), wide.isnan())
    assert torch.equal(narrowed.nan_to_num(), wide.bfloat16().nan_to_num())
