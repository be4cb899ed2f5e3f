"""Slurm's queue, as far as a grid has jobs in it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path


def queue(folder: str | None) -> set[str] | None:
    """The ids of the jobs of a grid that wait or run; None where Slurm's commands are not here, or do not answer.

    Args:
        folder: of the grid, with a subfolder for every submitted job; None: it has none in Slurm.
    """
    if folder is None or shutil.which("squeue") is None:
        return None
    # -r: every job of an array. %o: the script, which lies in our folder; an id alone may be another job's by now.
    command = ["squeue", "--me", "--noheader", "-r", "-o", "%i %o"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode:
        return None
    jobs = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    return {job[0] for job in jobs if len(job) == 2 and Path(folder) in Path(job[1]).parents}


def cancel(ids: Iterable[str]) -> bool:
    """scancel: jobs that wait are gone, those that run get SIGTERM; did it answer well?"""
    return subprocess.run(["scancel", *sorted(ids)], timeout=60).returncode == 0
