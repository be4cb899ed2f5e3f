from __future__ import annotations

import math

import pytest
import torch

from arch.language_model import LanguageModel
from experiments import optim
from experiments.optim import AdamW
from mixers.options import call


def rates(steps, **options):
    factor = AdamW(**options).factor(steps)
    return [factor(step) for step in range(steps)]


def test_cosine_by_hand():
    # Two steps up; from there half a cosine over the other eight: (1 + cos(pi k / 8)) / 2.
    cosines = [math.cos(math.pi * k / 8) for k in range(1, 9)]
    expected = [0.5, 1.0, *((1 + c) / 2 for c in cosines)]
    assert rates(10, warmup=0.2) == pytest.approx(expected)
    assert rates(10, warmup=0.2, final=0.1) == pytest.approx([0.5, 1.0, *(0.1 + 0.9 * (1 + c) / 2 for c in cosines)])


def test_wsd_by_hand():
    assert rates(10, schedule="wsd", warmup=0.2, decay=0.4) == pytest.approx(
        [0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0.0])
    assert rates(10, schedule="wsd", warmup=0.2, decay=0.4, final=0.2)[-2:] == pytest.approx([0.4, 0.2])
    # Warm-up and fall meet in one step of full rate.
    assert rates(4, schedule="wsd", warmup=0.5, decay=0.5) == pytest.approx([0.5, 1.0, 0.5, 0.0])


def test_constant_by_hand():
    assert rates(5, schedule="constant", warmup=0.4) == pytest.approx([0.5, 1, 1, 1, 1])


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
@pytest.mark.parametrize("steps", [2, 3, 17, 300])
@pytest.mark.parametrize("warmup", [0.0, 0.1, 0.8])
def test_the_highest_rate_is_reached_and_the_last_step_has_the_final_one(schedule, steps, warmup):
    found = rates(steps, schedule=schedule, warmup=warmup, final=0.05)
    assert max(found) == 1.0
    assert found[-1] == pytest.approx(0.05)


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_one_step_has_the_full_rate_and_later_steps_keep_the_last(schedule):
    assert rates(1, schedule=schedule) == [1.0]
    factor = AdamW(schedule=schedule, final=0.25).factor(10)
    # torch asks for one more step than there are.
    assert factor(10) == factor(9)


def test_a_step_is_that_of_torch_on_groups_named_by_hand():
    torch.manual_seed(0)
    model = LanguageModel("mha + linear", vocabulary=11, d_model=8, mlp="swiglu", bias=True, convolution=3, tied=False)
    options = AdamW(lr=0.1, weight_decay=0.5, betas=(0.8, 0.9), eps=1e-6)
    tokens = torch.randint(11, (2, 7))
    model(tokens).square().mean().backward()
    expected, decayed = {}, set()
    for name, parameter in model.named_parameters():
        matrix = parameter.dim() == 2 and "embedding" not in name and "convolution" not in name
        decayed |= {name} if matrix else set()
        copy = parameter.detach().clone()
        copy.grad = parameter.grad.clone()
        torch.optim.AdamW([copy], lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.5 if matrix else 0.0).step()
        expected[name] = copy
    assert {"head.weight"} < decayed and "embedding.weight" not in decayed
    options.build(model).step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name], msg=name)


def test_a_fused_step_is_the_same():
    def stepped(fused):
        torch.manual_seed(0)
        model = LanguageModel("mha", vocabulary=11, d_model=8)
        optimizer = AdamW(lr=0.1).build(model, fused=fused)
        for _ in range(3):
            model(torch.arange(6)[None]).square().mean().backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    for plain, fused in zip(stepped(False), stepped(True), strict=True):
        torch.testing.assert_close(fused, plain)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0.0}, "lr=0.0 must be above 0"),
        ({"lr": math.nan}, "lr=nan must be a finite number"),
        ({"lr": "fast"}, "lr='fast' must be a finite number"),
        ({"betas": [0.9, 1.0]}, r"betas=\[0.9, 1.0\] must be from 0 to below 1"),
        ({"betas": [0.9]}, "must have 2 entries"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1 must be 0 or above"),
        ({"clip": 0.0}, "clip=0.0 must be above 0, or null"),
        ({"warmup": 1.5}, "warmup=1.5 must be a fraction"),
        ({"schedule": "wsd", "warmup": 0.6, "decay": 0.6}, "warmup=0.6 and decay=0.6"),
        ({"schedule": "cosin"}, "schedule='cosin' is not allowed.*did you mean 'cosine'.*cosine, wsd, constant"),
        ({"learning_rate": 1.0}, "no option 'learning_rate'"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        call(AdamW, options, "optimizer")


def test_an_unknown_optimizer_gets_the_closest():
    with pytest.raises(ValueError, match=r"optimizer='adamv' is not an optimiser.*did you mean 'adamw'"):
        optim.get("adamv")
