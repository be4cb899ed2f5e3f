"""When a run has learnt enough, or nothing more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from experiments.config import Plan
from experiments.metrics import direction

if TYPE_CHECKING:
    from experiments.module import Recorder


class EarlyStop(Callback):
    """Stops when the monitored metric has reached its target, or was not better for `patience` validations."""

    def __init__(self, plan: Plan, recorder: Recorder) -> None:
        self.options, self.recorder = plan.trainer, recorder
        self.sign = -1.0 if direction(self.options.monitor) == "lower" else 1.0
        self.best: float | None = None
        self.bad = 0
        self.stopped = False

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        # A run that had stopped, and was interrupted before it was tested.
        trainer.should_stop |= self.stopped

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        value = self.recorder.values.get(self.options.monitor)
        if value is None:
            known = ", ".join(name for name in self.recorder.values if name.startswith("val/"))
            raise ValueError(f"trainer: monitor={self.options.monitor!r} is no metric of this task; it has {known}")
        improved = self.best is None or self.sign * value > self.sign * self.best
        self.best, self.bad = (value, 0) if improved else (self.best, self.bad + 1)
        target, patience = self.options.target, self.options.patience
        if target is not None and self.sign * value >= self.sign * target:
            self.stop(trainer, f"{self.options.monitor} {value:.4g} has reached {target:g}")
        elif patience is not None and self.bad >= patience:
            self.stop(trainer, f"{self.options.monitor} was not better than {self.best:.4g} for {patience} validations")

    def stop(self, trainer: L.Trainer, why: str) -> None:
        if trainer.state.fn == "fit" and trainer.global_step < trainer.max_steps:
            trainer.should_stop = self.stopped = True
            self.recorder.say(f"stopped early: {why}")

    @property
    def rule(self) -> list[Any]:
        return [self.options.monitor, self.options.target, self.options.patience]

    # Part of a checkpoint.
    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "bad": self.bad, "stopped": self.stopped, "rule": self.rule}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # What another rule found says nothing under this one.
        if state["rule"] == self.rule:
            self.best, self.bad, self.stopped = state["best"], state["bad"], state["stopped"]
