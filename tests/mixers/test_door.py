"""The contracts of the door on what the conformance kit does not see: a hybrid stack, the block's convolution, a mixer
with only `whole`; and on random documents and cuts. Registered mixers: test_check.py.

Truth: each document extracted, run alone through `forward`, and scattered back.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from arch.block import BlockOptions
from arch.stack import Stack
from mixers import registry
from mixers.base import Mixer, Packing
from mixers.convolution import ShortConvolution

WIDTH, TIME, ROWS = 8, 13, 3


class Cumulative(Mixer):
    """A stranger's first try: only `whole`."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)

    def whole(self, x: Tensor) -> Tensor:
        return self.project(x).cumsum(1).tanh() / (1 + torch.arange(x.shape[1], device=x.device))[:, None]


def hybrid():
    options = BlockOptions(convolution=4, parallel="normed_mean", sandwich=True)
    mixers = {"mha": {"n_heads": 2}, "window": {"window": 3}, "linear": {"n_heads": 2}}
    return Stack("mha@a + window + linear|based + mha@a", WIDTH, None, mixers, options, "sinusoidal", 64)


BUILDERS = {
    "gqa": lambda: registry.build("gqa", WIDTH, n_heads=4, n_kv_heads=2, head_dim=6, qk_norm=True, bias=True),
    "convolution": lambda: ShortConvolution(WIDTH),
    "hybrid": hybrid,
    "only whole": Cumulative,
}


@pytest.fixture(params=BUILDERS)
def mixer(request):
    torch.manual_seed(0)
    return BUILDERS[request.param]().double().eval()


def random_documents(rows=ROWS, time=TIME):
    ids = torch.sort(torch.randint(1, 4, (rows, time)), 1).values.int()
    return ids * (torch.rand(rows, time) > 0.3)


def alone(mixer, x, ids):
    """The definition of a packed call."""
    y = torch.zeros_like(x)
    for row, documents in enumerate(ids):
        for document in documents.unique().tolist():
            where = (documents == document).nonzero()[:, 0]
            if document:
                y[row, where] = mixer(x[row : row + 1, where])[0]
    return y


def piecewise(mixer, x, ids, cuts):
    state, pieces = mixer.start(len(x), x), []
    for a, b in pairwise(cuts):
        y, state = mixer.extend(x[:, a:b], state, None if ids is None else Packing(ids[:, a:b]))
        pieces.append(y)
    return torch.cat(pieces, 1), state


def random_cuts(time=TIME):
    return [0, *sorted(torch.randint(0, time + 1, (int(torch.randint(0, 6, ())),)).tolist()), time]


CUTS = ([0, 5, 13], [0, 7, 10, 13], list(range(14)), [0, 0, 4, 4, 12, 13])


def test_packed_forward_equals_documents_alone(mixer):
    for _ in range(4):
        ids, x = random_documents(), torch.randn(ROWS, TIME, WIDTH).double()
        assert torch.allclose(mixer(x, Packing(ids)), alone(mixer, x, ids), atol=1e-12)


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "unpacked"])
def test_extend_over_any_cut_equals_forward(mixer, grad, packed):
    """C02, C07, C15, C16, C31: also shorter than any convolution or window, with pads and documents anywhere."""
    for cuts in (*CUTS, *(random_cuts() for _ in range(2))):
        ids, x = random_documents() if packed else None, torch.randn(ROWS, TIME, WIDTH).double()
        before = x.clone()
        with torch.set_grad_enabled(grad):
            got, state = piecewise(mixer, x, ids, cuts)
        expected = mixer(x) if ids is None else alone(mixer, x, ids)
        assert torch.allclose(got, expected, atol=1e-12), cuts
        assert torch.equal(x, before) and state.length == TIME
        assert all(len(t) == ROWS for t in state.tensors.values())


def test_packing_may_begin_late(mixer):
    """A prefix without packing is document 1; it may go on, end, or be padded later."""
    for _ in range(3):
        x = torch.randn(ROWS, TIME, WIDTH).double()
        ids = torch.sort(torch.randint(1, 4, (ROWS, TIME)), 1).values.int() * (torch.rand(ROWS, TIME) > 0.3)
        ids[:, :4] = 1
        with torch.no_grad():
            first, state = mixer.extend(x[:, :4], mixer.start(ROWS, x))
            second, state = mixer.extend(x[:, 4:9], state, Packing(ids[:, 4:9]))
            third, _ = mixer.extend(x[:, 9:], state, Packing(ids[:, 9:]))
        assert torch.allclose(torch.cat([first, second, third], 1), alone(mixer, x, ids), atol=1e-12)


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_ragged_prefill_then_decode_without_packing(mixer, side):
    lengths, time = [5, 2, 7], 7
    x = torch.randn(ROWS, time + 4, WIDTH).double()
    ids = torch.zeros(ROWS, time, dtype=torch.int32)
    for row, n in enumerate(lengths):
        where = {"left": range(time - n, time), "right": range(n), "middle": [*range(n - 1), time - 1]}[side]
        ids[row, list(where)] = 1
    with torch.no_grad():
        _, state = mixer.extend(x[:, :time], mixer.start(ROWS, x), Packing(ids))
        fork, pieces = state.clone(), []
        for t in range(time, time + 4):
            y, state = mixer.extend(x[:, t : t + 1], state)
            pieces.append(y)
        at_once, _ = mixer.extend(x[:, time:], fork)
    for row in range(ROWS):
        real = torch.cat([x[row, :time][ids[row] > 0], x[row, time:]])[None]
        expected = mixer(real)[0, -4:]
        assert torch.allclose(torch.cat(pieces, 1)[row], expected, atol=1e-12)
        assert torch.allclose(at_once[row], expected, atol=1e-12)


@pytest.mark.parametrize("content", [3.0, float("nan"), float("inf")])
@pytest.mark.parametrize("rows", [1, 2])
def test_pads_influence_nothing_and_get_nothing(mixer, content, rows):
    """C05, C06, C39, C40: at batch 1 too, whatever stands there."""
    ids = torch.tensor([[0, 0, 1, 1, 0, 1, 2, 0], [1, 0, 1, 1, 2, 2, 2, 2]], dtype=torch.int32)[:rows]
    clean = torch.randn(rows, 8, WIDTH).double()
    dirty = clean.masked_fill((ids == 0)[..., None], content).requires_grad_()
    y = mixer(dirty, Packing(ids))
    assert (y[ids == 0] == 0).all()
    assert torch.allclose(y, alone(mixer, clean, ids), atol=1e-12)
    grad = torch.autograd.grad(y.square().sum(), dirty)[0]
    assert (grad[ids == 0] == 0).all() and torch.isfinite(grad).all()


def test_later_tokens_and_other_rows_and_documents_do_not_leak(mixer):
    """C17: exact zeros, with the first document's last token beside the second's first."""
    x = torch.randn(2, 12, WIDTH, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[1] * 5 + [2] * 7] * 2, dtype=torch.int32)
    for packing, first in ((None, 0), (Packing(ids), 5)):
        y = mixer(x, packing)
        grad = torch.autograd.grad(y[0, 8].sum(), x)[0]
        assert (grad[0, 9:] == 0).all() and (grad[1] == 0).all() and (grad[0, :first] == 0).all()
        assert (grad[0, 8] != 0).any()


def test_clone_is_independent_and_rows_can_be_reordered(mixer):
    x = torch.randn(ROWS, 9, WIDTH).double()
    with torch.no_grad():
        _, state = mixer.extend(x[:, :5], mixer.start(ROWS, x), Packing(torch.ones(ROWS, 5, dtype=torch.int32)))
        saved = {name: t.clone() for name, t in state.tensors.items()}
        fork = state.clone()
        mixer.extend(torch.randn(ROWS, 4, WIDTH).double(), fork)
        assert all(torch.equal(state[name], t) for name, t in saved.items())
        rows = torch.tensor([2, 0, 0, 1])
        swapped, _ = mixer.extend(x[rows, 5:], state.reorder(rows))
        straight, _ = mixer.extend(x[:, 5:], state)
    assert torch.allclose(swapped, straight[rows], atol=1e-12)


def test_a_mixer_with_only_whole_cannot_be_bidirectional():
    mixer = Cumulative().double()
    mixer.causal = False
    with pytest.raises(ValueError, match="causal=False needs its own `mix`"):
        mixer(torch.zeros(1, 3, WIDTH).double())
    assert Cumulative().decode == "recompute" and registry.build("mha", 8).decode == "state"


def test_a_mixer_without_mix_or_whole_says_what_is_missing():
    class Empty(Mixer):
        pass

    with pytest.raises(NotImplementedError, match="Empty must define `mix` and `empty`, or `whole`"):
        Empty()(torch.zeros(1, 2, 3))


@pytest.mark.parametrize("name", registry.names())
def test_autocast_gives_bf16_with_finite_gradients_and_wide_states(name):
    """C41."""
    torch.manual_seed(0)
    mixer = registry.build(name, 128)
    x = torch.randn(2, 65, 128, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = mixer(x)
        y.float().square().mean().backward()
        with torch.no_grad():
            _, state = mixer.extend(x[:, :64], mixer.start(2, x))
            last, state = mixer.extend(x[:, 64:], state)
    assert y.dtype == torch.bfloat16
    assert all(p.dtype == torch.float32 and torch.isfinite(p.grad).all() for p in mixer.parameters())
    assert (last[:, 0] - y[:, 64]).abs().max() < 0.03
    assert all(t.dtype == torch.float32 for key, t in state.tensors.items() if key in ("kv", "z"))


def test_wrong_shape_is_named():
    with pytest.raises(ValueError, match=r"wants x \[B, T, D\]; got \[3, 8\]"):
        registry.build("mha", 8)(torch.zeros(3, 8))
    with pytest.raises(ValueError, match="does not fit packing"):
        registry.build("mha", 8)(torch.zeros(1, 3, 8), Packing(torch.ones(1, 4, dtype=torch.int32)))
