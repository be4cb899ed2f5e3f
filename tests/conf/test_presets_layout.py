"""The presets as text: their layouts at published depths, and what a preset may and may not say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from torch.nn.functional import cross_entropy

from arch.language_model import LanguageModel
from arch.layout import MLP, layers
from mixers import registry

MIXERS = set(registry.names())
MODEL_OPTIONS = {"layout", "mixers", "mlp", "norm", "sandwich", "bias", "parallel", "position", "tied", "logit_softcap"}
MIXER_OPTIONS = {
    *("mixer", "window", "causal", "position", "rope_base", "rope_fraction", "bias", "qk_norm", "softcap"),
    *("inner_norm", "norm", "decay", "activation", "gate", "scale", "expand"),
}

FOLDER = Path(__file__).resolve().parents[2] / "conf" / "stack"
PRESETS = {path.stem: OmegaConf.to_container(OmegaConf.load(path)) for path in sorted(FOLDER.glob("*.yaml"))}

# Published number of layers, and each layer in a few words, worked out by hand from the publications.
FULL, PLAIN, NOPE = ("gqa", "rope"), ("mha", "none"), ("gqa", "none")
MAMBA, MAMBA2, MLPS = ("mamba", None), ("mamba2", None), ("mlp", None)
SIGNS = {"M": MAMBA2, "*": NOPE, "-": MLPS}
MEGATRON = "M-M-M--M-M*-M-M-M-M--M*-M-M-M-M-M*--M-M-M-M-M*-M--M-M-M-"
NEMOTRON_H = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
# Zamba2: index of the Mamba-2 layer that each shared block stands before.
SHARED = dict(zip((6, 12, 18, 24, 30, 36, 42, 47, 51), "ABABABABA", strict=True))
PUBLISHED = {
    "falcon_h1": 36 * [[FULL, MAMBA2]],
    "hymba": [[FULL if i in (0, 15, 31) else ("window", 1024), MAMBA] for i in range(32)],
    "jamba": [NOPE if i % 8 == 4 else MAMBA for i in range(32)],
    "mamba2_hybrid": [SIGNS[sign] for sign in MEGATRON],
    "nemotron_h": [SIGNS[sign] for sign in NEMOTRON_H],
    "samba": 12 * [MAMBA, ("window", 2048)],
    "zamba2": [
        layer for i in range(54) for layer in ([("mha", "rope"), MLPS] if i in SHARED else []) + [MAMBA2]
    ],
    "bert": 12 * [PLAIN],
    "gemma2": [("window", 4096) if index % 2 == 0 else FULL for index in range(26)],
    "gemma3": [("window", 512) if (index + 1) % 6 else FULL for index in range(26)],
    "gpt2": 12 * [PLAIN],
    "llama3": 32 * [FULL],
    "minimax": 10 * (7 * [("retention", "none")] + [FULL]),
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
        chosen = [(mixer, model["mixers"].get(mixer, {})) for mixer in layer.mixers]
        words = [(o.get("mixer", mixer), o.get("window", o.get("position"))) for mixer, o in chosen]
        said.append(words if len(words) > 1 else words[0])
    assert said == PUBLISHED[name]


def test_the_two_shared_blocks_of_zamba2_take_turns():
    stack = layers(PRESETS["zamba2"]["model"]["layout"], 72)
    shared = [layer.share for layer in stack if layer.share and layer.mixers == ("mha",)]
    assert "".join(shared).upper() == "".join(SHARED.values())
    after = [stack[i + 1].share for i, layer in enumerate(stack) if layer.mixers == ("mha",)]
    assert after == [f"{name}_mlp" for name in shared]


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
    used = {mixer for layer in layers(model["layout"]) for mixer in layer.mixers if mixer != MLP}
    assert set(model["mixers"]) <= used <= MIXERS | set(model["mixers"])
    for alias in set(model["mixers"]) - MIXERS:
        assert model["mixers"][alias]["mixer"] in MIXERS


@every_preset
def test_no_preset_takes_the_name_of_a_mixer(name):
    assert name not in MIXERS


@every_preset
def test_twenty_steps_train_a_preset(name):
    """A row by heart, at the smallest depth that has every layer of the layout."""
    torch.manual_seed(0)
    model = LanguageModel(**PRESETS[name]["model"], vocabulary=16, d_model=16)
    rows = torch.randint(0, 16, (1, 9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for _ in range(20):
        loss = cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0], losses
