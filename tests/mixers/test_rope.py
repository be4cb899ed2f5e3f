"""Rotary position embedding against complex numbers in float64."""

from __future__ import annotations

import pytest
import torch

from mixers import registry
from mixers.rope import Rope


def by_complex(x, places, base, layout="half"):
    half = x.shape[-1] // 2
    x = x.double()
    pairs = (x[..., :half], x[..., half:]) if layout == "half" else (x[..., ::2], x[..., 1::2])
    angles = places[..., None].double() * base ** (-torch.arange(half).double() / half)
    turned = torch.complex(*pairs) * torch.polar(torch.ones_like(angles), angles)[:, :, None]
    if layout == "half":
        return torch.cat([turned.real, turned.imag], -1)
    return torch.view_as_real(turned).flatten(-2)


def turn(x, places, base=10_000.0, fraction=1.0, layout="half"):
    rope = Rope(x.shape[-1], base, fraction, layout, None)
    return rope.turn(x, rope.angles(places))


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("base", [3.0, 10_000.0])
def test_pairs_turn_by_their_angle(layout, base):
    x, places = torch.randn(2, 6, 3, 8).double(), torch.randint(0, 50, (2, 6))
    assert torch.allclose(turn(x, places, base, layout=layout), by_complex(x, places, base, layout), atol=1e-12)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_partial_rotation_leaves_the_rest(layout):
    x, places = torch.randn(1, 4, 1, 8).double(), torch.arange(4)[None]
    y = turn(x, places, 100.0, 0.5, layout)
    assert torch.allclose(y[..., :4], by_complex(x[..., :4], places, 100.0, layout), atol=1e-12)
    assert torch.equal(y[..., 4:], x[..., 4:])


def test_offset_is_a_rotation_by_that_many_steps_and_scores_depend_on_the_distance():
    """C12."""
    q, k = torch.randn(1, 1, 1, 16).double(), torch.randn(1, 1, 1, 16).double()
    at = lambda t, m: turn(t, torch.tensor([[m]]))  # noqa: E731
    assert not torch.allclose(at(q, 5), at(q, 0))
    assert torch.allclose(at(at(q, 2), 3), at(q, 5), atol=1e-12)
    scores = [(at(q, m + 7) * at(k, m)).sum() for m in (0, 5, 4000)]
    assert torch.allclose(scores[0], scores[1], atol=1e-10) and torch.allclose(scores[0], scores[2], atol=1e-10)


def test_angles_are_exact_at_a_million_tokens():
    x, places = torch.randn(1, 3, 1, 64), torch.tensor([[0, 131_071, 1_048_575]])
    assert (turn(x, places).double() - by_complex(x, places, 10_000.0)).abs().max() < 1e-6


@pytest.mark.parametrize("autocast", [False, True])
def test_angles_stay_wide_in_bf16(autocast):
    """C11: d 64, positions 0 .. 4095; unit vectors give the cosines themselves."""
    x = torch.zeros(1, 4096, 1, 64, dtype=torch.bfloat16)
    x[..., :32] = 1
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        y = turn(x, torch.arange(4096)[None])
    expected = by_complex(x, torch.arange(4096)[None], 10_000.0)
    # bf16 holds the result itself to 2^-9 relative.
    assert (y.double() - expected).abs().max() <= 2**-9 + 1e-3


def test_a_mixer_in_bf16_keeps_exact_angles():
    """C11: nothing that a cast of the weights reaches holds angles."""
    mixer = registry.build("mha", 64, n_heads=1)
    wide = [t.clone() for t in mixer.rope.angles(torch.tensor([[4095]]))]
    narrow = mixer.bfloat16().rope.angles(torch.tensor([[4095]]))
    assert all(torch.equal(a, b) and a.dtype == torch.float64 for a, b in zip(wide, narrow, strict=True))
    assert not list(mixer.buffers())
