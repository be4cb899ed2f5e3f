"""Training and evaluation of one run with Lightning.

Only labelled positions reach the head: the model's hidden states are gathered there first. Losses and metrics are sums
over labelled tokens divided once, also over the batches of an accumulated step.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from arch import cost
from arch.language_model import LanguageModel
from arch.loss import chunks
from experiments.checkpoints import Checkpoint, Saver
from experiments.config import Plan
from experiments.early_stop import EarlyStop
from experiments.extrapolation import longest
from experiments.measure import Clock, PeakMemory
from experiments.ranks import ALONE, Group, Silent
from experiments.signals import Terminated, on_terminate
from experiments.strategies import shard, strategy
from experiments.tasks.base import NOT_SCORED, Item, Scores, loader
from experiments.tracking import Tracker
from kernels import backend
from mixers.base import Packing

# The first steps compile, allocate and warm caches: they are left out of the throughput, at most this many.
WARMING_STEPS = 10
# The fields of a batch that a model reads; a compiled one would be compiled again for others that change.
_READ = ("tokens", "documents", "source", "source_documents")
_PRECISION = {32: "32-true", 64: "64-true"}

Batch = dict[str, Any]


class Diverged(Exception):
    """The loss is not finite: the run has an outcome, but no result."""


class Training(L.LightningModule):
    """A language model on one task.

    Args:
        net: the model, [B, T] tokens to [B, T, D] hidden states to logits.
        group: the processes that share each batch; tokens and losses are counted over all of them.
    """

    def __init__(self, net: LanguageModel, plan: Plan, group: Group = ALONE) -> None:
        super().__init__()
        self.net = net
        self.plan = plan
        self.group = group
        self.hidden = self.read
        self.compiled = self.sharded = False
        # Tokens seen in training, pads aside.
        self.tokens = 0
        # Summed loss and labelled tokens of each batch since the last point.
        self.window: list[tuple[Tensor, int]] = []
        # Labelled tokens of each batch of this optimiser step.
        self.counts: list[int] = []
        # Of each suite, in the last evaluation.
        self.scores: list[Scores] = []
        # Of the checkpoint that training goes on from.
        self.random: dict[str, Any] | None = None

    def configure_model(self) -> None:
        """`read` alone is compiled, not this module: gathering labelled positions has data-dependent shapes."""
        if self.plan.trainer.strategy == "fsdp" and self.group.place and not self.sharded:
            shard(self.net, self.device_mesh["data_parallel"])
            self.sharded = True
        if self.plan.trainer.compile and not self.compiled:
            # Of all jobs of a process, only so many models would be compiled before torch falls back to eager.
            torch._dynamo.reset()
            self.hidden = torch.compile(self.read)
            self.compiled = True

    def configure_optimizers(self) -> dict[str, Any]:
        # Under mixed precision, Lightning clips for no optimiser that could unscale by itself, as fused ones can.
        optimizer = self.plan.optimizer.build(self.net, fused=self.plan.trainer.precision in _PRECISION)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self.plan.optimizer.factor(self.plan.steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_start(self) -> None:
        """Going on, take the random state of the checkpoint, and the optimiser's options of the plan."""
        if self.random is None:
            return
        others = self.random["others"]
        # More processes than there were: the further ones go on with streams of their own, as new.
        if self.group.rank <= len(others):
            mine = others[self.group.rank - 1] if self.group.rank else self.random
            torch.set_rng_state(mine["cpu"])
            if mine["cuda"]:
                torch.cuda.set_rng_state_all(mine["cuda"])
        schedule = self.trainer.lr_scheduler_configs[0].scheduler
        wanted = self.plan.optimizer.build(self.net).param_groups
        for group, fresh in zip(schedule.optimizer.param_groups, wanted, strict=True):
            group |= {name: fresh[name] for name in ("betas", "eps", "weight_decay")}
            group["lr"] = self.plan.optimizer.lr * self.plan.optimizer.factor(self.plan.steps)(schedule.last_epoch)
        schedule.base_lrs = [self.plan.optimizer.lr for _ in wanted]

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Find the labelled positions while the batch is on the CPU: on a GPU the step would wait for the device."""
        # A position is gathered once for each of its labels.
        labels = batch["labels"].reshape(batch["tokens"].numel(), -1)
        scored = labels != NOT_SCORED
        where = scored.nonzero()[:, 0]
        documents = batch.get("documents")
        real = batch["tokens"].numel() if documents is None else int(documents.count_nonzero())
        about = {name: batch[name].flatten()[where] for name in self.plan.task.about if name in batch}
        return batch | {"where": where, "targets": labels[scored], "real": real, "about": about}

    def read(self, batch: Batch) -> Tensor:
        """[B, T, D], what the head reads."""
        memory = self.net.encode(batch["source"], _packing(batch, "source_documents")) if "source" in batch else None
        return self.net.hidden(batch["tokens"], _packing(batch, "documents"), memory)

    def labelled(self, batch: Batch) -> Tensor:
        """[N, D], what the head reads at the N labelled positions."""
        # Compiled in training alone: suites of other lengths would be compiled again each.
        read = self.hidden if self.training else self.read
        inputs = {name: batch[name] for name in _READ if name in batch}
        return read(inputs).flatten(0, 1).index_select(0, batch["where"])

    def training_step(self, batch: Batch, index: int) -> Tensor:
        loss = self.plan.task.loss(self.net, self.labelled(batch), batch["targets"])
        count, real = self.group.total(len(batch["targets"]), batch["real"])
        self.window.append((self.group.sum(loss.detach()), count))
        self.counts.append(count)
        self.tokens += real
        # The mean of the processes' gradients is taken.
        return self.group.ranks * loss / max(self.counts[0], 1)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Batches of one step differ in labelled tokens: make their mean of means the mean over tokens, then clip."""
        if len(self.counts) > 1:
            scale = max(self.counts[0], 1) * len(self.counts) / max(sum(self.counts), 1)
            for parameter in self.net.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)
        self.counts.clear()

    def on_validation_epoch_start(self) -> None:
        self.scores = [self.plan.task.scores() for _ in self.trainer.val_dataloaders]

    def on_test_epoch_start(self) -> None:
        self.scores = [self.plan.task.scores() for _ in self.trainer.test_dataloaders]

    def validation_step(self, batch: Batch, index: int, dataloader_idx: int = 0) -> None:
        hidden = self.labelled(batch)
        # Metrics are sums: a part of a large vocabulary's logits at a time.
        for rows in chunks(len(hidden), self.net.vocabulary):
            about = {name: values[rows] for name, values in batch["about"].items()}
            self.scores[dataloader_idx].add(self.net.logits(hidden[rows]), batch["targets"][rows], **about)

    test_step = validation_step

    def on_validation_epoch_end(self) -> None:
        """Each process has seen its own rows of every suite; all get the sums, added in the same order."""
        parts = self.group.gather([scores.sums for scores in self.scores])
        self.scores = [self.plan.task.scores() for _ in self.scores]
        for part in parts:
            for scores, sums in zip(self.scores, part, strict=True):
                scores.count(sums)

    on_test_epoch_end = on_validation_epoch_end

    def validation(self) -> dict[str, float]:
        """`val/...` over the tokens of all suites."""
        together = self.plan.task.scores()
        for scores in self.scores:
            together.merge(scores)
        return {f"val/{name}": value for name, value in together.result().items()}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """All that is not Lightning's, in plain containers: others would block torch.load(weights_only=True)."""
        own = {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all()}
        first, *others = self.group.gather(own)
        random = first | {"others": others}
        checkpoint |= {"config": self.plan.config, "key": self.plan.key, "tokens": self.tokens, "random": random,
                       "vocabulary": self.plan.task.vocabulary_digest, "sharded": self.sharded}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.tokens, self.random = checkpoint["tokens"], checkpoint["random"]


def _packing(batch: Batch, name: str) -> Packing | None:
    return Packing(batch[name], check=False) if name in batch else None


class Recorder(Callback):
    """Points and progress lines every so many steps, the clock, and the end of a run that diverged.

    Between two points nothing waits for the device.
    """

    def __init__(self, plan: Plan, tracker: Tracker, say: Callable[[str], None]) -> None:
        self.plan, self.tracker, self.say = plan, tracker, say
        self.values: dict[str, float] = {}  # the last value of each metric
        self.pointed = self.validated = 0  # the steps of the last point and validation
        self.warming = min(WARMING_STEPS, max(1, plan.steps // 10))
        self.first = 0  # the step that this process began with
        self.warmed: int | None = None  # tokens seen before the clock ran
        self.timed = (0, 0.0)  # tokens and seconds on the clocks of earlier processes
        self.clock: Clock | None = None
        self.memory_bytes: int | None = None

    def on_train_start(self, trainer: L.Trainer, module: Training) -> None:
        self.first = trainer.global_step
        self.clock, self.memory = Clock(module.device), PeakMemory(module.device)

    def on_train_batch_end(self, trainer: L.Trainer, module: Training, *_: Any) -> None:
        step = trainer.global_step
        if step == self.first + self.warming and self.warmed is None:
            self.warmed = module.tokens
            self.clock.start()
        if step % self.plan.trainer.log_every == 0 and step != self.pointed:
            self.point(step, module)
            # A validation at the same step tells both; the last step has one in any case.
            if step % self.plan.trainer.validate_every and step != self.plan.steps:
                self.tell(step)

    def on_validation_start(self, trainer: L.Trainer, module: Training) -> None:
        if self.clock:
            self.clock.stop()

    def on_validation_end(self, trainer: L.Trainer, module: Training) -> None:
        self.point(trainer.global_step, module)
        self.validated = trainer.global_step
        self.keep(trainer.global_step, module.tokens, module.validation())
        self.tell(trainer.global_step)
        if trainer.state.fn == "fit" and self.warmed is not None:
            self.clock.start()

    def on_train_end(self, trainer: L.Trainer, module: Training) -> None:
        self.clock.stop()
        self.memory_bytes = self.peak()
        self.point(trainer.global_step, module)

    def on_save_checkpoint(self, trainer: L.Trainer, module: Training, checkpoint: dict[str, Any]) -> None:
        losses, counts = zip(*module.window, strict=True) if module.window else ((), ())
        checkpoint["position"] = asdict(self.tracker.record.position(trainer.global_step))
        checkpoint["recorder"] = {
            "values": self.values, "pointed": self.pointed, "validated": self.validated,
            "timed": list(self.so_far(module)), "memory_bytes": self.peak(),
            "losses": [loss.cpu() for loss in losses], "counts": list(counts),
        }

    def on_load_checkpoint(self, trainer: L.Trainer, module: Training, checkpoint: dict[str, Any]) -> None:
        kept = checkpoint["recorder"]
        self.values, self.pointed, self.validated = dict(kept["values"]), kept["pointed"], kept["validated"]
        self.timed, self.memory_bytes = tuple(kept["timed"]), kept["memory_bytes"]
        losses = [loss.to(module.device) for loss in kept["losses"]]
        module.window = list(zip(losses, kept["counts"], strict=True))

    def peak(self) -> int | None:
        """The highest memory, also of earlier processes of this run."""
        now = self.memory.bytes() if self.clock else None
        return max((value for value in (now, self.memory_bytes) if value is not None), default=None)

    def so_far(self, module: Training) -> tuple[int, float]:
        """Tokens and seconds of training on the clock, also of earlier processes of this run."""
        tokens, seconds = self.timed
        if self.clock is None or self.warmed is None:
            return tokens, seconds
        running = self.clock.running
        self.clock.stop()
        if running:
            self.clock.start()
        return tokens + module.tokens - self.warmed, seconds + self.clock.seconds

    def point(self, step: int, module: Training) -> None:
        """`train/loss`: the mean over the labelled tokens since the last point."""
        window, module.window, self.pointed = module.window, [], step
        if not window:
            return
        losses = torch.stack([loss for loss, _ in window]).double()
        if not losses.isfinite().all():
            before = int(losses.isfinite().logical_not().nonzero()[0, 0]) - len(window)
            first = step + 1 + before // self.plan.trainer.accumulate
            raise Diverged(f"the training loss was not finite at step {first}")
        self.keep(step, module.tokens, {"train/loss": losses.sum().item() / max(sum(count for _, count in window), 1)})

    def keep(self, step: int, tokens: int, metrics: Mapping[str, float]) -> None:
        """Record one point.

        Raises:
            Diverged: a loss in it is not finite.
        """
        self.tracker.log(step, tokens, metrics)
        self.values |= metrics
        for name, value in metrics.items():
            if not math.isfinite(value):
                raise Diverged(f"{name} was not finite at step {step}")

    def tell(self, step: int) -> None:
        curves = {name: value for name, value in self.values.items() if name.startswith(("train/", "val/"))}
        self.say("  ".join([f"step {step}/{self.plan.steps}", *(f"{n} {v:.4g}" for n, v in curves.items())]))

    def measured(self, module: Training) -> dict[str, float]:
        """Throughput of the training steps alone, without the first ones and without validation, and peak memory."""
        measured: dict[str, float] = {}
        tokens, seconds = self.so_far(module)
        peaks = [peak for peak in module.group.gather(self.memory_bytes) if peak is not None]
        if tokens and seconds:
            measured["measured/train_tokens_per_second"] = tokens / seconds
        if peaks:
            measured["measured/peak_memory_bytes"] = max(peaks)
        return measured


def train(
    plan: Plan, tracker: Tracker | Silent, say: Callable[[str], None], start: Checkpoint | None = None,
    group: Group = ALONE,
) -> dict[str, float]:
    """Train, validate and test one run.

    Args:
        say: gets the progress lines.
        start: where the run goes on.
        group: the processes of the run; each calls this.
    Returns:
        The last value of every metric.
    Raises:
        Diverged: a loss was not finite.
        Terminated: the process was asked to end; there is a checkpoint of what was done.
        OSError, RuntimeError: the last checkpoint could not be written.
    """
    recorder = Recorder(plan, tracker, say)
    if start is None or start.content["key"] != plan.key:
        at = (0, 0) if start is None else (start.position.step, start.content["tokens"])
        # What goes without a length is that of the first.
        for length in reversed(plan.task.lengths):
            recorder.keep(*at, cost.measure(plan.skeleton, length).metrics())
    if group.rank == 0:
        plan.task.keep(tracker.folder)
    suites = {split: plan.task.suites(split) for split in ("validation", "test")}
    validation, test = ([_batches(suite, plan, group) for suite in named.values()] for named in suites.values())
    with quiet():
        trainer, module = fit(plan, tracker, recorder, validation, start=start, group=group)
        if recorder.validated != trainer.global_step:
            trainer.validate(module, validation, verbose=False)
        trainer.test(module, test, verbose=False)
        scores = dict(zip(suites["test"], module.scores, strict=True)) | _rescaled(trainer, module, suites["test"])
    tested = {f"eval/{suite}/{metric}": v for suite, own in scores.items() for metric, v in own.result().items()}
    recorder.keep(trainer.global_step, module.tokens, tested | recorder.measured(module))
    return recorder.values


def _rescaled(trainer: L.Trainer, module: Training, suites: Mapping[str, Dataset[Item]]) -> dict[str, Scores]:
    """"<suite>/<scaling>" -> what the trained weights score under each scaling of RoPE that is asked for."""
    plan, found = module.plan, {}
    for scaling, options in plan.rope_scaling.items():
        for suite, rows in suites.items():
            other = Training(plan.rescaled(module.net, options, longest(rows)), plan, module.group)
            trainer.test(other, [_batches(rows, plan, module.group)], verbose=False)
            found[f"{suite}/{scaling}"], = other.scores
    return found


def _batches(rows: Dataset, plan: Plan, group: Group, start: int = 0, workers: int = 0) -> DataLoader:
    """Batches of this process's rows, its share of `batch_size` each; every row is in one process.

    Raises:
        ValueError: there are more processes than rows.
    """
    if len(rows) < group.ranks:
        raise ValueError(f"a suite has {len(rows)} rows, fewer than the {group.ranks} processes that share them")
    each = plan.trainer.batch_size // group.ranks
    return loader(rows, each, start, workers, rank=group.rank, ranks=group.ranks)


def fit(plan: Plan, tracker: Tracker | Silent, recorder: Recorder, validation: Sequence[DataLoader],
        callbacks: Sequence[Callback] = (), start: Checkpoint | None = None, group: Group = ALONE,
        ) -> tuple[L.Trainer, Training]:
    """The training alone, up to its last checkpoint."""
    options = plan.trainer
    torch.set_num_threads(options.cpu_threads)
    backend.use(options.backend)
    # Lightning would do this after it has loaded a checkpoint's float64 into float32.
    net = plan.model().double() if options.precision == 64 else plan.model()
    if group.rank:
        # Other dropout masks than the leader's, for other rows; the weights are drawn already.
        torch.manual_seed(torch.initial_seed() + group.rank)
    module, saver = Training(net, plan, group), Saver(plan, tracker.record, group)
    a_step = options.accumulate * options.batch_size
    rows = plan.task.train_dataset(plan.settings.seed, plan.steps * a_step)
    done = start.position.step * a_step if start else 0
    # The saver comes last: what the others do at a step belongs to its checkpoint.
    trainer = _trainer(plan, tracker, [recorder, *callbacks, *_stopping(plan, recorder), saver], group)
    with on_terminate(saver.ask_to_end) as saver.listen:
        trainer.fit(module, _batches(rows, plan, group, done, options.workers), validation,
                    ckpt_path=start and start.path, weights_only=True)
        if saver.saved != trainer.global_step:
            saver.save(trainer)
        if saver.ending:
            raise Terminated
    return trainer, module


def _trainer(plan: Plan, tracker: Tracker | Silent, callbacks: list[Callback], group: Group) -> L.Trainer:
    options = plan.trainer
    return L.Trainer(
        max_steps=plan.steps, max_epochs=-1, accelerator="gpu" if options.device == "cuda" else "cpu",
        **strategy(options, group),
        precision=_PRECISION.get(options.precision, options.precision), deterministic=options.deterministic,
        accumulate_grad_batches=options.accumulate, gradient_clip_val=plan.optimizer.clip,
        val_check_interval=options.validate_every * options.accumulate,
        check_val_every_n_epoch=None, num_sanity_val_steps=0,
        # Tables of sines that a mixer keeps must not be made in inference mode: training could not use them.
        inference_mode=False,
        # Ours is the saver.
        callbacks=callbacks, enable_checkpointing=False, default_root_dir=tracker.folder,
        logger=False, enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )


def _stopping(plan: Plan, recorder: Recorder) -> list[Callback]:
    return [] if plan.trainer.patience is None and plan.trainer.target is None else [EarlyStop(plan, recorder)]


@contextmanager
def quiet() -> Iterator[None]:
    """Without Lightning's own lines: its advice is about things that are decided here."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"lightning\..*")
            yield
    finally:
        logger.setLevel(level)
