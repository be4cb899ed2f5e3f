"""Equal budgets: from the config node `match` to the options of a model that meets them, see `arch.match`.

The solved option stands in the config like any other, so a run has one key however its options were found.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import MissingConfigException
from omegaconf import OmegaConf

from arch import cost, layout, match
from arch.encoder_decoder import EncoderDecoder, EncoderOptions, both_sides
from arch.language_model import LanguageModel
from arch.stack import mixer_options
from experiments.tasks.base import at_least
from mixers import registry
from mixers.options import defaults, nearest


class NoFigure(Exception):
    """The model has no such figure, whatever the value of the knob."""


Build = Callable[[Mapping[str, Any]], LanguageModel]
# Options that decide what a stack costs, of those on a command line.
_COUNTED = re.compile(r"\+*(model|mixers|task|experiment)\b")


@dataclass(frozen=True)
class Budget:
    """The config node `match`, whose YAML says what each option is.

    Raises:
        ValueError: an unknown metric, an option out of range, or one that is missing.
    """

    metric: str | None = None
    target: float | str | None = None
    knob: str | tuple[str, ...] | None = None
    step: int = 1
    command: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        at_least("match: step", self.step, 1)
        needed = ("metric", "target", "knob")
        missing = [name for name in needed if getattr(self, name) is None]
        if 0 < len(missing) < len(needed):
            raise ValueError(f"match.{missing[0]} is missing: match needs metric, target and knob")
        if self.metric is not None:
            cost.attribute(self.metric)
        if isinstance(self.target, float) and self.target <= 0:
            raise ValueError(f"match.target={self.target} must be above 0")
        if isinstance(self.target, str) and not self.target.startswith("stack:"):
            raise ValueError(f"match.target={self.target!r} must be a number, such as 1.0e6, or stack:NAME")


@dataclass(frozen=True)
class Matched:
    """A budget that was met."""

    metric: str
    knob: str
    value: int
    target: float
    achieved: float

    @property
    def params(self) -> dict[str, Any]:
        """For tracking, beside the option itself."""
        return {"match.metric": self.metric, "match.knob": self.knob, "match.target": self.target,
                "match.achieved": self.achieved}  # fmt: skip

    def __str__(self) -> str:
        away = self.achieved / self.target - 1
        return f"{self.knob}={self.value} gives {self.metric} {self.achieved:,.10g}, {away:+.2%} of {self.target:,.10g}"


def solve(budget: Budget, model: dict[str, Any], build: Build, length: int) -> tuple[dict[str, Any], Matched | None]:
    """The options of a model with the knob set, and what was matched; None where no budget is asked for.

    Args:
        model: the composed options, in plain containers.
        build: the model of such options.
        length: of a training row, for figures that do not name theirs.
    Raises:
        ValueError: an unknown knob or stack, or a budget that cannot be met.
    """
    if budget.metric is None:
        return model, None
    knob = _knob(budget.knob, model)
    try:
        with quiet():
            target = budget.target
            if isinstance(target, str):
                reference = build(_stack(target.removeprefix("stack:"), budget.command))
                target = _count(reference, budget.metric, length)
            found = match.solve(
                lambda value: _count(build(_set(model, knob, value)), budget.metric, length),
                target, step=budget.step, what=budget.metric, knob=knob,
            )  # fmt: skip
    except NoFigure as error:
        raise ValueError(str(error)) from None
    return _set(model, knob, found.value), Matched(budget.metric, knob, found.value, target, found.achieved)


def _count(model: LanguageModel, metric: str, length: int) -> float:
    own = re.search(r"_at_(\d+)$", metric)
    figure = cost.measure(model, int(own[1]) if own else length).figure(metric)
    if figure is None:
        why = "a mixer sees later tokens" if not model.causal else "a mixer extends by running everything again"
        why = "a mixer cannot run without values" if metric.startswith("activation") else why
        stack = layout.describe(model.stack.layers)
        raise NoFigure(f"match.metric={metric}: the layout {stack} has no such figure: {why}")
    return figure


def _knob(asked: str | Sequence[str], model: Mapping[str, Any]) -> str:
    """The first option of those asked for that the model has."""
    asked = (asked,) if isinstance(asked, str) else asked
    here, elsewhere = _options("model", model, EncoderDecoder if "encoder" in model else LanguageModel)
    if "encoder" in model:
        own = dict(model["encoder"])
        own["mixers"] = both_sides(model.get("mixers") or {}, own.get("mixers") or {})
        for known, more in zip((here, elsewhere), _options("model.encoder", own, EncoderOptions), strict=True):
            known.extend(more)
    for knob in asked:
        if knob not in (*here, *elsewhere):
            close = nearest(knob, [*here, *elsewhere])
            raise ValueError(f"match.knob={knob!r} is no whole-number option{close}; this stack has: {', '.join(here)}")
    found = [knob for knob in asked if knob in here]
    if not found:
        raise ValueError(
            f"match.knob={', '.join(asked)}: the layout {model['layout']!r} does not use it; it has: {', '.join(here)}"
        )
    return found[0]


def _options(prefix: str, stack: Mapping[str, Any], part: type) -> tuple[list[str], list[str]]:
    """The whole-number options of a stack, and those of mixers that it does not use."""
    chosen = mixer_options(stack.get("mixers") or {})
    layers = layout.layers(stack["layout"], stack.get("n_layers"), chosen)
    used = {name for layer in layers for name in layer.mixers if name != layout.MLP}
    here, elsewhere = _whole(prefix, part), []
    for name, options in chosen.items():
        own = _whole(f"{prefix}.mixers.{name}", registry.get(options["mixer"]))
        (here if name in used else elsewhere).extend(own)
    return here, elsewhere


def _whole(prefix: str, part: type) -> list[str]:
    """The options of a constructor that take a whole number, as on the command line."""
    hints = get_type_hints(part.__init__)
    return [f"{prefix}.{name}" for name in defaults(part) if int in (hints[name], *get_args(hints[name]))]


def _set(model: Mapping[str, Any], knob: str, value: int) -> dict[str, Any]:
    """The same options with another value of a knob."""
    _, *path, last = knob.split(".")
    changed = node = dict(model)
    for name in path:
        node[name] = dict(node.get(name) or {})
        node = node[name]
    node[last] = value
    return changed


def _stack(name: str, command: Sequence[str]) -> dict[str, Any]:
    """The model options of another stack under the same command line."""
    try:
        alone = _composed([f"stack={name}"])
    except MissingConfigException as error:
        options = sorted(error.options or [])
        close = nearest(name, options)
        raise ValueError(f"match.target=stack:{name} does not exist{close}; allowed: {', '.join(options)}") from None
    model = _composed([*filter(_COUNTED.match, command), f"stack={name}"])["model"]
    # The command, or an experiment, may have a layout of its own.
    return model | {"layout": alone["model"]["layout"]}


def _composed(overrides: Sequence[str]) -> dict[str, Any]:
    """The config of `train` in plain containers, inside of a Hydra job or outside."""
    if GlobalHydra.instance().is_initialized():
        return OmegaConf.to_container(compose("train", overrides=list(overrides)), resolve=True)
    with initialize_config_module("conf", version_base="1.3"):
        return OmegaConf.to_container(compose("train", overrides=list(overrides)), resolve=True)


def _command() -> list[str]:
    """What was asked for in this Hydra job."""
    return list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else []


OmegaConf.register_new_resolver("command", _command, replace=True)


@contextmanager
def quiet() -> Iterator[None]:
    """Mixers speak once, when the solved model is built, and not at every value tried."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
