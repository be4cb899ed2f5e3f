"""Length scalings of RoPE: hand-worked values, and caches under angles that change with the length.

Whole mixers against transformers' own tables: test_parity.py.
"""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from mixers import registry
from mixers.base import Packing
from mixers.rope import Rope

TRAINED, WIDTH = 16, 8
LONGROPE = dict(
    rope_type="longrope",
    short_factor=[1.0, 1.2],
    long_factor=[1.5, 6.0],
    original_max_position_embeddings=TRAINED,
    factor=4.0,
)
BY_LENGTH = {
    "dynamic": dict(rope_type="dynamic", factor=4.0, original_max_position_embeddings=TRAINED),
    "longrope": LONGROPE,
}
FIXED = {
    "linear": dict(rope_type="linear", factor=4.0),
    "ntk": dict(rope_type="ntk", factor=4.0),
    "yarn": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=TRAINED),
    "llama3": dict(rope_type="llama3", factor=4.0, original_max_position_embeddings=TRAINED),
}
MIXERS = {"mha": {}, "gqa": dict(n_heads=4, n_kv_heads=2, head_dim=4), "window": dict(window=5)}


def steps(options, length=1, head_dim=64, base=10_000.0):
    """theta_i of every pair."""
    rope = Rope(head_dim, base, 1.0, "half", options)
    return rope.scaling.frequencies(base, head_dim, torch.tensor(length)).flatten().tolist(), rope.scaling.amplitude


def plain(head_dim=64, base=10_000.0):
    return [base ** (-2 * i / head_dim) for i in range(head_dim // 2)]


def test_linear_divides_every_step():
    assert steps(FIXED["linear"])[0] == pytest.approx([theta / 4 for theta in plain()])


def test_ntk_leaves_the_fastest_pair_and_slows_the_slowest_by_the_factor():
    got, amplitude = steps(FIXED["ntk"])
    assert got[0] == 1 and got[-1] == pytest.approx(plain()[-1] / 4) and amplitude == 1
    shares = [theta / mine for theta, mine in zip(plain(), got, strict=True)]
    assert shares == sorted(shares) and shares[1] < 1.05


def test_dynamic_is_plain_up_to_the_trained_length_and_ntk_of_a_growing_factor_past_it():
    for length in (1, TRAINED):
        assert steps(BY_LENGTH["dynamic"], length)[0] == pytest.approx(plain())
    for length, factor in ((2 * TRAINED, 5.0), (4 * TRAINED, 13.0)):  # 4 n / L - 3
        assert steps(BY_LENGTH["dynamic"], length)[0] == pytest.approx(steps(dict(rope_type="ntk", factor=factor))[0])


def test_yarn_keeps_fast_pairs_interpolates_slow_ones_and_scales_attention():
    """C37: factor 4, original 1024: the ramp is from pair 5.7 (32 turns in 1024 tokens), rounded down, to 17.7, up."""
    yarn = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=1024)
    got, amplitude = steps(yarn)
    assert [64 * math.log(1024 / (2 * math.pi * turns)) / (2 * math.log(10_000)) for turns in (32, 1)] == pytest.approx(
        [5.655, 17.697], abs=1e-3
    )
    expected = [theta * (1 - r + r / 4) for i, theta in enumerate(plain()) for r in [min(max((i - 5) / 13, 0), 1)]]
    assert got == pytest.approx(expected)
    assert amplitude == pytest.approx(1.13863, abs=1e-5)
    assert steps(yarn | {"attention_factor": 1.0}) == (got, 1.0)


def test_llama3_by_wavelength():
    """Factor 8, original 8192: wavelengths below 2048 stay, above 8192 are divided, a line in 8192 / them between."""
    got, _ = steps(dict(rope_type="llama3", factor=8.0, original_max_position_embeddings=8192), base=500_000.0)
    for theta, mine in zip(plain(base=500_000.0), got, strict=True):
        wavelength = 2 * math.pi / theta
        kept = min(max((8192 / wavelength - 1) / 3, 0), 1)
        assert mine == pytest.approx(theta * kept + theta / 8 * (1 - kept))


def test_longrope_takes_the_given_factors_of_the_length():
    for length, factors in ((TRAINED, (1.0, 1.2)), (TRAINED + 1, (1.5, 6.0))):
        got, amplitude = steps(LONGROPE, length, head_dim=4)
        assert got == pytest.approx([1 / factors[0], 0.01 / factors[1]])
        assert amplitude == pytest.approx(math.sqrt(1 + math.log(4) / math.log(16)))
    assert steps({**LONGROPE, "factor": None, "attention_factor": 1.5}, head_dim=4)[1] == 1.5


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        (FIXED["linear"], dict(factor=2.0)),
        (FIXED["ntk"], dict(factor=2.0)),
        (BY_LENGTH["dynamic"], dict(factor=2.0, original_max_position_embeddings=8)),
        (
            FIXED["yarn"] | {"original_max_position_embeddings": 1024},
            dict(
                factor=2.0,
                original_max_position_embeddings=64,
                beta_fast=2.0,
                beta_slow=0.1,
                attention_factor=1.0,
                truncate=False,
            ),
        ),
        (
            LONGROPE,
            dict(
                factor=2.0,
                original_max_position_embeddings=64,
                short_factor=[1.0, 3.0],
                long_factor=[1.0, 1.0],
            ),
        ),
        (
            FIXED["llama3"],
            dict(factor=2.0, original_max_position_embeddings=64, low_freq_factor=0.1, high_freq_factor=2.0),
        ),
    ],
    ids=lambda options: options.get("rope_type", ""),
)
def test_every_option_has_an_effect(options, changes):
    """C42."""
    head_dim = 4 if options is LONGROPE else 64
    for name, value in changes.items():
        tables = [[steps(each, n, head_dim) for n in (8, 32)] for each in (options, options | {name: value})]
        assert tables[0] != tables[1], name


@pytest.fixture(params=MIXERS)
def build(request):
    def build(scaling):
        torch.manual_seed(0)
        options = {"n_heads": 2, **MIXERS[request.param]}
        return registry.build(request.param, WIDTH, rope_scaling=scaling, **options).double()

    return build


@pytest.mark.parametrize("kind", BY_LENGTH)
@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
def test_cached_keys_are_never_left_on_old_angles(build, kind, grad):
    """C13: trained 16, prompt 14, generate 6: each output equals that of an uncached call on all tokens so far."""
    mixer, x = build(BY_LENGTH[kind]), torch.randn(2, 20, WIDTH).double()
    with torch.set_grad_enabled(grad):
        y, state = mixer.extend(x[:, :14], mixer.start(2, x))
        assert torch.allclose(y, mixer(x[:, :14]), atol=1e-12)
        for end in range(15, 21):
            y, state = mixer.extend(x[:, end - 1 : end], state)
            assert torch.allclose(y[:, 0], mixer(x[:, :end])[:, -1], atol=1e-12)
    # The switch matters: past 16 tokens, the same queries and keys score otherwise than up to there.
    assert not torch.allclose(mixer(x)[:, 15], mixer(x[:, :16])[:, 15], atol=1e-4)


@pytest.mark.parametrize("kind", BY_LENGTH)
def test_pieces_of_any_length_are_at_the_angles_of_their_end(build, kind):
    mixer, x = build(BY_LENGTH[kind]), torch.randn(2, 40, WIDTH).double()
    for cuts in ((0, 15, 18, 40), (0, 3, 3, 30, 31, 40), (0, 17, 40)):
        state = mixer.start(2, x)
        with torch.no_grad():
            for start, end in pairwise(cuts):
                y, state = mixer.extend(x[:, start:end], state)
                assert torch.allclose(y, mixer(x[:, :end])[:, start:], atol=1e-12)


@pytest.mark.parametrize("kind", BY_LENGTH)
def test_each_packed_document_has_the_angles_of_its_own_length(build, kind):
    """Rows of documents and pads, whole and in two pieces; the second goes on with the first's last document."""
    mixer, x = build(BY_LENGTH[kind]), torch.randn(2, 45, WIDTH).double()
    ids = torch.tensor([[1] * 10 + [0] * 2 + [2] * 20 + [3] * 13, [0] * 3 + [7] * 40 + [4] * 2], dtype=torch.int32)
    with torch.no_grad():
        whole = mixer(x, Packing(ids))
        first, state = mixer.extend(x[:, :25], mixer.start(2, x), Packing(ids[:, :25]))
        second, _ = mixer.extend(x[:, 25:], state, Packing(ids[:, 25:]))
        for row, documents in enumerate(ids):
            for document in set(documents.tolist()) - {0}:
                where = (documents == document).nonzero()[:, 0]
                alone = mixer(x[row, where][None])[0]
                assert torch.allclose(whole[row, where], alone, atol=1e-12)
                early = where[where < 25]
                assert torch.allclose(first[row, early], mixer(x[row, early][None])[0], atol=1e-12)
                assert torch.allclose(second[row, where[where >= 25] - 25], alone[where >= 25], atol=1e-12)


@pytest.mark.parametrize("kind", BY_LENGTH)
def test_ragged_rows_go_on_at_the_angles_of_their_own_length(build, kind):
    mixer, lengths = build(BY_LENGTH[kind]), (4, 15, 19)
    x, new = torch.randn(3, 19, WIDTH).double(), torch.randn(3, 4, WIDTH).double()
    with torch.no_grad():
        _, state = mixer.extend(x, mixer.start(3, x), Packing.from_lengths(torch.tensor(lengths), 19))
        for step in range(4):
            y, state = mixer.extend(new[:, step : step + 1], state)
            for row, length in enumerate(lengths):
                alone = torch.cat([x[row, :length], new[row, : step + 1]])[None]
                assert torch.allclose(y[row, 0], mixer(alone)[0, -1], atol=1e-12)


@pytest.mark.parametrize("kind", FIXED)
def test_fixed_scalings_decode_past_the_trained_length(build, kind):
    """C38: trained 16, factor 4, 64 tokens; cut at 15 and 18."""
    mixer, x = build(FIXED[kind]), torch.randn(2, 64, WIDTH).double()
    whole, state = mixer(x), mixer.start(2, x)
    with torch.no_grad():
        for start, end in ((0, 15), (15, 18), (18, 64)):
            y, state = mixer.extend(x[:, start:end], state)
            assert torch.allclose(y, whole[:, start:end], atol=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(factor=2.0), "rope_scaling.rope_type=None is not allowed; allowed: linear, ntk, dynamic"),
        (dict(rope_type="yarm"), r"rope_type='yarm' is not allowed \(did you mean 'yarn'\?\); allowed: linear"),
        (dict(rope_type="linear"), "rope_scaling 'linear' needs the option 'factor'"),
        (dict(rope_type="linear", factor=0.5), "factor=0.5 must be at least 1"),
        (dict(rope_type="linear", factor="2"), "factor='2' must be a finite number"),
        (dict(rope_type="linear", faktor=2.0), r"has no option 'faktor' \(did you mean 'factor'\?\)"),
        (FIXED["yarn"] | {"beta_slow": 40.0}, "beta_slow=40.0 must be above 0 and below beta_fast=32.0"),
        (FIXED["yarn"] | {"attention_factor": 0.0}, "attention_factor=0.0 must be above 0"),
        (FIXED["llama3"] | {"high_freq_factor": 1.0}, "low_freq_factor=1.0 must be above 0 and below high_freq_factor"),
        (LONGROPE | {"short_factor": [1.0]}, r"short_factor=\[1.0\] must be 2 numbers above 0, one a pair"),
        (LONGROPE | {"attention_factor": 1.2}, "give one of factor=4.0 .* and attention_factor=1.2"),
        (LONGROPE | {"original_max_position_embeddings": 1}, "original_max_position_embeddings=1 must be at least 2"),
    ],
    ids=str,
)
def test_wrong_scalings_are_named(options, message):
    with pytest.raises(ValueError, match=f"^mixer 'mha': .*{message}"):
        registry.build("mha", 8, n_heads=2, rope_scaling=options)


def test_scalings_that_cannot_be_are_named():
    with pytest.raises(ValueError, match="needs position=rope; got alibi"):
        registry.build("mha", 8, position="alibi", rope_scaling=FIXED["linear"])
    with pytest.raises(ValueError, match="turning channels=2 must be at least 4"):
        registry.build("mha", 8, n_heads=4, rope_scaling=FIXED["ntk"])
    with pytest.raises(ValueError, match="rope_scaling='yarn' must be a mapping or null"):
        registry.build("mha", 8, rope_scaling="yarn")
