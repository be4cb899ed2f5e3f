"""How weights start, and which of them decay."""

from __future__ import annotations

from typing import Any

from torch import nn

from arch.stack import Stack
from mixers.parts import marked, own_parameters


def initialise(model: nn.Module, std: float | None) -> None:
    """Linear layers and embeddings normal, biases 0, norms as they are.

    The standard deviation is `std` everywhere; None: 0.02 for embeddings and 1 / sqrt(inputs) for linear layers, which
    is 0.02 at a width of 2500 and larger below (at a width of 64 a fixed 0.02 does not learn recall in 300 steps, 1 / 8
    does). Output projections into the residual stream are scaled by 1 / sqrt(number of them on the path): that is
    1 / sqrt(2 layers) where each layer has a mixer and an MLP (Radford et al. 2019, section 2.3). Parameters that their
    author marked as `own_init`, and those that are no part of a Linear or Embedding, are left alone.
    """
    depth = _residual_depth(model)
    for _, module, name, parameter in own_parameters(model):
        marks = marked(module, name)
        # On meta there are no values to set, and drawing none takes most of the time of building such a model.
        if "own_init" in marks or not isinstance(module, (nn.Linear, nn.Embedding)) or parameter.is_meta:
            continue
        if name == "bias":
            nn.init.zeros_(parameter)
            continue
        # A tied head is met as the embedding first.
        wide = 0.02 if isinstance(module, nn.Embedding) else module.in_features**-0.5
        wide = wide if std is None else std
        nn.init.normal_(parameter, std=wide / depth**0.5 if "residual" in marks else wide)


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two optimiser groups: matrices decay; embeddings, vectors and what its author marked as `no_decay` do not."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for _, module, name, parameter in own_parameters(model):
        groups[parameter.dim() >= 2 and "no_decay" not in marked(module, name)].append(parameter)
    return [{"params": groups[True], "weight_decay": weight_decay}, {"params": groups[False], "weight_decay": 0.0}]


def _residual_depth(model: nn.Module) -> int:
    """How many sublayers add to the residual stream, shared ones as often as they run."""
    stacks = [module for module in model.modules() if isinstance(module, Stack)]
    return max(
        1, sum((block.mixing is not None) + (block.mlp is not None) for stack in stacks for block in stack.blocks)
    )
