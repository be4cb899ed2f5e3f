"""Masking as BERT does it."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.corpus.masking import mask


@pytest.mark.parametrize(("length", "count"), [(1, 1), (3, 1), (10, 2), (20, 3), (128, 19), (512, 77)])
def test_15_percent_are_chosen_and_at_least_one(length, count):
    tokens = np.arange(length) % 7
    hidden, chosen = mask(tokens, 7, np.random.default_rng(0))
    assert chosen.sum() == count and np.array_equal(hidden[~chosen], tokens[~chosen])


def test_of_the_chosen_8_of_10_are_masked_1_of_10_is_random_and_1_of_10_stays():
    vocabulary, rng = 1000, np.random.default_rng(1)
    tokens = np.full(40_000, 5)
    hidden, chosen = mask(tokens, vocabulary, rng)
    hidden = hidden[chosen]
    shares = (hidden == vocabulary).mean(), (hidden == 5).mean()
    # Four standard deviations of 6,000 draws; a random token is the old one once in a thousand.
    assert abs(shares[0] - 0.8) < 4 * np.sqrt(0.16 / 6000) and abs(shares[1] - 0.1001) < 4 * np.sqrt(0.09 / 6000)
    other = hidden[(hidden != vocabulary) & (hidden != 5)]
    assert other.min() >= 0 and other.max() < vocabulary and len(np.unique(other)) > 350


def test_every_place_is_chosen_as_often_as_another():
    counts = sum(mask(np.zeros(20, dtype=np.int64), 3, np.random.default_rng(i))[1].astype(int) for i in range(4000))
    assert abs(counts - 600).max() < 4.5 * np.sqrt(4000 * 0.15 * 0.85)


def test_the_choice_is_a_function_of_the_generator_alone():
    tokens = np.arange(50)
    one, other, third = (mask(tokens, 50, np.random.default_rng(seed))[1] for seed in (3, 3, 4))
    assert np.array_equal(one, other) and not np.array_equal(one, third)
