"""`python -m experiments.bench -m stack=mha,window,linear length=512,2048,8192`: what stacks take on this machine.

Hydra only lists the cells. Those of one length are then measured side by side: each in a process of its own, which is
fresh when its memory is read and waits while it is not its turn. Nothing else is done meanwhile.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from experiments import cli, config
from experiments.bench_cell import Cell, check, metrics, plan
from experiments.bench_table import Result, table
from experiments.bench_worker import Failed, Worker
from experiments.environment import environment
from experiments.record import Description
from experiments.signals import Terminated, on_terminate
from experiments.timing import Reading
from experiments.tracking import Tracker, address

# What Hydra lists: is it a grid, the composed config, the command of this cell alone.
_listed: list[tuple[bool, dict[str, Any], str]] = []


@hydra.main(config_path="pkg://conf", config_name="bench", version_base="1.3")
def _list(composed: DictConfig) -> None:
    settings = HydraConfig.get()
    command = shlex.join(["python", "-m", "experiments.bench", *settings.overrides.task])
    _listed.append((settings.mode == RunMode.MULTIRUN, OmegaConf.to_container(composed), command))


class Job:
    """A cell on its way to its result.

    Args:
        tree: the composed config, in plain containers.
        command: repeats this cell.
    """

    def __init__(self, tree: Mapping[str, Any], command: str) -> None:
        self.tree, self.command = config.plain(tree), command
        self.cell: Cell | None = None
        self.refused: ValueError | None = None
        try:
            self.cell = plan(tree)
        except ValueError as error:
            self.refused = error
        self.label = str(config.label(tree.get("stack"), tree["model"].get("layout")))
        self.length: Any = tree.get("length")
        self.result: Result | None = None
        self._tracker: Tracker | None = None
        self._worker: Worker | None = None
        self._rounds: list[dict[str, Reading]] = []

    @property
    def key(self) -> str:
        return config.key([self.label, self.cell.config if self.cell else self.tree])

    @property
    def rounds(self) -> int:
        return self.cell.settings.rounds if self.cell else 0

    def open(self, folder: Path) -> None:
        """Start the record. A cell whose options are wrong ends here."""
        uri = address(self.tree["runs"], self.tree["mlflow"])
        self._tracker = Tracker(folder / self.key, self._description(folder.name), uri)
        if self.refused:
            raise self.refused

    def prepare(self) -> None:
        """Start the process and bring it to where it can be timed; memory is read on the way."""
        self._worker = Worker(self.cell)
        self._memory = self._worker.ask("prepare")

    def measure(self) -> None:
        """One more round, where there is one."""
        if len(self._rounds) < self.rounds:
            self._rounds.append(self._worker.ask("round"))

    def finish(self) -> None:
        """Look at the readings and keep them."""
        peak, shared = self._worker.ask("peak"), self._worker.ask("shared_cores")
        check(self.cell, self._rounds, peak)
        values = metrics(self.cell, self._rounds, peak) | {"measured/shared_cores": shared}
        if self._memory is not None:
            values["measured/peak_memory_bytes"] = float(self._memory)
        kept = self._worker.ask("activation_bytes")
        if kept is not None:
            values[f"complexity/activation_bytes_at_{self.length}"] = float(kept)
        self._tracker.log(0, 0, values | dict(self.cell.counted))
        self._tracker.finish("FINISHED")
        self._end(Result(self.label, self.length, self.cell.flops, values))

    def fail(self, reason: str, trace: str) -> None:
        """This cell has no numbers; the record says why, where there is one."""
        if self._tracker:
            self._tracker.finish("FAILED", reason, trace)
            reason = f"{reason} (log: {self._tracker.folder / 'log.txt'})"
        self._end(Result(self.label, self.length, reason=reason))

    def close(self) -> None:
        if self._worker:
            self._worker.close()

    def _end(self, result: Result) -> None:
        self.result = result
        self.close()
        print(result.line(), flush=True)

    def _description(self, sweep: str) -> Description:
        found = self.cell.config if self.cell else {name: self.tree[name] for name in ("model", "length")}
        short = {"stack": self.label, "layout": self.tree["model"].get("layout"), "task": "bench", "seed": 0,
                 "length": self.length}
        machine = {name: self.tree.get(name) for name in ("precision", "backend", "threads", "rounds")}
        machine |= {"device": self.cell.device} if self.cell else {}
        return Description(f"{self.label} {self.length}", short | config.flatten(found), found,
                           environment(machine), self.command, self.tree["sweep"] or f"bench {sweep}",
                           # The same cell is another measurement each time.
                           key=f"{sweep}-{self.key}")


def _jobs() -> dict[str, Job]:
    """The cells of the command line, each once.

    Raises:
        ValueError: a single cell whose options are wrong; in a grid it becomes a failed row.
    """
    _listed.clear()
    _list()
    if not _listed and any(word.startswith("hydra/launcher=") for word in sys.argv):
        raise cli.UsageError("hydra/launcher: bench measures here, one cell after another; leave the option out")
    jobs = [Job(tree, command) for _, tree, command in _listed]
    if jobs and not _listed[0][0] and jobs[0].refused:
        raise jobs[0].refused
    return {job.key: job for job in jobs}


def _attempt(job: Job, action: Callable[[], None]) -> None:
    """Whatever goes wrong with a cell stays with it."""
    if job.result:
        return
    try:
        action()
    except Failed as error:
        job.fail(str(error), error.traceback)
    except Exception as error:
        job.fail(f"{type(error).__name__}: {error}", traceback.format_exc())


def _side_by_side(jobs: Sequence[Job], folder: Path) -> None:
    """Made ready one after the other, then measured in turns: what happens to the machine happens to all of them."""
    try:
        for job in jobs:
            _attempt(job, lambda job=job: job.open(folder))
            _attempt(job, job.prepare)
        for _ in range(max(job.rounds for job in jobs)):
            for job in jobs:
                _attempt(job, job.measure)
        for job in jobs:
            _attempt(job, job.finish)
    except (KeyboardInterrupt, Terminated):
        for job in jobs:
            if not job.result:
                job.fail("interrupted", traceback.format_exc())
        raise
    finally:
        for job in jobs:
            job.close()


def _measure(jobs: Sequence[Job], folder: Path) -> None:
    """The cells of one length after those of another; what was refused comes first."""
    by_length: dict[Any, list[Job]] = {}
    # Short ones first: what is wrong with a stack shows early.
    for job in sorted(jobs, key=lambda job: job.cell.settings.length if job.cell else 0):
        by_length.setdefault(job.length if job.cell else None, []).append(job)
    for same in by_length.values():
        _side_by_side(same, folder)


def _report(results: Sequence[Result], folder: Path) -> None:
    """The table, and where a stack has several lengths its exponents with their picture."""
    print(f"\n{table(results)}", flush=True)
    measured = [(result.label, result.length) for result in results if result.values]
    if len({label for label, _ in measured}) < len(set(measured)):
        print(flush=True)
        _scaling(folder)


def _scaling(folder: Path) -> None:
    """The exponents and their page. Another program: what compares records stands above what makes them."""
    subprocess.run([sys.executable, "-m", "analysis.scaling", str(folder)], check=False)


def main() -> int:
    """The exit code: 0; 1 where a cell failed; 2 after a mistake; 130 after Ctrl-C, 143 after SIGTERM."""
    jobs: list[Job] = []
    folder = Path()

    def start() -> None:
        nonlocal folder
        jobs.extend(_jobs().values())
        if jobs:
            address(str(jobs[0].tree["runs"]), jobs[0].tree["mlflow"])
            folder = Path(str(jobs[0].tree["runs"])) / "bench" / f"{datetime.now():%Y-%m-%d_%H-%M-%S-%f}"
            folder.mkdir(parents=True)

    code = cli.run(start, "bench")
    if code or not jobs:
        return code
    try:
        with on_terminate():
            _measure(jobs, folder)
    except KeyboardInterrupt:
        code = 130
    except Terminated:
        code = 143
    results = [job.result for job in jobs if job.result]
    _report(results, folder)
    return code or int(not all(result.values for result in results))


if __name__ == "__main__":
    sys.exit(main())
