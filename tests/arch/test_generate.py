"""Generation against full forwards, hand-worked distributions, and its errors."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch
from scipy.stats import chisquare

from arch.generate import Sampling
from arch.language_model import LanguageModel
from mixers import registry
from mixers.conformance.definitions import declared

SMALL = {name: dict(declared(registry.get(name)).options) for name in registry.names()}
# Every registered mixer, those to come too, and hybrids.
LAYOUTS = [*registry.names(), "window + linear + mha", "mha|linear + window"]
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7, 9]]


def build(layout="window + linear + mha", **options):
    torch.manual_seed(0)
    width = declared(registry.get(layout)).d_model if layout in registry.names() else 16
    options = {"mixers": SMALL, "init_std": 0.5} | options
    return LanguageModel(layout, vocabulary=17, d_model=width, **options).double()


def slowly(model, prompt, count):
    """Greedy by the definition: a full forward over everything for each token."""
    tokens = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("position", ["none", "learned"])
def test_greedy_generation_is_the_arg_max_of_full_forwards(layout, position):
    options = {"max_length": 20, "convolution": 3} if position == "learned" else {}
    model = build(layout, position=position, **options).eval()
    expected = [slowly(model, prompt, 12) for prompt in PROMPTS]
    found = model.generate(PROMPTS, 12)
    assert [row.tolist() for row in found] == expected
    assert len({token for row in expected for token in row}) > 1
    # Prompts of one length take a path without packing.
    assert [row.tolist() for row in model.generate(torch.tensor([PROMPTS[0], PROMPTS[2][:5]]), 6)] == [
        slowly(model, PROMPTS[0], 6), slowly(model, PROMPTS[2][:5], 6)]


def test_prompts_may_be_rows_of_tensors_of_any_integer_type():
    model = build()
    rows = [torch.tensor(PROMPTS[0], dtype=torch.int32), torch.tensor(PROMPTS[1], dtype=torch.uint8)]
    assert [row.tolist() for row in model.generate(rows, 3)] == [row.tolist() for row in model.generate(PROMPTS[:2], 3)]


def test_a_row_ends_with_its_stop_and_the_others_go_on():
    model = build()
    whole = [row.tolist() for row in model.generate(PROMPTS, 12)]
    stop = whole[0][4]
    expected = [row[: row.index(stop) + 1] if stop in row else row for row in whole]
    assert [row.tolist() for row in model.generate(PROMPTS, 12, stop=stop)] == expected
    assert len(expected[0]) <= 5
    calls = []
    model.head.register_forward_hook(lambda *_: calls.append(1))
    assert len(model.generate(PROMPTS[:1], 12, stop=stop)[0]) == len(calls) == len(expected[0])


def test_only_the_last_logits_of_a_prompt_are_computed():
    model, sizes = build(), []
    model.head.register_forward_hook(lambda layer, inputs, output: sizes.append(inputs[0].shape))
    model.generate(PROMPTS, 2)
    assert sizes == [(3, 16), (3, 1, 16)]


def test_dropout_is_off_and_the_mode_of_the_model_stays():
    model = build(dropout=0.5).train()
    first, second = model.generate(PROMPTS, 8), model.generate(PROMPTS, 8)
    assert model.training and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    model.eval()
    assert all(torch.equal(a, b) for a, b in zip(first, model.generate(PROMPTS, 8), strict=True))
    assert not model.training


LOGITS = torch.tensor([0.5, 0.1, 0.3, 0.1]).log()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"temperature": 1.0}, [0.5, 0.1, 0.3, 0.1]),
        # Squares: 25, 1, 9, 1 of 36.
        ({"temperature": 0.5}, [25 / 36, 1 / 36, 9 / 36, 1 / 36]),
        ({"temperature": 1.0, "top_k": 1}, [1, 0, 0, 0]),
        ({"temperature": 1.0, "top_k": 2}, [5 / 8, 0, 3 / 8, 0]),
        # Of equals, the lower id.
        ({"temperature": 1.0, "top_k": 3}, [5 / 9, 1 / 9, 3 / 9, 0]),
        ({"temperature": 1.0, "top_k": 4}, [0.5, 0.1, 0.3, 0.1]),
        ({"temperature": 1.0, "top_p": 0.4}, [1, 0, 0, 0]),
        # The second is needed to reach 0.6.
        ({"temperature": 1.0, "top_p": 0.6}, [5 / 8, 0, 3 / 8, 0]),
        ({"temperature": 1.0, "top_p": 0.85}, [5 / 9, 1 / 9, 3 / 9, 0]),
        ({"temperature": 1.0, "top_p": 1.0}, [0.5, 0.1, 0.3, 0.1]),
        # After top_k the shares are 5/8 and 3/8: 0.6 is reached by the first alone.
        ({"temperature": 1.0, "top_k": 2, "top_p": 0.6}, [1, 0, 0, 0]),
        # After the temperature the first has 25/36 = 0.69.
        ({"temperature": 0.5, "top_p": 0.6}, [1, 0, 0, 0]),
        ({"temperature": 1e-320}, [1, 0, 0, 0]),
        ({}, [1, 0, 0, 0]),
    ],
)
def test_distributions_by_hand(options, expected):
    found = Sampling(**options).probabilities(torch.stack([LOGITS, LOGITS.roll(1)]))
    expected = torch.tensor(expected, dtype=torch.float64)
    assert torch.allclose(found[0], expected, atol=1e-7)
    # In another row the same tokens stand elsewhere.
    assert found[1].sum() == pytest.approx(1) and found[1, 1] == pytest.approx(float(expected[0]), abs=1e-7)


def test_a_sum_that_top_p_reaches_exactly_is_enough():
    assert Sampling(1.0, top_p=0.5).probabilities(torch.zeros(4)).tolist() == [0.5, 0.5, 0, 0]


def test_half_precision_and_huge_logits_have_a_distribution():
    found = Sampling(0.7, top_p=0.9).probabilities(torch.tensor([6e4, -6e4, 6e4], dtype=torch.float16))
    assert found.tolist() == [0.5, 0, 0.5]


def test_draws_follow_the_distribution_and_the_seed():
    sampling, rows = Sampling(1.5, top_k=3), LOGITS.expand(4000, 4)
    drawn = [sampling.choose(rows, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    counts = Counter(drawn[0].tolist())
    expected = sampling.probabilities(LOGITS)
    assert set(counts) == {0, 1, 2}
    assert chisquare([counts[i] for i in range(3)], (4000 * expected[:3]).tolist()).pvalue > 1e-3


def test_sampled_generation_is_repeated_by_its_seed():
    model = build()
    seeds = (torch.Generator().manual_seed(seed) for seed in (0, 0, 1))
    texts = [[row.tolist() for row in model.generate(PROMPTS, 20, temperature=2.0, generator=g)] for g in seeds]
    assert texts[0] == texts[1] != texts[2]


def test_one_likely_token_alone_is_greedy():
    model = build()
    greedy = [row.tolist() for row in model.generate(PROMPTS, 8)]
    for options in ({"top_k": 1}, {"top_p": 1e-9}):
        assert [row.tolist() for row in model.generate(PROMPTS, 8, temperature=3.0, **options)] == greedy


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature=-0.1 must be a finite number of at least 0"),
        ({"temperature": float("nan")}, "temperature=nan must"),
        ({"temperature": float("inf")}, "temperature=inf must"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p=0.0 must be above 0 and at most 1"),
        ({"temperature": 1.0, "top_p": 1.1}, "top_p=1.1 must"),
        ({"temperature": 1.0, "top_k": 0}, "top_k=0 must be a whole number of at least 1"),
        ({"temperature": 1.0, "top_k": 18}, "top_k=18 must be at most the vocabulary, 17"),
        ({"top_k": 3}, "top_k=3 needs a temperature above 0"),
        ({"top_p": 0.5}, "top_p=0.5 needs a temperature above 0"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be a whole number of at least 1"),
        ({"max_new_tokens": 2.5}, "max_new_tokens=2.5 must be a whole number"),
        ({"stop": True}, "stop=True must be an id"),
        ({"stop": 17}, "stop=17 must be an id, from 0 to 16"),
        ({"prompts": []}, "prompts must hold at least one prompt"),
        ({"prompts": [[1], []]}, "prompt 1 is empty"),
        ({"prompts": [1, 2]}, "prompt 0 must be a row of ids; got shape []: [[1, 2]] is one prompt"),
        ({"prompts": [[1, 17]]}, "prompt 0 has the id 17; ids are from 0 to 16"),
        ({"prompts": [[1], [-1]]}, "prompt 1 has the id -1"),
        ({"prompts": [[1.0]]}, "prompt 0 must hold integers; got torch.float32"),
    ],
)
def test_what_cannot_be_generated_is_said(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build().generate(**({"prompts": PROMPTS, "max_new_tokens": 3} | options))


def test_more_positions_than_were_learned_are_refused_before_the_first_token():
    model = build(position="learned", max_length=12)
    assert len(model.generate(PROMPTS, 4)[2]) == 4
    message = "position=learned was built for max_length=12; a prompt of 9 and max_new_tokens=5 need 13"
    with pytest.raises(ValueError, match=re.escape(message)):
        model.generate(PROMPTS, 5)


def test_a_model_that_sees_later_tokens_does_not_generate():
    with pytest.raises(ValueError, match="causal=False has no decode"):
        build("mha", mixers={"mha": {"causal": False}}).generate(PROMPTS, 1)
