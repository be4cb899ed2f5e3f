"""`-m hydra/launcher=submitit_slurm`: every cell of a grid is a task of one Slurm array."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from experiments.launchers import Cell, CellLauncher
from experiments.signals import Terminated
from experiments.tasks.base import at_least

_SECONDS_BETWEEN_LOOKS = 5
# A job that has left the queue may have written its result to a slow shared disk.
_LOOKS_BEFORE_LOST = 3


class SlurmCell(Cell):
    """A cell as a Slurm job: put back into the queue, it goes on from its newest checkpoint."""

    def __call__(self) -> None:
        asked: list[Any] = []
        requeue = signal.getsignal(signal.SIGUSR2)

        def save_first(*about: Any) -> None:
            asked.append(about)
            os.kill(os.getpid(), signal.SIGTERM)

        # Slurm's warning before the time limit; submitit would put the job back in the middle of a step.
        signal.signal(signal.SIGUSR2, save_first)
        try:
            super().__call__()
        except Terminated:
            if asked and callable(requeue):
                requeue(*asked[0])
            raise

    def checkpoint(self) -> Any:
        """What submitit runs when the job starts again: the same, for what was done is in the run's folder."""
        import submitit

        return submitit.helpers.DelayedSubmission(self)


class Slurm(CellLauncher):
    """An array of Slurm jobs, waited for here; options: conf/hydra/launcher/submitit_slurm.yaml."""

    cell = SlurmCell

    def __init__(self, folder: str, max_num_timeout: int, **options: Any) -> None:
        self.folder, self.max_num_timeout = folder, max_num_timeout
        self.options = {name: value for name, value in options.items() if value is not None}

    def check(self) -> None:
        find_slurm()
        at_least("hydra.launcher.max_num_timeout", self.max_num_timeout, 0)
        for name in ("array_parallelism", "time", "signal_delay_s", "nodes", "ntasks_per_node", "cpus_per_task"):
            if name in self.options:
                at_least(f"hydra.launcher.{name}", self.options[name], 1)
        setup = self.options.get("setup", [])
        if isinstance(setup, str):
            raise ValueError(f"hydra.launcher.setup={setup!r} must be a list of commands, such as ['module load cuda']")

    def run(self, cells: Sequence[Cell]) -> None:
        import submitit

        executor = submitit.SlurmExecutor(self.folder, max_num_timeout=self.max_num_timeout)
        executor.update_parameters(**self.options)
        try:
            with executor.batch():
                jobs = [executor.submit(cell) for cell in cells]
        except submitit.core.utils.FailedJobError as error:
            raise ValueError(f"hydra/launcher=submitit_slurm: Slurm takes no such jobs: {str(error).strip()}") from None
        array = jobs[0].job_id.partition("_")[0]
        print(f"{len(cells)} runs are Slurm's array {array}, logs in {jobs[0].paths.folder}; it goes on without this "
              f"command, and `scancel {array}` ends it", flush=True)
        watch(dict(zip(cells, jobs, strict=True)), array)


def find_slurm() -> None:
    """Raises ValueError where there is no Slurm to send jobs to, or nothing to send them with."""
    asked = "hydra/launcher=submitit_slurm"
    other = "hydra/launcher=joblib runs the grid on this machine"
    if shutil.which("sbatch") is None:
        raise ValueError(f"{asked}: there is no Slurm on this machine (no command sbatch); {other}")
    try:
        import submitit  # noqa: F401
    except ImportError:
        raise ValueError(f"{asked} needs the extra slurm: pip install 'mixerlab[slurm]'") from None
    code, said = _ask("sinfo", "--noheader")
    if code:
        raise ValueError(f"{asked}: Slurm does not answer ({said}); {other}")


def watch(jobs: dict[Cell, Any], array: str) -> None:
    """Wait until every job has left its result, or the queue; a cell whose job left no result is recorded as lost."""
    missed: Counter[Cell] = Counter()
    while jobs:
        queued = _queued(array)
        for cell, job in list(jobs.items()):
            missed[cell] = 0 if queued is None or job.job_id in queued else missed[cell] + 1
            if job.paths.result_pickle.exists():
                _settle(cell, job)
            elif missed[cell] >= _LOOKS_BEFORE_LOST:
                cell.lost(f"its Slurm job {job.job_id} ended without a word: {_state(job.job_id)} ({job.paths.stderr})")
            else:
                continue
            del jobs[cell]
        if jobs:
            time.sleep(_SECONDS_BETWEEN_LOOKS)


def _settle(cell: Cell, job: Any) -> None:
    from submitit.core.utils import pickle_load

    how, result = pickle_load(job.paths.result_pickle)
    if how == "error":
        cell.lost(f"its Slurm job {job.job_id} failed: {result.strip().splitlines()[-1]} ({job.paths.stderr})")


def _queued(array: str) -> set[str] | None:
    """The jobs of an array that wait or run; None where Slurm does not answer."""
    code, said = _ask("squeue", "--noheader", "--array", "--format=%i", "--jobs", array)
    if code:
        # What ended some time ago is unknown to it.
        return set() if "Invalid job id" in said else None
    return set(said.split())


def _state(job: str) -> str:
    """Slurm's word for how a job ended, while it remembers it."""
    _, said = _ask("scontrol", "show", "job", job)
    found = [word.partition("=")[2] for word in said.split() if word.startswith("JobState=")]
    return found[0] if found else "unknown"


def _ask(*command: str) -> tuple[int, str]:
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, (done.stdout or done.stderr).strip()
