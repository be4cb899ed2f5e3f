"""State_dicts of published Mamba and Mamba-2 models, under the names of mamba-ssm and transformers.

The mixers' own parameters have the published names and shapes already; the rest of a model goes by the table below.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from torch import Tensor

# Published name, with the layer as {}, and ours. The embedding is called "embedding" by mamba-ssm.
NAMES = {
    "backbone.embeddings.weight": "embedding.weight",
    "backbone.layers.{}.norm.weight": "stack.blocks.{}.mixing.before.weight",
    "backbone.layers.{}.mixer.": "stack.blocks.{}.mixing.mixers.0.",
    "backbone.norm_f.weight": "stack.norm.weight",
    "lm_head.weight": "head.weight",
}
Package = Literal["transformers", "mamba-ssm"]


def from_mamba(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What mamba-ssm's or transformers' models of that kind saved, for `LanguageModel.load_state_dict`.

    The model is `LanguageModel("mamba", mlp="none", norm_eps=1e-5, ..)`, or "mamba2"; a head that was left out because
    it is the embedding is filled in.

    Raises:
        ValueError: a name that is none of such a model.
    """
    spelled = {re.sub(r"^backbone\.embedding\.", "backbone.embeddings.", name): t for name, t in state.items()}
    renamed = {_renamed(name, NAMES): tensor for name, tensor in spelled.items()}
    if "embedding.weight" in renamed:
        renamed.setdefault("head.weight", renamed["embedding.weight"])
    return renamed


def to_mamba(state: Mapping[str, Tensor], package: Package = "transformers") -> dict[str, Tensor]:
    """The way back, from `LanguageModel.state_dict` of a pure Mamba or Mamba-2 stack.

    Raises:
        ValueError: a name that such a stack does not have.
    """
    renamed = {_renamed(name, {ours: theirs for theirs, ours in NAMES.items()}): t for name, t in state.items()}
    if package == "mamba-ssm":
        renamed["backbone.embedding.weight"] = renamed.pop("backbone.embeddings.weight")
    return renamed


def _renamed(name: str, names: Mapping[str, str]) -> str:
    for before, after in names.items():
        pattern = re.escape(before).replace(r"\{\}", r"(\d+)")
        # A name that ends in a dot goes on with the name of the mixer's own parameter.
        if found := re.fullmatch(pattern + ("(.+)" if before.endswith(".") else "()"), name):
            *layer, rest = found.groups()
            return after.format(*layer) + rest
    raise ValueError(f"{name!r} is no parameter of a Mamba or Mamba-2 model; known are {', '.join(names)}")
