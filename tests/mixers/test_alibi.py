"""ALiBi: the published slopes, and the bias whatever the way tokens come in."""

from __future__ import annotations

import pytest
import torch

from mixers import registry
from mixers.alibi import slopes

transformers = pytest.importorskip("transformers")
from transformers.models.bloom.modeling_bloom import build_alibi_tensor  # noqa: E402

CPU = torch.device("cpu")


def test_slopes_by_hand():
    """Of 6 heads: those of 4, then the first and third of 8."""
    assert slopes(8, CPU).tolist() == [2.0**-i for i in range(1, 9)]
    assert slopes(6, CPU).tolist() == [2.0**-e for e in (2, 4, 6, 8, 1, 3)]
    assert slopes(1, CPU).tolist() == [2.0**-8]


@pytest.mark.parametrize("heads", range(1, 34))
def test_slopes_are_blooms_for_any_number_of_heads(heads):
    theirs = build_alibi_tensor(torch.ones(1, 2, dtype=torch.int64), heads, torch.float32)[:, 0, 1]
    assert torch.allclose(slopes(heads, CPU), theirs, rtol=1e-6, atol=0)


@pytest.mark.parametrize("window", [None, 4])
def test_a_decoded_token_sees_the_distances_of_its_position(window):
    """C18: 5 tokens, then one: the weights are those of -m (5, 4, 3, 2, 1, 0) where queries and keys are 0."""
    name, options = ("mha", {}) if window is None else ("window", {"window": window})
    mixer = registry.build(name, 6, n_heads=1, position="alibi", **options).double()
    for project in (mixer.q, mixer.k):
        torch.nn.init.zeros_(project.weight)
    for project in (mixer.v, mixer.out):
        torch.nn.init.eye_(project.weight)
    x = torch.eye(6, dtype=torch.float64)[None]
    with torch.no_grad():
        _, state = mixer.extend(x[:, :5], mixer.start(1, x))
        y, _ = mixer.extend(x[:, 5:], state)
    bias = torch.tensor([-d / 256 if window is None or d < window else float("-inf") for d in (5, 4, 3, 2, 1, 0)])
    assert torch.allclose(y[0, 0], bias.double().softmax(0), atol=1e-12)
    assert torch.allclose(mixer(x)[0, 5], y[0, 0], atol=1e-12)


def test_a_bidirectional_mixer_counts_the_distance_on_both_sides():
    mixer = registry.build("mha", 5, n_heads=1, position="alibi", causal=False).double()
    for project in (mixer.q, mixer.k):
        torch.nn.init.zeros_(project.weight)
    for project in (mixer.v, mixer.out):
        torch.nn.init.eye_(project.weight)
    weights = torch.tensor([-abs(d) / 256 for d in (-2, -1, 0, 1, 2)], dtype=torch.float64).softmax(0)
    assert torch.allclose(mixer(torch.eye(5, dtype=torch.float64)[None])[0, 2], weights, atol=1e-12)
