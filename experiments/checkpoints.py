"""Checkpoints of a run, `checkpoints/step=N.ckpt`: from each of them training goes on exactly as if it had not stopped.

A checkpoint is Lightning's (weights, optimiser, schedule, loops, callbacks) and, beside it, the config and its key, the
tokens seen, the random state, and how much of the record belongs to it. It loads weights-only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from experiments.config import Plan
from experiments.ranks import ALONE, Group, Silent
from experiments.record import Position, Record
from experiments.signals import Terminated


@dataclass(frozen=True)
class Checkpoint:
    """Where a run goes on."""

    path: Path
    content: dict[str, Any]

    @property
    def position(self) -> Position:
        return Position(**self.content["position"])

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """By the names of LanguageModel.state_dict."""
        return {name.removeprefix("net."): value for name, value in self.content["state_dict"].items()}


def read(path: Path) -> Checkpoint:
    """A checkpoint, its tensors left on disk until they are used.

    Raises:
        ValueError: it cannot be read, or is none of ours.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        Position(**content["position"])
    # Of a file cut short or overwritten, torch raises all kinds.
    except Exception as error:
        raise ValueError(f"{path} cannot be read: {(str(error).splitlines() or [''])[0]}") from None
    if not {"state_dict", "config", "key"} <= content.keys():
        raise ValueError(f"{path} is no checkpoint of a run")
    return Checkpoint(path, content)


def newest(record: Path, keys: Collection[str | None] | None = None) -> tuple[Checkpoint | None, list[str]]:
    """The newest loadable checkpoint of the record in a folder, and what is wrong with newer ones.

    Args:
        keys: of the configs whose checkpoints may be used; None: any.
    Raises:
        ValueError: the newest loadable one is of another config.
    """
    faults = []
    for path in _paths(record / "checkpoints"):
        try:
            found = read(path)
            size = (record / "metrics.jsonl").stat().st_size
        except (ValueError, OSError) as error:
            faults.append(str(error))
            continue
        if keys is not None and found.content["key"] not in keys:
            raise ValueError(f"{path} is a checkpoint of another config ({found.content['key']}): move it away")
        if size >= found.position.bytes:
            return found, faults
        faults.append(f"{path} belongs to a longer metrics.jsonl")
    return None, faults


def misfit(checkpoint: Checkpoint, model: torch.nn.Module) -> str | None:
    """The first difference between the weights of a checkpoint and those of a model; None where they fit."""
    old, new = checkpoint.weights, model.state_dict()
    for name in [*old, *new]:
        has, wants = (list(side[name].shape) if name in side else None for side in (old, new))
        if has != wants:
            return f"{name} has shape {has} in {checkpoint.path}, the model wants {wants}"
    return None


def prune(folder: Path, keep: int | None) -> None:
    """Leave the `keep` newest checkpoints of a folder (None: all), and no part of one whose process died."""
    for old in [*(_paths(folder)[keep:] if keep else []), *folder.glob(".step=*")]:
        old.unlink(missing_ok=True)


def _paths(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the newest first."""
    found = {path: re.fullmatch(r"step=(\d+)\.ckpt", path.name) for path in folder.glob("step=*.ckpt")}
    return sorted((path for path in found if found[path]), key=lambda path: -int(found[path][1]))


class Saver(Callback):
    """Saves every so many steps, and once more when the process is asked to end.

    The moments are after a step or, where the step is validated, after the validation: all that belongs to a step is
    then in the record, and Lightning goes on with the next one. It must be the last callback.
    """

    def __init__(self, plan: Plan, record: Record | Silent, group: Group = ALONE) -> None:
        self.options, self.record, self.group = plan.trainer, record, group
        self.every = plan.trainer.checkpoint_every or plan.trainer.validate_every
        self.saved = 0
        self.asked = self.ending = False
        self.listen: Callable[[], None] = lambda: None
        self.warned = False

    def ask_to_end(self) -> None:
        """Save after the step that is on, and raise `Terminated`."""
        self.asked = True

    def on_load_checkpoint(self, trainer: L.Trainer, module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self.saved = checkpoint["global_step"]

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        # Lightning has put a handler of its own in front of ours, which would end the loop before anything is saved.
        self.listen()

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        # Inside of a step that accumulates, there are gradients that no checkpoint has.
        if not module.counts and trainer.global_step % self.options.validate_every:
            self._visit(trainer)

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.state.fn == "fit":
            self._visit(trainer)

    def _visit(self, trainer: L.Trainer) -> None:
        step = trainer.global_step
        # All processes save and end at the same step.
        self.ending = self.group.any(self.asked)
        if step == self.saved or (step % self.every and not self.ending):
            return
        try:
            self.save(trainer)
        # A full disk need not be full at the next checkpoint.
        except (OSError, RuntimeError) as error:
            if not self.warned and self.group.rank == 0:
                print(f"warning: no checkpoint at step {step}: {error}", flush=True)
            self.warned = True
        if self.ending:
            raise Terminated

    def save(self, trainer: L.Trainer) -> None:
        """Write the checkpoint of this step, whole or not at all, and remove those that are not kept.

        Raises:
            OSError, RuntimeError: it could not be written.
        """
        path = self.record.checkpoints / f"step={trainer.global_step}.ckpt"
        new = path.with_name(f".{path.name}-{os.getpid()}")
        try:
            trainer.save_checkpoint(new)
            fault = trainer.strategy.checkpoint_io.fault
            if self.group.rank == 0 and not fault:
                _keep(new, path)
        except (OSError, RuntimeError) as error:
            fault = error
        finally:
            new.unlink(missing_ok=True)
        # Where it could not be written, all processes try again at the end.
        if self.group.any(fault is not None):
            raise fault or OSError("the first process could not write the checkpoint")
        self.saved = trainer.global_step
        if self.group.rank == 0:
            prune(self.record.checkpoints, self.options.keep_checkpoints)


def _keep(new: Path, path: Path) -> None:
    """Put a file that was written in its place, once it is on the disk."""
    with new.open("rb") as file:
        os.fsync(file.fileno())
    new.replace(path)
