"""The chunked cross-entropy is the plain one."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from arch import loss
from arch.language_model import LanguageModel
from arch.loss import chunks, cross_entropy


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(loss, "TOKENS", 4)
    monkeypatch.setattr(loss, "LOGITS", 1)


def plain(hidden, weight, targets, softcap=None):
    """The definition."""
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits if softcap is None else softcap * torch.tanh(logits / softcap), targets,
                           reduction="sum")


def inputs(tokens, width=5, vocabulary=11, dtype=torch.float64):
    torch.manual_seed(0)
    hidden, weight = torch.randn(tokens, width, dtype=dtype), 2 * torch.randn(vocabulary, width, dtype=dtype)
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(vocabulary, (tokens,))


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("tokens", [1, 4, 5, 17])
def test_loss_and_gradients_are_those_of_all_logits(small_chunks, tokens, softcap):
    hidden, weight, targets = inputs(tokens)
    ours, theirs = (f(hidden, weight, targets, softcap) for f in (cross_entropy, plain))
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)
    # The loss goes on into other things: its factor, and any sign of it, must arrive.
    for got, wanted in zip(*(torch.autograd.grad(-0.3 * x, (hidden, weight)) for x in (ours, theirs)), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-13)


def test_a_tied_head_gets_both_of_its_gradients(small_chunks):
    torch.manual_seed(0)
    model = LanguageModel("gqa", vocabulary=13, d_model=8, logit_softcap=2.0).double()
    tokens = torch.randint(13, (2, 9))
    model.loss(model.hidden(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()
    ours = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten(), reduction="sum").backward()
    for got, parameter in zip(ours, model.parameters(), strict=True):
        torch.testing.assert_close(got, parameter.grad, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(("frozen", "left"), [(0, 1), (1, 0)])
def test_what_needs_no_gradient_gets_none(small_chunks, frozen, left):
    arguments = inputs(6)
    arguments[frozen].requires_grad_(False)
    cross_entropy(*arguments).backward()
    torch.testing.assert_close(arguments[left].grad, torch.autograd.grad(plain(*arguments), arguments[left])[0])
    assert arguments[frozen].grad is None


def test_no_tokens_are_no_loss_and_no_gradient():
    hidden, weight, targets = inputs(0)
    value = cross_entropy(hidden, weight, targets)
    value.backward()
    assert value.item() == 0 and hidden.grad.shape == (0, 5) and not weight.grad.any()


def test_without_gradients_none_are_made(small_chunks):
    hidden, weight, targets = inputs(6)
    with torch.no_grad():
        value = cross_entropy(hidden, weight, targets)
    assert not value.requires_grad
    torch.testing.assert_close(value, plain(hidden, weight, targets))


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_under_autocast_the_error_is_that_of_plain_autocast(small_chunks, low):
    hidden, weight, targets = inputs(64, 32, 200, torch.float32)
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    wanted = torch.autograd.grad(plain(*exact, targets), exact)
    with torch.autocast("cpu", low):
        found = [torch.autograd.grad(f(hidden, weight, targets), (hidden, weight)) for f in (cross_entropy, plain)]
    for truth, ours, theirs in zip(wanted, *found, strict=True):
        assert ours.dtype == torch.float32
        # The one and the other rounding of the same products: a factor of two, as for kernels.
        assert (ours - truth).norm() <= 2 * (theirs - truth).norm()


def test_small_gradients_survive_float16_before_a_loss_scaler_comes(small_chunks):
    # 1e-9 of a probability: nothing in float16, which a scaler of 2^16 would have saved.
    hidden = torch.ones(1, 1, requires_grad=True)
    weight = torch.tensor([[20.0], [0.0]], requires_grad=True)
    with torch.autocast("cpu", torch.float16):
        value = cross_entropy(hidden, weight, torch.tensor([0]))
    (2**16 * value).backward()
    expected = 2**16 * torch.exp(torch.tensor(-20.0))
    torch.testing.assert_close(weight.grad[1, 0], expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize(("tokens", "vocabulary"), [(0, 7), (1, 7), (1000, 2**13), (1000, 2**13 + 1), (600, 2**30)])
def test_chunks_cover_every_token_once_and_hold_no_more_logits_than_they_may(tokens, vocabulary):
    parts = [list(range(tokens))[part] for part in chunks(tokens, vocabulary)]
    assert [token for part in parts for token in part] == list(range(tokens))
    assert all(len(part) * vocabulary <= loss.LOGITS or len(part) <= loss.TOKENS for part in parts)
    assert len(parts) <= -(-tokens // loss.TOKENS)


@pytest.mark.parametrize(("hidden", "targets"), [((3, 4), (3,)), ((3, 5), (2,)), ((1, 3, 5), (3,))])
def test_shapes_that_do_not_fit_are_named(hidden, targets):
    with pytest.raises(ValueError, match=r"hidden \(.*\), weight \(11, 5\) and targets \(.*\) must be"):
        cross_entropy(torch.zeros(hidden), torch.zeros(11, 5), torch.zeros(targets, dtype=torch.int64))


def test_the_logits_of_a_large_vocabulary_are_never_whole():
    hidden, weight, targets = inputs(4096, 2, 2048, torch.float32)
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            sizes.append(out.numel() if isinstance(out, torch.Tensor) else 0)
            return out

    with Watch():
        cross_entropy(hidden, weight, targets).backward()
    assert max(sizes) == loss.LOGITS == 4096 * 2048 // 4
