"""`python -m experiments.train`: one run, or with -m a grid of runs."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from experiments import cli, foreman, grids, runs
from experiments.outcomes import Grid, Outcome, table
from experiments.signals import Terminated, on_terminate
from experiments.tracking import address, links

_alone: list[Outcome] = []
_mistakes: list[runs.ConfigError] = []


@hydra.main(config_path="pkg://conf", config_name="train", version_base="1.3")
def _job(composed: DictConfig) -> None:
    """One run; Hydra calls it once, or for every cell of a grid."""
    settings = HydraConfig.get()
    try:
        if settings.mode == RunMode.MULTIRUN:
            _cell(composed, Path(settings.sweep.dir), settings.job.num)
        else:
            _refuse_launcher(settings.runtime.choices["hydra/launcher"])
            outcome = _execute(composed)
            _alone.extend([outcome] if outcome else [])
    except runs.ConfigError as error:
        # Hydra would print a line of its own above ours.
        _mistakes.append(error)


def _cell(composed: DictConfig, grid: Path, number: int) -> None:
    """One job of a grid, in whatever process."""
    if grids.cancelled(grid):
        return
    if runs.follows(OmegaConf.to_container(composed)):
        _execute(composed, grid)
        return
    if number == 0:
        print(foreman.opening(grid), flush=True)
    begun = grids.start(grid, number)
    try:
        # Whoever cancels looks for started jobs first: this one may have come too late for it.
        if grids.cancelled(grid):
            return
        outcome = _execute(composed, grid)
    except Terminated:
        # In a process of a launcher's, an exception would be recorded as a failure.
        if grids.cancelled(grid):
            return
        raise
    finally:
        grids.end(grid, begun)
    Grid.add(grid, replace(outcome, job=number))
    print(foreman.line(grid), flush=True)


def _execute(composed: DictConfig, grid: Path | None = None) -> Outcome | None:
    words = list(HydraConfig.get().overrides.task)
    tree = OmegaConf.to_container(composed)
    return runs.execute(tree, runs.command(words), alone=grid is None, overrides=words, grid=grid)


def _refuse_launcher(name: str) -> None:
    if name != "basic":
        raise runs.ConfigError(f"hydra/launcher={name} is for grids: it needs -m; a single run is started here")


def _start() -> None:
    _job()
    if _mistakes:
        raise _mistakes[0]


def _links() -> list[str]:
    """Where the grid of this process is compared in MLflow; its views are brought up to what it got to."""
    options = Grid.options
    try:
        uri = address(str(options.runs), options.mlflow)
    except ValueError:
        # Every run has said so.
        return []
    found = [f"compare: {link}" for link in links(uri, options.sweep)] if uri else []
    if not found or uri.startswith("http"):
        return found
    runs = "" if options.runs == "runs" else f" {shlex.quote(f'runs={options.runs}')}"
    return [*found, f"... which this serves: python -m experiments.ui{runs}"]


def _not_ended(outcomes: Sequence[Outcome]) -> list[str]:
    """The jobs that the table of this process's grid leaves out: it was stopped, or they go on elsewhere."""
    grid = grids.read(Grid.folder)
    missing = len(grid.jobs) - len({outcome.job for outcome in outcomes})
    return [f"{missing} of {len(grid.jobs)} have not ended: {grid.control('status')}"] if missing > 0 else []


def main() -> int:
    """The exit code: 0; 1 where a run failed or diverged; 2 after a mistake; 130 after Ctrl-C, 143 after SIGTERM."""
    _alone.clear()
    _mistakes.clear()
    Grid.folder = None
    try:
        with on_terminate():
            code = cli.run(_start, "train")
    except KeyboardInterrupt:
        code = 130
    except Terminated:
        code = 143
    except foreman.Refused as error:
        code = cli.fail(str(error))
    if Grid.folder and code == 2:
        grids.forget(Grid.folder)
    outcomes = Grid.outcomes()
    if outcomes:
        varying = grids.varying(grids.read(Grid.folder).jobs)
        print("\n".join(["", table(outcomes, varying), *_not_ended(outcomes), *_links()]), flush=True)
    ended = _alone if outcomes is None else outcomes
    if Grid.folder and grids.cancelled(Grid.folder):
        code = 143
    return code or int(not all(outcome.good for outcome in ended))


if __name__ == "__main__":
    sys.exit(main())
