"""One cell of a benchmark, a stack at a length: from its options to a checked plan, and from readings to metrics."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from arch import cost
from arch.language_model import LanguageModel
from experiments import config
from experiments.tasks.base import at_least
from experiments.timing import Reading
from kernels.backend import BACKENDS
from mixers.options import call

# What is timed: a step of training without the optimiser, the reading of a prompt, a token behind it.
TRAIN, PREFILL, DECODE = "train_step", "prefill", "decode"


@dataclass(frozen=True)
class Settings:
    """The top level of conf/bench.yaml, which says what each option is.

    Raises:
        ValueError: a value out of range, or a GPU that is not there.
    """

    stack: str
    model: dict[str, Any]
    length: int
    batch_size: int
    vocabulary: int
    rounds: int
    precision: Literal[32, "bf16-mixed"]
    accelerator: Literal["auto", "cpu", "gpu"]
    backend: Literal[BACKENDS]
    threads: int | None
    sweep: str | None
    runs: str
    mlflow: bool | str

    def __post_init__(self) -> None:
        for name in ("length", "batch_size", "vocabulary", "rounds"):
            at_least(name, getattr(self, name), 1)
        if self.threads is not None:
            at_least("threads", self.threads, 1)
        if self.accelerator == "gpu" and not torch.cuda.is_available():
            raise ValueError("accelerator='gpu', but torch sees no GPU here; allowed: auto, cpu")

    @property
    def device(self) -> str:
        return "cuda" if self.accelerator != "cpu" and torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Cell:
    """One cell, checked; small enough to be sent to another process."""

    settings: Settings
    label: str
    config: Mapping[str, Any]  # what decides the result, the way it is run included
    flops: Mapping[str, float]  # counted, of one call of each thing that is timed
    counted: Mapping[str, float]  # by the names that runs log

    @property
    def device(self) -> str:
        return self.config["device"]

    def model(self) -> LanguageModel:
        """The model on its device, with the same weights each time."""
        torch.manual_seed(0)
        with torch.device(self.device):
            return build(self.settings)


def build(settings: Settings) -> LanguageModel:
    return call(LanguageModel, settings.model, "model", vocabulary=settings.vocabulary)


def plan(tree: Mapping[str, Any]) -> Cell:
    """Check a composed config, in plain containers, and count what its model costs.

    Raises:
        ValueError: anything wrong in it; names the option, what it got and what is allowed.
    """
    settings = call(Settings, config.resolved(tree), "config")
    with torch.device("meta"):
        skeleton = build(settings)
    decisive = ("length", "batch_size", "vocabulary", "precision", "backend", "threads")
    semantic = {name: getattr(settings, name) for name in decisive}
    semantic |= {"device": settings.device, "model": config.model_config(settings.model, skeleton)}
    label = config.label(settings.stack, settings.model["layout"])
    counted = cost.measure(skeleton, settings.length)
    figures = counted.metrics()
    figures[f"complexity/activation_bytes_at_{settings.length}"] = float(counted.activation_bytes)
    return Cell(settings, label, config.plain(semantic), _flops(counted, settings.batch_size), figures)


def _flops(counted: cost.Cost, batch: int) -> dict[str, float]:
    """FLOPs of one call of what is timed. What the model cannot do is left out.

    Extending by running everything again is no decoding: it is not timed.
    """
    forward = counted.flops_per_token_forward * counted.length * batch
    found = {TRAIN: 3 * forward}
    if counted.decode_flops_per_token is not None:
        found[PREFILL] = forward
        if counted.decode == "state":
            found[DECODE] = float(counted.decode_flops_per_token * batch)
    return found


class WrongReading(Exception):
    """A time that cannot be: it would need more FLOPs a second than this machine has."""


def check(cell: Cell, rounds: Sequence[Mapping[str, Reading]], peak: float) -> None:
    """Refuse readings that imply more than `peak` FLOPs a second.

    Raises:
        WrongReading: names what was read.
    """
    for readings in rounds:
        for what, reading in readings.items():
            seconds = reading.busy(cell.device)
            if seconds <= 0 or cell.flops[what] / seconds > peak:
                raise WrongReading(
                    f"wrong reading: {what} in {seconds * 1000:.3g} ms would be {cell.flops[what]:.3g} FLOPs at a rate "
                    f"above the {peak:.3g} a second of this machine's fastest matrix product"
                )


def metrics(cell: Cell, rounds: Sequence[Mapping[str, Reading]], peak: float) -> dict[str, float]:
    """By the names that runs log: medians over the rounds, and their spread, (highest - lowest) / median.

    CPU times are left out where a GPU does the work. The spread is that of the times which exponents are fitted to.
    """
    at = {TRAIN: "", **dict.fromkeys((PREFILL, DECODE), f"_at_{cell.settings.length}")}
    found = {"peak_flops_per_second": peak}
    for what in cell.flops:
        readings = [readings[what] for readings in rounds]
        busy = [reading.busy(cell.device) for reading in readings]
        found[f"{what}_ms{at[what]}"] = 1000 * statistics.median(reading.wall for reading in readings)
        if cell.device == "cpu":
            found[f"{what}_cpu_ms{at[what]}"] = 1000 * statistics.median(busy)
        found[f"{what}_spread{at[what]}"] = (max(busy) - min(busy)) / statistics.median(busy)
        if what == TRAIN:
            found["train_flops_per_second"] = cell.flops[TRAIN] / statistics.median(busy)
    step = found["train_step_ms"] / 1000
    found["train_tokens_per_second"] = cell.settings.length * cell.settings.batch_size / step
    return {f"measured/{name}": value for name, value in found.items()}
