"""A trained model on rows longer than those it was trained on: the test suites again, its RoPE scaled for their length.

The config node `evaluate` names the scalings; a run logs `eval/<suite>/<name>/<metric>` for each, beside what the model
has as it was trained. The weights are the same, so one training serves them all.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset

from arch.encoder_decoder import EncoderDecoder
from arch.language_model import LanguageModel
from arch.stack import Stack
from experiments.tasks.base import Item
from mixers import registry, rope_scaling

Options = Mapping[str, Any]
# In reports (analysis.extrapolation), beside the scalings.
AS_TRAINED = "none"


@dataclass(frozen=True)
class Evaluation:
    """The config node `evaluate`.

    Args:
        rope_scaling: name -> a scaling as `mixers.rope_scaling` has them; it replaces one that training had. What it
            leaves out is filled in for each suite: `factor` is the length of its rows over that of training, at least
            1, and `original_max_position_embeddings` the length of training. Kinds that look at the length of each row
            themselves (dynamic) need their factor.
    Raises:
        ValueError: a name that no metric may have, or a scaling that is no mapping.
    """

    rope_scaling: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        for name, scaling in (self.rope_scaling or {}).items():
            if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_-]+", name):
                raise ValueError(f"rope_scaling: the name {name!r} must be of letters, digits, _ and -")
            if name == AS_TRAINED:
                raise ValueError(f"rope_scaling: {name!r} names the model as it was trained, which is tested anyway")
            if not isinstance(scaling, Mapping):
                raise ValueError(f"rope_scaling.{name}={scaling!r} must be a mapping such as {{rope_type: yarn}}")

    def fitting(
        self, options: Options, model: LanguageModel, build: Callable[[Options], object], trained: int
    ) -> dict[str, Any]:
        """The scalings, for a model built from `options` for rows of `trained` tokens; none where nothing turns.

        Raises:
            ValueError: a scaling that is none, or that `build` refuses.
        """
        turns = any(_turns(used) for stack in model.stacks for used in stack.used.values())
        for name, scaling in (self.rope_scaling or {}).items():
            whole = filled(scaling, trained, trained)
            try:
                rope_scaling.scaling(whole)
                if turns:
                    build(scaled(options, model, whole))
            except ValueError as error:
                raise ValueError(f"evaluate: rope_scaling.{name}: {error}") from error
        return (self.rope_scaling or {}) if turns else {}


def scaled(options: Options, model: LanguageModel, scaling: Options) -> dict[str, Any]:
    """The options of `model`, which was built from `options`, with a scaling in every mixer that turns."""
    found = dict(options) | {"mixers": _scaled(options.get("mixers"), model.stack, scaling)}
    if isinstance(model, EncoderDecoder):
        encoder = options["encoder"]
        found["encoder"] = encoder | {"mixers": _scaled(encoder.get("mixers"), model.encoder, scaling)}
    return found


def filled(scaling: Options, length: int, trained: int) -> dict[str, Any]:
    """A scaling with what it leaves out, for rows of `length` tokens after training on rows of `trained`."""
    named = scaling.get("rope_type")
    if not isinstance(named, str) or named not in rope_scaling.KINDS:
        return dict(scaling)
    kind = rope_scaling.KINDS[named]
    from_lengths = {"original_max_position_embeddings": trained}
    if not kind.by_length:
        from_lengths["factor"] = max(length / trained, 1.0)
    needed = {option.name for option in dataclasses.fields(kind) if option.default is dataclasses.MISSING}
    return {name: value for name, value in from_lengths.items() if name in needed} | dict(scaling)


def longest(suite: Dataset[Item]) -> int:
    """Tokens of a suite's longest row."""
    return max(len(suite[row]["tokens"]) for row in range(len(suite)))  # type: ignore[arg-type]  # all have a length


def _turns(used: Options) -> bool:
    options = registry.options(used["mixer"]) | used
    return "rope_scaling" in options and options.get("position") == "rope"


def _scaled(mixers: Options | None, stack: Stack, scaling: Options) -> dict[str, Any]:
    """Said of every mixer by itself: an alias would take it over from the mixer that it is one of."""
    given = dict(mixers or {})
    for name, used in stack.used.items():
        if "rope_scaling" in registry.options(used["mixer"]):
            given[name] = dict(given.get(name, {})) | {"rope_scaling": dict(scaling) if _turns(used) else None}
    return given
