"""The operators of additive attention and of NSA's branches are registered as PyTorch wants them."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from kernels.additive import dispatch as additive
from kernels.additive import portable
from kernels.sparse import dispatch as sparse

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random(*shapes):
    torch.manual_seed(0)
    return tuple(torch.randn(s, device=DEVICE, requires_grad=True) for s in shapes)


@pytest.mark.slow
def test_additive_attention():
    inputs = random((1, 3, 2, 4), (1, 5, 2, 4), (1, 5, 2, 3), (2, 4))
    ids = torch.ones(1, 5, dtype=torch.int32, device=DEVICE)
    options = (None, None, ids[:, :3], ids, True, 4)
    torch.library.opcheck(portable._forward, (*inputs, *options))
    torch.library.opcheck(additive.forward, (*inputs, *options, False))
    plain = tuple(t.detach() for t in inputs)
    y, reference = additive.forward(*plain, *options, False)
    torch.library.opcheck(portable._backward, (y, *plain, *options))
    torch.library.opcheck(additive.backward, (y, reference, y, *plain, *options, False))


@pytest.mark.slow
def test_sparse_attention():
    inputs = random((1, 6, 2, 4), (1, 6, 1, 4), (1, 6, 1, 3))
    positions = torch.arange(6, dtype=torch.int32, device=DEVICE)[None]
    own = positions // 2
    indices = torch.stack([torch.where(own > 0, 0, own), torch.where(own > 0, own, -1)], -1)[:, :, None]
    options = (indices, torch.zeros_like(positions), positions, 2, 0.3, 0)
    torch.library.opcheck(sparse.forward, (*inputs, *options))
    q, k, v = (t.detach() for t in inputs)
    y, reference = sparse.forward(q, k, v, *options)
    torch.library.opcheck(sparse.backward, (y, reference, y, q, k, v, *options))
    lse = torch.zeros(1, 6, 2, device=DEVICE)
    torch.library.opcheck(sparse.choice, (q, k[:, :3], lse, 0 * own, own - 1, own, 1, 1, 3, 2, 0.3))
