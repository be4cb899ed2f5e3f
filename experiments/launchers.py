"""Where the cells of a grid run: `-m hydra/launcher=joblib` or `submitit_slurm`; else one after another, in here.

Hydra's plug-ins of these names stop the grid at the first process that is killed, and lose what the others did. Here
every cell has an outcome: one whose process dies is recorded as failed with the reason, and the others go on.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, wait
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from omegaconf import DictConfig, OmegaConf, open_dict

from experiments import grids, runs
from experiments.outcomes import Grid, outcomes
from experiments.signals import Terminated, on_terminate
from experiments.tasks.base import at_least

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
# For a checkpoint after a signal.
_SECONDS_TO_SAVE = 60


class Cell:
    """One cell of a grid; it travels to the process that runs it and has left its outcome in the grid's folder then."""

    def __init__(self, launcher: CellLauncher, number: int, overrides: Sequence[str]) -> None:
        self.context, self.task, self.config = launcher.context, launcher.task, launcher.config
        self.number, self.overrides = number, list(overrides)
        self.singletons = Singleton.get_state()

    def __call__(self) -> None:
        Singleton.set_state(self.singletons)
        setup_globals()
        with on_terminate():
            returned = run_job(
                hydra_context=self.context, task_function=self.task, config=self.composed(),
                job_dir_key="hydra.sweep.dir", job_subdir_key="hydra.sweep.subdir",
            )
        # What the cell raised, if it did.
        _ = returned.return_value

    def composed(self) -> DictConfig:
        """Hydra's config of this cell."""
        config = self.context.config_loader.load_sweep_config(self.config, self.overrides)
        with open_dict(config):
            config.hydra.job.id = config.hydra.job.num = self.number
        return config

    def lost(self, reason: str) -> None:
        """Record that the cell's process ended without an outcome."""
        config = self.composed()
        words = list(config.hydra.overrides.task)
        with open_dict(config):
            folder = Path(config.pop("hydra").sweep.dir)
        # A process may die, or seem to have died, after the cell's end.
        if grids.cancelled(folder) or any(outcome.job == self.number for outcome in outcomes(folder)):
            return
        tree = OmegaConf.to_container(config)
        outcome = runs.lost(tree, runs.command(words), reason, overrides=words)
        Grid.add(folder, replace(outcome, job=self.number))


class CellLauncher(Launcher):
    """A launcher that hands cells to other processes."""

    cell = Cell

    def setup(self, *, hydra_context: Any, task_function: Any, config: DictConfig) -> None:
        self.context, self.task, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        setup_globals()
        if self.config.hydra.job.config_name != "train":
            raise ValueError("hydra/launcher: only experiments.train sends its runs elsewhere")
        self.check()
        cells = [self.cell(self, initial_job_idx + i, overrides) for i, overrides in enumerate(job_overrides)]
        self.run(cells)
        # Hydra wants something of each; the outcomes are in the grid's folder.
        return [JobReturn(overrides=cell.overrides, status=JobStatus.COMPLETED) for cell in cells]

    def check(self) -> None:
        """Raises ValueError for wrong options, or where what is needed is not here."""
        raise NotImplementedError

    def run(self, cells: Sequence[Cell]) -> None:
        """Run all cells, and return when each has an outcome."""
        raise NotImplementedError


class Joblib(CellLauncher):
    """Worker processes on this machine, each reused from cell to cell; options: conf/hydra/launcher/joblib.yaml."""

    def __init__(self, n_jobs: int | None, threads: int | None, gpus: int) -> None:
        self.n_jobs, self.threads, self.gpus = n_jobs, threads, gpus

    def check(self) -> None:
        for name, least in (("n_jobs", 1), ("threads", 1), ("gpus", 0)):
            if getattr(self, name) is not None:
                at_least(f"hydra.launcher.{name}", getattr(self, name), least)

    def run(self, cells: Sequence[Cell]) -> None:
        idle = [Worker(place) for place in self.places(len(cells))]
        waiting, running = list(reversed(cells)), {}
        threads = idle[0].place["OMP_NUM_THREADS"]
        print(f"{len(cells)} runs, {len(idle)} at a time, CPU threads of each: {threads}", flush=True)
        try:
            while waiting or running:
                while waiting and idle:
                    worker, cell = idle.pop(), waiting.pop()
                    running[worker.start(cell)] = worker, cell
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    worker, cell = running.pop(future)
                    worker.settle(cell, future.exception())
                    idle.append(worker)
        finally:
            # After Ctrl-C or SIGTERM some still run: they are told to keep what they have.
            for worker, _ in running.values():
                worker.terminate()
            wait(running, timeout=_SECONDS_TO_SAVE)
            for worker in [*idle, *(worker for worker, _ in running.values())]:
                worker.close()

    def places(self, cells: int) -> list[dict[str, str]]:
        """What is set in the environment of each worker: its share of the CPU threads and of the GPUs."""
        import joblib
        import torch

        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
        return shares(cells, joblib.cpu_count(), gpus if torch.cuda.is_available() else [], self)


def shares(cells: int, cores: int, gpus: Sequence[str], asked: Joblib) -> list[dict[str, str]]:
    """How a machine is shared: as many cells at a time as it has shares of GPUs, or else of CPU threads."""
    each = min(asked.gpus, len(gpus))
    fit = len(gpus) // each if each else cores // (asked.threads or 1)
    count = min(cells, asked.n_jobs or max(1, fit))
    threads = dict.fromkeys(_THREADS, str(asked.threads or max(1, cores // count)))
    places = []
    for i in range(count):
        mine = [gpus[(i * each + j) % len(gpus)] for j in range(each)]
        places.append(threads | ({"CUDA_VISIBLE_DEVICES": ",".join(mine)} if mine else {}))
    return places


class Worker:
    """A process for one cell after another, replaced where a cell takes it along."""

    def __init__(self, place: dict[str, str]) -> None:
        self.place = place
        self.pool: Any = None

    def start(self, cell: Cell) -> Future:
        try:
            return self._submit(cell)
        except BrokenExecutor:
            # Killed while it had nothing to do.
            self.close()
            return self._submit(cell)

    def _submit(self, cell: Cell) -> Future:
        from joblib.externals.loky import ProcessPoolExecutor

        if self.pool is None:
            # Ctrl-C reaches all processes of a terminal; what it means for the cells is up to us.
            self.pool = ProcessPoolExecutor(
                1, env=self.place, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN)
            )
        self.process = self.pool.submit(os.getpid)
        return self.pool.submit(cell)

    def settle(self, cell: Cell, error: BaseException | None) -> None:
        """The end of a cell: where it left no outcome itself, it is said here."""
        if error is None:
            return
        killed = isinstance(error, BrokenExecutor)
        if killed:
            how = re.search(r"\{(.*)\}", str(error))
            cell.lost(f"its process ended without a word: {how[1] if how else error} (out of memory?)")
            self.close()
        else:
            cell.lost("terminated (SIGTERM)" if isinstance(error, Terminated) else f"{type(error).__name__}: {error}")

    def terminate(self) -> None:
        """Let the cell keep what it has and end."""
        if self.process.done() and not self.process.exception():
            with suppress(ProcessLookupError):
                os.kill(self.process.result(), signal.SIGTERM)

    def close(self) -> None:
        if self.pool is not None:
            self.pool.shutdown(kill_workers=True)
            self.pool = None


def register() -> None:
    """Make our launchers known to Hydra, which takes them from below `hydra_plugins` alone."""
    from experiments.slurm import Slurm

    Plugins.instance().class_name_to_class |= {f"hydra_plugins.mixerlab.{c.__name__}": c for c in (Joblib, Slurm)}
    # Where plug-ins of these names are installed, Hydra would hold our files in conf against their options.
    installed = ConfigStore.instance().repo.get("hydra", {}).get("launcher", {})
    for name in ("joblib", "submitit_slurm"):
        installed.pop(f"{name}.yaml", None)
