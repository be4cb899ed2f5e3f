"""The optimiser: AdamW on decay groups, its learning rate over the steps, and the clipping of its gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from arch.init import decay_groups
from mixers.options import nearest


@dataclass(frozen=True)
class AdamW:
    """AdamW with weight decay on matrices only. Its fields are the config node `optimizer`.

    Args:
        lr: the highest learning rate.
        weight_decay: of matrices; embeddings, norms and biases have none.
        clip: gradients are scaled down to this norm; null: never.
        schedule: after the warm-up, `cosine` falls along half a cosine; `wsd` stays (stable) and falls linearly over
            the last `decay` of the steps; `constant` stays.
        warmup: fraction of all steps over which the rate rises linearly.
        decay: fraction of all steps in which `wsd` falls.
        final: learning rate of the last step, as a fraction of lr.
    Raises:
        ValueError: a value out of range.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float | None = 1.0
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup: float = 0.1
    decay: float = 0.2
    final: float = 0.0

    def __post_init__(self) -> None:
        _check("lr", self.lr, 0 < self.lr < math.inf, "above 0")
        _check("betas", list(self.betas), all(0 <= beta < 1 for beta in self.betas), "from 0 to below 1")
        _check("eps", self.eps, self.eps > 0, "above 0")
        _check("weight_decay", self.weight_decay, self.weight_decay >= 0, "0 or above")
        _check("clip", self.clip, self.clip is None or self.clip > 0, "above 0, or null for no clipping")
        for name in ("warmup", "decay", "final"):
            value = getattr(self, name)
            _check(name, value, 0 <= value <= 1, "a fraction from 0 to 1")
        if self.schedule == "wsd" and self.warmup + self.decay > 1:
            raise ValueError(f"optimizer: warmup={self.warmup} and decay={self.decay} must be at most 1 together")

    def build(self, model: nn.Module, fused: bool | None = None) -> torch.optim.AdamW:
        """The optimiser of a model's parameters, decayed by group."""
        groups = decay_groups(model, self.weight_decay)
        return torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=fused)

    def factor(self, steps: int) -> Callable[[int], float]:
        """Learning rate of a step over `lr`, for a run of `steps` steps; steps count from 0."""
        warmup = min(round(self.warmup * steps), steps - 1)
        peak = max(warmup - 1, 0)
        last = steps - 1
        # Of a few steps, at least one falls.
        fall = max(round(self.decay * steps), math.ceil(self.decay))
        start = peak if self.schedule == "cosine" else max(last - fall, peak)

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / warmup
            if self.schedule == "constant" or last == start:
                return 1.0
            # Progress of the fall: 0 at the last step of full rate, 1 at the last step.
            fallen = min(max((step - start) / (last - start), 0.0), 1.0)
            left = (1 + math.cos(math.pi * fallen)) / 2 if self.schedule == "cosine" else 1 - fallen
            return self.final + (1 - self.final) * left

        return factor


OPTIMIZERS = {"adamw": AdamW}


def get(name: str) -> type[AdamW]:
    """The class of an optimiser.

    Raises:
        ValueError: unknown name; says the closest.
    """
    if name not in OPTIMIZERS:
        close = nearest(str(name), OPTIMIZERS)
        raise ValueError(f"optimizer={name!r} is not an optimiser{close}; the optimisers are {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name]


def _check(option: str, value: object, good: bool, expected: str) -> None:
    if not good:
        raise ValueError(f"optimizer: {option}={value} must be {expected}")
