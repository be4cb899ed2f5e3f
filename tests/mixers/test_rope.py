"""Rotary position embedding against complex numbers in float64."""

from __future__ import annotations

import pytest
import torch

from mixers.rope import rotate


def by_complex(x, positions, base):
    half = x.shape[-1] // 2
    angles = positions[..., None].double() * base ** (-torch.arange(half).double() / half)
    turned = (
        torch.complex(x[..., :half].double(), x[..., half:].double())
        * torch.polar(torch.ones_like(angles), angles)[:, :, None]
    )
    return torch.cat([turned.real, turned.imag], -1)


def test_turns_pairs_half_apart():
    x, positions = torch.randn(2, 6, 3, 8).double(), torch.randint(0, 50, (2, 6))
    assert torch.allclose(rotate(x, positions, 10_000.0), by_complex(x, positions, 10_000.0), atol=1e-12)


def test_partial_rotation_leaves_the_rest():
    x, positions = torch.randn(1, 4, 1, 8).double(), torch.arange(4)[None]
    y = rotate(x, positions, 100.0, fraction=0.5)
    assert torch.allclose(y[..., :4], by_complex(x[..., :4], positions, 100.0), atol=1e-12) and torch.equal(
        y[..., 4:], x[..., 4:]
    )


def test_offset_is_a_rotation_by_that_many_steps_and_scores_depend_on_the_distance():
    """C12."""
    q, k = torch.randn(1, 1, 1, 16).double(), torch.randn(1, 1, 1, 16).double()
    at = lambda t, m: rotate(t, torch.tensor([[m]]), 10_000.0)  # noqa: E731
    assert not torch.allclose(at(q, 5), at(q, 0))
    assert torch.allclose(at(at(q, 2), 3), at(q, 5), atol=1e-12)
    scores = [(at(q, m + 7) * at(k, m)).sum() for m in (0, 5, 4000)]
    assert torch.allclose(scores[0], scores[1], atol=1e-10) and torch.allclose(scores[0], scores[2], atol=1e-10)


def test_angles_are_exact_at_a_million_tokens():
    x, positions = torch.randn(1, 3, 1, 64), torch.tensor([[0, 131_071, 1_048_575]])
    assert (rotate(x, positions, 10_000.0).double() - by_complex(x, positions, 10_000.0)).abs().max() < 1e-6


@pytest.mark.parametrize("autocast", [False, True])
def test_angles_stay_wide_in_bf16(autocast):
    """C11: d 64, positions 0 .. 4095; unit vectors give the cosines themselves."""
    x = torch.zeros(1, 4096, 1, 64, dtype=torch.bfloat16)
    x[..., :32] = 1
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        y = rotate(x, torch.arange(4096)[None], 10_000.0)
    expected = by_complex(x, torch.arange(4096)[None], 10_000.0)
    # bf16 holds the result itself to 2^-9 relative.
    assert (y.double() - expected).abs().max() <= 2**-9 + 1e-3
