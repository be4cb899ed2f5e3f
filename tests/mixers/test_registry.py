"""From names and options to mixers: every wrong one is named."""

from __future__ import annotations

import logging
from typing import Literal

import pytest
import torch

from mixers import registry
from mixers.base import Mixer
from mixers.options import call, defaults
from mixers.parts import head_count


def example(
    width: int,
    *,
    rate: float = 1.0,
    kind: Literal["a", "abc"] = "a",
    count: int | None = None,
    on: bool = False,
    sizes: list[int] | tuple[int, ...] = (1, 2),
    name: str = "x",
    mixed: int | Literal["auto"] = "auto",
):
    return locals()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(rat=1.0), r"thing has no option 'rat' \(did you mean 'rate'\?\); options: rate, kind"),
        (dict(rate="fast"), "thing: rate='fast' must be a finite number"),
        (dict(rate=True), "thing: rate=True must be a finite number"),
        (dict(kind="abd"), r"thing: kind='abd' is not allowed \(did you mean 'abc'\?\); allowed: a, abc"),
        (dict(count=1.5), "thing: count=1.5 must be a whole number or null"),
        (dict(count=True), "count=True must be"),
        (dict(on=1), "thing: on=1 must be true or false"),
        (dict(sizes=3), "thing: sizes=3 must be a list"),
        (dict(sizes=[1, "b"]), "sizes=.* must be a list of whole numbers"),
        (dict(name=None), "name=None must be a text"),
        (dict(mixed="aut"), "mixed='aut' is not allowed .did you mean 'auto'.*"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        call(example, options, "thing", width=3)


def test_right_options_pass_with_an_int_as_a_float():
    got = call(example, dict(rate=2, kind="abc", count=None, on=True, sizes=[3], mixed=4), "thing", width=3)
    assert got["rate"] == 2.0 and isinstance(got["rate"], float)
    assert (got["kind"], got["on"], list(got["sizes"]), got["mixed"], got["width"]) == ("abc", True, [3], 4, 3)


def test_a_missing_option_and_a_fixed_one_are_named():
    with pytest.raises(ValueError, match="thing needs the option 'width'"):
        call(example, {}, "thing")
    with pytest.raises(ValueError, match="thing has no option 'width'"):
        call(example, dict(width=4), "thing", width=3)


def test_a_constructor_that_swallows_options_is_refused():
    def loose(**options):
        return options

    with pytest.raises(ValueError, match="takes \\*options: the signature is the config"):
        call(loose, dict(a=1), "thing")


def test_defaults_are_the_signature():
    assert defaults(example)["kind"] == "a" and "width" not in defaults(example)


def test_names_options_and_build():
    assert registry.names()[:6] == ["mha", "gqa", "mqa", "window", "linear", "based"]
    assert registry.names()[6:12] == ["retention", "gated_linear", "mamba", "mamba2", "additive", "nsa"]
    assert registry.options("based") == {
        "n_heads": None,
        "feature_dim": 16,
        "scale": None,
        "causal": True,
        "bias": False,
    }
    assert registry.build("gqa", 64, n_heads=4, n_kv_heads=2).n_kv_heads == 2


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gqaa", {}, r"unknown mixer 'gqaa' \(did you mean 'gqa'\?\); registered: mha, gqa"),
        ("gqa", dict(n_head=2), r"mixer 'gqa' has no option 'n_head' \(did you mean 'n_heads'\?\)"),
        ("mha", dict(n_heads=5), "n_heads=5 must divide d_model=64"),
        ("mha", dict(n_heads=0), "n_heads=0 must divide"),
        ("gqa", dict(n_heads=4, n_kv_heads=3), "n_heads=4 must be a multiple of n_kv_heads=3"),
        ("window", dict(window=0), "window=0 must be at least 1"),
        ("additive", dict(window=0), "window=0 must be at least 1"),
        ("additive", dict(attention_dim=0), "attention_dim=0 must be at least 1"),
        ("additive", dict(n_heads=5), "n_heads=5 must divide d_model=64"),
        ("mha", dict(position="rop"), "did you mean 'rope'"),
        ("mha", dict(head_dim=5, n_heads=2), "head_dim=5 must be an even number"),
        ("mha", dict(softcap=0.0), "softcap=0.0"),
        ("mha", dict(dropout=1.0), "dropout=1.0"),
        ("mha", dict(rope_fraction=0.0), "rope_fraction=0.0"),
        ("based", dict(feature_dim=0), "feature_dim=0 must be at least 1"),
        ("linear", dict(feature_map="relu2"), "allowed: elu"),
    ],
)
def test_wrong_mixers_are_named(name, options, message):
    with pytest.raises(ValueError, match=message):
        registry.build(name, 64, **options)


@pytest.mark.parametrize("name", [name for name in registry.names() if "causal" not in registry.options(name)])
def test_a_mixer_without_a_bidirectional_form_says_so(name):
    with pytest.raises(ValueError, match=rf"mixer '{name}' has no bidirectional form: .* got causal=False"):
        registry.build(name, 64, causal=False)
    assert type(registry.build(name, 64, causal=True)) is registry.get(name)


def test_default_heads():
    assert [head_count(d, None) for d in (64, 128, 96, 768, 100, 8)] == [1, 2, 1, 12, 1, 1]
    assert registry.build("gqa", 768).n_kv_heads == 3
    assert registry.build("gqa", 90, n_heads=9).n_kv_heads == 1  # 9 // 4 = 2 does not divide 9
    assert registry.build("mqa", 256).n_kv_heads == 1


def test_gqa_that_is_mha_says_so(caplog):
    with caplog.at_level(logging.WARNING):
        registry.build("gqa", 64)
    assert "the same as mha" in caplog.text


@pytest.fixture
def clean_registry(monkeypatch):
    registry.names()
    monkeypatch.setattr(registry, "_classes", dict(registry._classes))


def test_register_adds_a_class_and_refuses_clashes(clean_registry):
    @registry.register("mine")
    class Mine(Mixer):
        def __init__(self, d_model: int, *, power: int = 2):
            super().__init__()
            self.power = power

        def whole(self, x):
            return x**self.power

    assert registry.names()[-1] == "mine" and registry.options("mine") == {"power": 2}
    assert registry.build("mine", 4, power=3)(torch.full((1, 1, 4), 2.0))[0, 0, 0] == 8
    assert registry.register("mine")(Mine) is Mine
    for name, cls, message in (
        ("mha", Mine, "name 'mha' is taken by mixers.mha"),
        ("mlp", Mine, "none of mlp"),
        ("my mixer", Mine, "must be an identifier"),
        ("other", int, "no subclass of"),
    ):
        with pytest.raises(ValueError, match=message):
            registry.register(name)(cls)
