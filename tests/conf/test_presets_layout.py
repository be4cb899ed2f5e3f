"""The presets as text: their layouts at published depths, and what a preset may and may not say."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from arch.layout import layers

MIXERS = {"mha", "gqa", "mqa", "window", "linear", "based", "nsa"}
MODEL_OPTIONS = {"layout", "mixers", "mlp", "norm", "sandwich", "bias", "position", "tied", "logit_softcap"}
MIXER_OPTIONS = {"mixer", "window", "causal", "position", "rope_base", "rope_fraction", "bias", "qk_norm", "softcap"}

FOLDER = Path(__file__).resolve().parents[2] / "conf" / "stack"
PRESETS = {path.stem: OmegaConf.to_container(OmegaConf.load(path)) for path in sorted(FOLDER.glob("*.yaml"))}

# Published number of layers, and each layer in a few words, worked out by hand from the publications.
FULL, PLAIN = ("gqa", "rope"), ("mha", "none")
PUBLISHED = {
    "bert": 12 * [PLAIN],
    "gemma2": [("window", 4096) if index % 2 == 0 else FULL for index in range(26)],
    "gemma3": [("window", 512) if (index + 1) % 6 else FULL for index in range(26)],
    "gpt2": 12 * [PLAIN],
    "llama3": 32 * [FULL],
    "minimax": 10 * (7 * [("linear", None)] + [FULL]),
    "mistral": 32 * [("window", 4096)],
    "qwen3": 36 * [FULL],
    "smollm3": 9 * (3 * [FULL] + [("gqa", "none")]),
    "starcoder": 40 * [("mqa", "none")],
}

every_preset = pytest.mark.parametrize("name", PRESETS)


def test_every_preset_has_a_hand_worked_stack():
    assert set(PRESETS) == set(PUBLISHED)


@every_preset
def test_layers_are_those_of_the_publication(name):
    model = PRESETS[name]["model"]
    known = MIXERS | set(model["mixers"])
    said = []
    for layer in layers(model["layout"], len(PUBLISHED[name]), known):
        (mixer,) = layer.mixers
        options = model["mixers"].get(mixer, {})
        said.append((options.get("mixer", mixer), options.get("window", options.get("position"))))
    assert said == PUBLISHED[name]


@every_preset
def test_a_preset_is_a_global_package_labelled_by_its_file_name(name):
    lines = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "# @package _global_"
    assert set(PRESETS[name]) == {"stack", "model"}
    assert PRESETS[name]["stack"] == name
    assert max(map(len, lines)) <= 120


@every_preset
def test_a_preset_names_its_source(name):
    comment = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").partition("\nstack:")[0]
    assert "arXiv:" in comment or "et al." in comment


@every_preset
def test_a_preset_says_options_and_no_sizes(name):
    model = PRESETS[name]["model"]
    assert set(model) <= MODEL_OPTIONS
    for options in model["mixers"].values():
        assert set(options) <= MIXER_OPTIONS


@every_preset
def test_rope_options_are_floats_and_stand_only_where_rope_is_used(name):
    for options in PRESETS[name]["model"]["mixers"].values():
        rope = {option: value for option, value in options.items() if option.startswith("rope_")}
        assert all(isinstance(value, float) for value in rope.values())
        assert not rope or options["position"] == "rope"


@every_preset
def test_every_mixer_entry_is_used_and_an_alias_names_a_mixer(name):
    model = PRESETS[name]["model"]
    used = {mixer for layer in layers(model["layout"]) for mixer in layer.mixers}
    assert set(model["mixers"]) <= used <= MIXERS | set(model["mixers"])
    for alias in set(model["mixers"]) - MIXERS:
        assert model["mixers"][alias]["mixer"] in MIXERS


@every_preset
def test_no_preset_takes_the_name_of_a_mixer(name):
    assert name not in MIXERS | {"additive", "nsa", "mamba", "mamba2"}
