"""One run from its config to its record, and the table of a grid.

A run's folder is `runs/KEY`, KEY standing for its semantic config: a finished one is not run again, and only one
process works in it. Whatever goes wrong in a run stays in it, as status, reason and traceback; the other runs of a grid
go on.
"""

from __future__ import annotations

import json
import re
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from experiments import config
from experiments.environment import environment
from experiments.tracking import Description, Status, Tracker, join_sweep, read_status


class ConfigError(ValueError):
    """Something is wrong in the options; the message is for the user."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended: a line of a grid's table.

    Args:
        status: finished, skipped, failed or diverged.
        text: the result, or why there is none.
    """

    label: str
    task: str
    seed: Any
    status: str
    text: str
    folder: str
    seconds: float | None = None

    @property
    def good(self) -> bool:
        return self.status in ("finished", "skipped")


def execute(tree: Mapping[str, Any], command: str, *, alone: bool) -> Outcome:
    """Run one composed config, in plain containers. Whatever happens in the run ends in its outcome.

    Args:
        command: repeats this run.
        alone: no cell of a grid; wrong options are then an error of the command and leave no record.
    Raises:
        ConfigError: wrong options of a run alone, or a runs folder that cannot be written.
    """
    try:
        return _locked(config.plan(tree), command)
    except ValueError as error:
        wrong = error
    except OSError as error:
        wrong = ValueError(f"runs={tree.get('runs')!r} cannot be written: {error}")
    if alone:
        raise ConfigError(str(wrong)) from None
    return _refuse(tree, command, wrong)


def _locked(plan: config.Plan, command: str) -> Outcome:
    """Run what is neither finished nor being run."""
    folder = Path(plan.settings.runs) / plan.key
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder.parent / f".{folder.name}.lock", timeout=0):
            return _skip(plan, folder) or _run(plan, _tracker(plan, folder, command))
    except Timeout:
        print(f"{_name(plan)}: skipped, another process is running it: {folder}", flush=True)
        return _outcome(plan, folder, "skipped", "another process is running it")


def _skip(plan: config.Plan, folder: Path) -> Outcome | None:
    """The outcome of a run that is finished already."""
    status = read_status(folder)
    if status is None or status.status != "FINISHED":
        return None
    if plan.settings.sweep:
        join_sweep(folder, plan.settings.sweep, _database(plan.settings.runs, plan.settings.mlflow))
    outcome = _outcome(plan, folder, "skipped", f"finished {status.ended}")
    print(f"{_name(plan)}: skipped, {outcome.text}: {folder}", flush=True)
    return outcome


def _run(plan: config.Plan, tracker: Tracker) -> Outcome:
    try:
        # Lightning takes seconds to import: `--help` and skipped runs do without.
        from experiments import module

        print(f"{_name(plan)}: {_opening(plan)}", flush=True)
        try:
            values = module.train(plan, tracker, lambda line: print(f"{_name(plan)}: {line}", flush=True))
        except module.Diverged as error:
            return _end(plan, tracker, tracker.finish("DIVERGED", str(error)), str(error))
        return _end(plan, tracker, tracker.finish("FINISHED"), headline(values))
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        return _end(plan, tracker, tracker.finish("FAILED", reason, traceback.format_exc()), reason)
    except BaseException:
        # Lightning turns Ctrl-C into SystemExit.
        tracker.finish("FAILED", "interrupted", traceback.format_exc())
        print(f"{_name(plan)}: FAILED: interrupted", flush=True)
        raise KeyboardInterrupt from None


def _end(plan: config.Plan, tracker: Tracker, status: Status, text: str) -> Outcome:
    """Tell how a run ended."""
    where = f"{tracker.folder}/log.txt" if status.status == "FAILED" else str(tracker.folder)
    print(f"{_name(plan)}: {status.status} in {status.seconds:.1f} s: {text} ({where})", flush=True)
    return _outcome(plan, tracker.folder, status.status.lower(), text, status.seconds)


def _refuse(tree: Mapping[str, Any], command: str, error: ValueError) -> Outcome:
    """The record of a cell whose options are wrong; they may be of any type."""
    semantic = {name: value for name, value in tree.items() if name not in ("runs", "sweep", "mlflow")}
    model, task = (node if isinstance(node := tree.get(name), Mapping) else {} for name in ("model", "task"))
    layout, seed, sweep, runs = model.get("layout"), tree.get("seed"), tree.get("sweep"), str(tree.get("runs"))
    label, folder = str(config.label(tree.get("stack"), layout)), Path(runs) / config.key(semantic)
    params = {"stack": label, "layout": layout, "task": task.get("name"), "seed": seed}
    reason, sweep = f"{type(error).__name__}: {error}", sweep if isinstance(sweep, str) else None
    about = Description(label, params, config.plain(semantic), environment({}), command, sweep)
    try:
        tracker = Tracker(folder, about, _database(runs, tree.get("mlflow")))
        tracker.finish("FAILED", reason, "".join(traceback.format_exception(error)))
    except OSError:
        # There is no place for a record; the table tells it.
        pass
    print(f"{label} seed {seed}: FAILED: {reason} ({folder}/log.txt)", flush=True)
    return Outcome(label, str(task.get("name")), seed, "failed", reason, str(folder))


def _tracker(plan: config.Plan, folder: Path, command: str) -> Tracker:
    apart = {name: value for name, value in asdict(plan.trainer).items() if name not in plan.config["trainer"]}
    machine = apart | {"threads": plan.trainer.cpu_threads, "device": plan.trainer.device, "device_count": 1,
                       "precision": plan.trainer.precision}
    params, sweep = config.plain(plan.params), plan.settings.sweep
    about = Description(plan.label, params, plan.config, environment(machine), command, sweep)
    return Tracker(folder, about, _database(plan.settings.runs, plan.settings.mlflow))


def _database(runs: str, wanted: Any) -> Path | None:
    return Path(runs) / "mlflow.db" if wanted else None


def _outcome(plan: config.Plan, folder: Path, status: str, text: str, seconds: float | None = None) -> Outcome:
    return Outcome(plan.label, plan.settings.task["name"], plan.settings.seed, status, text, str(folder), seconds)


def _name(plan: config.Plan) -> str:
    return f"{plan.label} seed {plan.settings.seed}"


def _opening(plan: config.Plan) -> str:
    """The budget, and how tokens became steps."""
    step = plan.trainer.batch_size * plan.trainer.accumulate * plan.task.length
    asked = f", the first whole step at or above {plan.trainer.tokens:,}" if plan.trainer.tokens is not None else ""
    return f"{plan.steps:,} steps of {step:,} tokens, {plan.steps * step:,} in all{asked}"


def headline(values: Mapping[str, float]) -> str:
    """The results in one line: validation, and the accuracy of every test suite."""
    shown = [f"{name} {value:.4g}" for name, value in values.items() if name.startswith("val/")]
    suites = {name.split("/")[1]: value for name, value in values.items() if re.fullmatch("eval/.+/accuracy", name)}
    return "  ".join([*shown, *(["test accuracy"] if suites else []), *(f"{s} {v:.3f}" for s, v in suites.items())])


class Grid(Callback):
    """The outcomes of a multirun, in a file of its folder: jobs may be other processes, on other machines."""

    folder: Path | None = None

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        Grid.folder = Path(config.hydra.sweep.dir)

    @staticmethod
    def add(folder: Path, outcome: Outcome) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "outcomes.jsonl").open("a") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")

    @classmethod
    def outcomes(cls) -> list[Outcome] | None:
        """What the grid of this process has so far; None without a grid."""
        if cls.folder is None:
            return None
        file = cls.folder / "outcomes.jsonl"
        return [Outcome(**json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


def table(outcomes: Sequence[Outcome]) -> str:
    """A grid's end: one line a run, and how many finished, were skipped, failed and diverged."""
    rows = [("stack", "task", "seed", "status", "seconds", "result"), *map(_row, outcomes)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    counts = Counter(outcome.status for outcome in outcomes)
    return "\n".join([*lines, ", ".join(f"{counts[s]} {s}" for s in ("finished", "skipped", "failed", "diverged"))])


def _row(outcome: Outcome) -> tuple[str, ...]:
    seconds = "" if outcome.seconds is None else f"{outcome.seconds:.1f}"
    first = (outcome.text.splitlines() or [""])[0]
    log = Path(outcome.folder) / "log.txt"
    result = f"{first} (log: {log})" if outcome.status == "failed" and log.exists() else first
    return outcome.label, outcome.task, str(outcome.seed), outcome.status, seconds, result
