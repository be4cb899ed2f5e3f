"""`python -m experiments.bench_step`: what the framework adds to a training step of the quickstart's mha model.

Two loops take turns step by step, in one process on one thread: the framework with its data, its points and MLflow, and
a bare PyTorch loop over batches that are in memory already. Each round compares their CPU seconds; the median of the
rounds counts.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch.nn import functional as F

from experiments import cli, config, module
from experiments.record import Description
from experiments.tasks.base import NOT_SCORED, loader
from experiments.tracking import Tracker, address

# Steps left out at the start of every round.
WARMING = 10


class Turns(Callback):
    """After every step of the framework, one of the bare loop; CPU seconds of both."""

    def __init__(self, bare: Iterator[None]) -> None:
        self.bare = bare
        self.framework_seconds = self.bare_seconds = self.since = 0.0

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        between = time.process_time()
        next(self.bare)
        end = time.process_time()
        if trainer.global_step > WARMING:
            self.framework_seconds += between - self.since
            self.bare_seconds += end - between
        self.since = end


def quickstart_mha(steps: int) -> config.Plan:
    """The plan of the quickstart's mha run, with a logged point every 50 steps and no validation in between."""
    return config.plan(cli.composed("train", ["+experiment=quickstart", "model.layout=mha", f"trainer.steps={steps}",
                                              f"trainer.validate_every={steps + 1}", "trainer.threads=1"]))


def bare(plan: config.Plan) -> Iterator[None]:
    """The same steps, written down as anyone would; yields after each."""
    batches = list(loader(plan.task.train_dataset(0, plan.steps * plan.trainer.batch_size), plan.trainer.batch_size))
    model, options = plan.model(), plan.optimizer
    decay = options.weight_decay
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=options.betas, weight_decay=decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, options.factor(plan.steps))
    for batch in batches:
        scored = batch["labels"] != NOT_SCORED
        loss = F.cross_entropy(model.logits(model.hidden(batch["tokens"])[scored]), batch["labels"][scored])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        yield


def measure(plan: config.Plan, folder: Path) -> tuple[float, float]:
    """CPU milliseconds a step of the framework and of the bare loop."""
    tracker = Tracker(folder / "run", Description("mha", plan.params, plan.config, {}, ""), address(str(folder), True))
    turns = Turns(bare(plan))
    with module.quiet():
        # Last, so that what the framework's own callbacks do counts as the framework's.
        module.fit(plan, tracker, module.Recorder(plan, tracker, lambda line: None), [], [turns])
    tracker.finish("FINISHED")
    steps = (plan.steps - WARMING) / 1000
    return turns.framework_seconds / steps, turns.bare_seconds / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=110, help=f"of each loop in each round, above {WARMING}")
    arguments = parser.parse_args()
    if arguments.rounds < 1 or arguments.steps <= WARMING:
        parser.error(f"--rounds must be at least 1 and --steps above {WARMING}")
    plan, ratios = quickstart_mha(arguments.steps), []
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(arguments.rounds):
            ours, theirs = measure(plan, Path(folder))
            ratios.append(ours / theirs)
            seconds = f"framework {ours:.2f} ms, bare {theirs:.2f} ms of CPU a step"
            print(f"round {turn + 1}: {seconds}, ratio {ratios[-1]:.3f}", flush=True)
    ratio = statistics.median(ratios)
    print(f"a training step costs {ratio:.3f} times that of a bare PyTorch loop (median of {len(ratios)} rounds)")


if __name__ == "__main__":
    main()
