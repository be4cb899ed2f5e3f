"""What is done for a grid as a whole: it is checked and written down when it begins, and it tells how far it is."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from experiments import grids, runs
from experiments.grids import Grid
from experiments.outcomes import outcomes
from experiments.processes import Process
from experiments.progress import progress
from experiments.tuning import Search
from mixers.options import call

# Seconds between two looks for jobs that have ended elsewhere.
_LOOK = 1.0


class Refused(BaseException):
    """A mistake in the options of a grid. Hydra makes a warning of a callback's Exception, and starts the jobs."""


class Foreman(Callback):
    """Hydra calls it in the process that leads the grid."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        if runs.follows({"trainer": OmegaConf.to_container(config.trainer)}):
            return
        try:
            search = call(Search, OmegaConf.to_container(config.tune, resolve=True), "tune")
            grid = describe(config, search)
            check(search, grid.jobs, config.seed)
            _check_place(grid, Path(config.runs))
            grids.begin(grid)
        except ValueError as error:
            raise Refused(str(error)) from None
        except OSError as error:
            raise Refused(f"{error.filename}: {error.strerror}; runs=FOLDER chooses another folder") from None
        if grid.slurm:
            # What its jobs say is in their logs.
            threading.Thread(target=_tell, args=(grid,), daemon=True).start()


def describe(config: DictConfig, search: Search) -> Grid:
    """The grid that is about to start, of its config with Hydra's node."""
    hydra, slurm = config.hydra, None
    if hydra.launcher._target_.endswith(".Slurm"):
        slurm = str(Path(hydra.launcher.folder).absolute())
    ours = {name: value for name, value in os.environ.items() if name.startswith("MIXERLAB_")}
    sweep, jobs = config.get("sweep"), _jobs(hydra)
    # A cell is a job without its seed.
    cells = {tuple(word for word in job if not word.startswith("seed=")) for job in jobs}
    return Grid(Path(hydra.sweep.dir), sweep and str(sweep), time.time(), sys.argv[1:], os.getcwd(), ours,
                Process.this(), jobs, search.runs * len(cells), slurm)  # fmt: skip


def check(search: Search, jobs: Sequence[Sequence[str]], seed: Any) -> None:
    """What one job cannot see of the others.

    Args:
        seed: of jobs that do not say theirs.
    Raises:
        ValueError: options of tuning, or the folder of runs, differ between jobs; a seed of tuning is one of the
            results.
    """
    words = [dict(word.lstrip("+").partition("=")[::2] for word in job) for job in jobs]
    for name in {name for job in words for name in job if name.partition(".")[0] in ("tune", "runs")}:
        values = {job.get(name) for job in words}
        if len(values) > 1:
            raise ValueError(f"{name} must be the same for the whole grid, not {', '.join(sorted(map(str, values)))}")
    for job in words:
        if search.method and "optimizer.lr" in job:
            raise ValueError(f"optimizer.lr={job['optimizer.lr']} is what tune chooses: leave one of them out")
        if str(job.get("seed", seed)).isdecimal():
            search.refuse(int(job.get("seed", seed)))


def _check_place(grid: Grid, records: Path) -> None:
    """Raises ValueError for a folder in which nobody would look for a grid."""
    place = records / ".grids"
    if grid.folder.parent != place:
        raise ValueError(f"hydra.sweep.dir={grid.folder} must be a folder in {place}; runs=FOLDER chooses another")


def _jobs(hydra: DictConfig) -> list[list[str]]:
    """The options of every job, in the order of their numbers; none for another sweeper than Hydra's own.

    Hydra keeps them to its sweeper, so this asks the same functions once more.
    """
    sweeper = OmegaConf.to_container(hydra.sweeper)
    if not sweeper["_target_"].endswith(".BasicSweeper"):
        return []
    words = [f"{name}={value}" for name, value in (sweeper.get("params") or {}).items()]
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    overrides = parser.parse_overrides([*words, *OmegaConf.to_container(hydra.overrides.task)])
    return [list(job) for batch in BasicSweeper.split_arguments(overrides, None) for job in batch]


def opening(folder: Path) -> str:
    """What a grid says first."""
    grid = grids.read(folder)
    return f"grid of {len(grid.jobs) or 'many'} runs; from another terminal: {grid.control('status')}"


def line(folder: Path) -> str:
    """How far the grid in a folder is, for its own terminal."""
    grid = grids.read(folder)
    now = progress(grid)
    again = f"; run again what has no result: {grid.control('retry')}" if now.bad and not now.active else ""
    return f"grid: {now}{again}"


def _tell(grid: Grid) -> None:
    """A line when jobs have started, and whenever one has ended."""
    told = 0
    while not grids.started(grid.folder):
        time.sleep(_LOOK)
    print(opening(grid.folder), flush=True)
    while True:
        time.sleep(_LOOK)
        ended = len(outcomes(grid.folder))
        if ended > told:
            print(line(grid.folder), flush=True)
        told = ended
