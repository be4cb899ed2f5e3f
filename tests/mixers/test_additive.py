"""Additive attention against the formulas of the paper; what every mixer must do: test_check.py."""

from __future__ import annotations

import pytest
import torch

from mixers import registry
from mixers.base import Memory, Packing

D, A = 6, 5


def built(**options):
    """One head whose values are the annotations themselves, in float64."""
    torch.manual_seed(0)
    mixer = registry.build("additive", D, **{"n_heads": 1, "attention_dim": A} | options).double()
    with torch.no_grad():
        mixer.v.weight.copy_(torch.eye(D))
        mixer.out.weight.copy_(torch.eye(D))
        if mixer.bias is not None:
            mixer.bias.normal_()
    return mixer


def alignment(mixer, state, annotations):
    """The context of one decoder state [D] over annotations [S, D]: arXiv:1409.0473, section 3.1 and appendix A.1.2.

    e_j = v_a . tanh(W_a s + U_a h_j), alpha = softmax(e), c = sum_j alpha_j h_j; the bias is ours.
    """
    bias = 0 if mixer.bias is None else mixer.bias[0]
    energies = [mixer.score[0] @ torch.tanh(mixer.q.weight @ state + mixer.k.weight @ h + bias) for h in annotations]
    weights = torch.stack(energies).exp() / torch.stack(energies).exp().sum()
    return sum(alpha * h for alpha, h in zip(weights, annotations, strict=True))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("times", [(1, 1), (4, 9), (20, 40)])
def test_with_a_memory_equals_the_paper(bias, times):
    mixer = built(bias=bias)
    states, annotations = (torch.randn(2, time, D, dtype=torch.float64) for time in times)
    expected = torch.stack(
        [torch.stack([alignment(mixer, states[b, t], annotations[b]) for t in range(times[0])]) for b in range(2)]
    )
    memory = Memory(annotations)
    assert torch.allclose(mixer(states, memory=memory), expected, rtol=0, atol=1e-12)
    start, outputs = mixer.start(2, states, memory), []
    for t in range(times[0]):
        y, start = mixer.extend(states[:, t : t + 1], start)
        outputs.append(y)
    assert torch.allclose(torch.cat(outputs, 1), expected, rtol=0, atol=1e-12)


def test_a_query_sees_the_annotations_of_its_own_document():
    mixer = built()
    states, annotations = (torch.randn(1, time, D, dtype=torch.float64) for time in (4, 6))
    ids, seen = torch.tensor([[1, 2, 0, 2]]).int(), torch.tensor([[1, 1, 0, 2, 2, 2]]).int()
    y = mixer(states, Packing(ids), Memory(annotations, Packing(seen)))
    for t, document in enumerate(ids[0].tolist()):
        own = annotations[0, seen[0] == document]
        expected = alignment(mixer, states[0, t], own) if document else torch.zeros(D)
        assert torch.allclose(y[0, t], expected.double(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("window", [1, 3, 50])
def test_a_window_equals_the_paper_over_the_last_tokens(window):
    mixer, x = built(window=window), torch.randn(1, 12, D, dtype=torch.float64)
    expected = torch.stack([alignment(mixer, x[0, t], x[0, max(0, t + 1 - window) : t + 1]) for t in range(12)])
    assert torch.allclose(mixer(x)[0], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [1e3, 1e6])
def test_huge_scores_stay_finite(size):
    torch.manual_seed(0)
    mixer = registry.build("additive", 16, n_heads=2)
    with torch.no_grad():
        mixer.score.mul_(size)
    x = (size * torch.randn(2, 33, 16)).requires_grad_()
    y = mixer(x)
    y.square().mean().backward()
    assert y.isfinite().all() and x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in mixer.parameters())
