"""Every registered mixer has every property."""

from __future__ import annotations

import pytest
import torch

from mixers import registry
from mixers.check import NOT, cases, examine
from mixers.conformance.definitions import Conformance, declared, taylor_features
from mixers.conformance.properties import PROPERTIES
from mixers.convolution import ShortConvolution

BUILT_IN = (
    *("mha", "gqa", "mqa", "window", "linear", "based", "retention", "gated_linear", "mamba", "mamba2"),
    *("additive", "nsa"),
)


@pytest.mark.parametrize("case", cases(), ids=str)
def test_mixer(case):
    case.run()


@pytest.mark.parametrize("case", cases(ShortConvolution), ids=str)
def test_convolution(case):
    case.run()


@pytest.mark.parametrize("name", BUILT_IN)
def test_ours_declare_what_every_property_needs(name):
    said = declared(registry.get(name))
    assert said.reference is not None and said.growth is not None
    assert (said.unordered is not None) == ("causal" in registry.options(name))
    assert set(said.alternatives) == set(registry.options(name))
    assert not said.exempt


def test_a_stranger_says_nothing_and_is_told_what_does_not_apply():
    reasons = {
        each.name: examine(ShortConvolution, each).why
        for each in PROPERTIES
        if each.name in ("flops", "growth", "options", "permutation", "definition", "bidirectional")
    }
    assert reasons == {
        "bidirectional": "it has no form with causal=False",
        "permutation": "no options are declared under which it ignores order (`unordered`)",
        "flops": "no definition is declared (`reference`), whose products could be counted",
        "growth": "no exponent is claimed (`growth`)",
        "options": "no other values are declared (`alternatives`)",
        "definition": "no definition is declared (`reference`)",
    }
    assert examine(ShortConvolution, PROPERTIES[-1]).verdict == NOT


def test_alternatives_that_do_not_interact_are_one_setting():
    said = Conformance(alternatives={"a": 1, "b": 2, "c": 3, "d": 4}, together=(("b", "d"),))
    assert said.changes() == [{"a": 1}, {"b": 2, "d": 4}, {"c": 3}]
    for wrong in ((("b", "e"),), (("b", "d"), ("a", "b"))):
        with pytest.raises(ValueError, match=r"together names '[be]'; allowed, once: a, b, c, d"):
            Conformance(alternatives=said.alternatives, together=wrong).changes()


def test_declarations_are_not_inherited():
    class Other(registry.get("mha")):
        pass

    assert declared(Other).reference is None


def test_the_taylor_map_of_the_definition_is_the_published_kernel():
    mixer = registry.build("based", 16, n_heads=2, feature_dim=3, scale=0.7)
    q, k = torch.randn(2, 5, 3).double()
    s = 0.7 * (q * k).sum(-1)
    weights = (taylor_features(mixer, q) * taylor_features(mixer, k)).sum(-1)
    assert torch.allclose(weights, 1 + s + s**2 / 2, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_linear_attention_stay_wide_under_autocast(dtype):
    """Products that autocast narrows lose the normaliser: features that cancel, sums above 65504."""
    torch.manual_seed(0)
    mixer = registry.build("based", 16, n_heads=2, feature_dim=3)
    x = 8 * torch.randn(2, 65, 16)
    with torch.autocast("cpu", dtype=dtype), torch.no_grad():
        y, state = mixer.extend(x, mixer.start(2, x))
    assert y.isfinite().all() and all(t.dtype == torch.float32 for t in state.tensors.values())
