"""What tests of Triton kernels share; triton itself is imported by those alone that ask for it."""

from __future__ import annotations

import pytest
import torch

FENCE = 64


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of 32 and splits of one tile: short inputs have several, and the interpreter is slow."""
    from kernels.attention import triton_tiles

    tiles = triton_tiles.Tiles(32, 32, 4, 1)
    for name in ("forward_tiles", "dq_tiles", "dkv_tiles"):
        monkeypatch.setattr(triton_tiles, name, lambda *_: tiles)
    monkeypatch.setattr(triton_tiles, "SPLIT_TILES", 1)


@pytest.fixture
def fences(monkeypatch):
    """Outputs are full of NaN and fenced by it: what is not written shows, and so does what is written outside."""
    from kernels.additive import triton_run as additive_run
    from kernels.attention import triton_places, triton_run
    from kernels.sparse import triton_run as sparse_run

    fenced = []

    def empty(like, *shape, dtype=None):
        dtype = dtype or like.dtype
        odd = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min
        count = torch.Size(shape).numel()
        memory = torch.full((count + 2 * FENCE,), odd, dtype=dtype, device=like.device)
        fenced.append(memory)
        return memory[FENCE : FENCE + count].view(shape)

    for module in (triton_run, triton_places, additive_run, sparse_run):
        monkeypatch.setattr(module, "empty", empty)
    yield
    for memory in fenced:
        for fence in (memory[:FENCE], memory[-FENCE:]):
            assert (fence.isnan() if fence.is_floating_point() else fence == torch.iinfo(fence.dtype).min).all()
