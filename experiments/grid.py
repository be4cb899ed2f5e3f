"""`python -m experiments.grid`: look at a grid, end it, go on with it.

    python -m experiments.grid status [NAME]           its jobs: done, running (how far, how fast), failed, waiting
    python -m experiments.grid status [NAME] --watch   the same, until the grid has ended
    python -m experiments.grid cancel [NAME]           running jobs save a checkpoint and end, waiting ones never start
    python -m experiments.grid retry [NAME]            its command once more: what finished is skipped, the rest goes on

NAME is a sweep's name or that of a folder in runs/.grids; without one, it is the newest grid. runs=FOLDER is another
folder of runs. The exit code of status: 0 all jobs have a result, 1 some have none, 3 the grid is on; of cancel: 0, or
1 where something still runs; of retry: that of the grid; 2 after a mistake.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from experiments import grids, slurm_queue
from experiments.grids import Grid, Started
from experiments.progress import BAD, Job, Progress, progress

_RUNNING = 3
# Seconds between two looks, on a terminal and elsewhere.
_LOOK, _LOOK_PLAIN = 2.0, 10.0
# Seconds that a cancelled job has to write its checkpoint.
PATIENCE = 120.0
_COLOURS = {"finished": "green", "skipped": "green", "running": "cyan", "waiting": "dim"} | dict.fromkeys(BAD, "red")


def main() -> int:
    """The exit code, see above."""
    parser = argparse.ArgumentParser(
        "python -m experiments.grid", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("verb", choices=("status", "retry", "cancel"))
    parser.add_argument("words", nargs="*", metavar="NAME", help="of a sweep or a folder; and runs=FOLDER")
    parser.add_argument("--watch", action="store_true", help="with status: go on until the grid has ended")
    given = parser.parse_args()
    if given.watch and given.verb != "status":
        parser.error("--watch belongs to status")
    try:
        grid = _find(given.words)
        if given.verb == "status":
            return _watch(grid) if given.watch else _status(grid)
        return {"retry": _retry, "cancel": _cancel}[given.verb](grid)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _find(words: Sequence[str]) -> Grid:
    names = [word for word in words if "=" not in word]
    for word in words:
        if "=" in word and not word.startswith("runs="):
            raise ValueError(f"{word!r} is no option here; allowed: runs=FOLDER")
    if len(names) > 1:
        raise ValueError(f"one grid at a time, not {len(names)}: {', '.join(names)}")
    places = [word.removeprefix("runs=") for word in words if "=" in word]
    return grids.find(Path(places[-1] if places else "runs"), names[0] if names else None)


def _status(grid: Grid) -> int:
    now = progress(grid)
    console = Console()
    console.print(Text(f"{_title(now)}\n"), soft_wrap=True)
    if console.is_terminal:
        console.print(_table(now))
    else:
        print("\n".join(_lines(now.jobs)))
    if now.bad and not now.active:
        print(f"\nrun again what has no result: {grid.control('retry')}")
    return _code(now)


def _code(now: Progress) -> int:
    return _RUNNING if now.active else int(now.bad > 0)


def _title(now: Progress) -> str:
    cancelled = " (cancelled)" if now.grid.cancelled else ""
    return f"{now.grid.name}{cancelled}: {now}"


def _cells(job: Job) -> tuple[str, ...]:
    seconds = "" if job.seconds is None else f"{job.seconds:.0f}"
    return str(job.number), job.options, job.state, seconds, job.text


_HEAD = ("job", "options", "state", "seconds", "about")


def _lines(jobs: Sequence[Job]) -> list[str]:
    rows = [_HEAD, *map(_cells, jobs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _table(now: Progress, most: int | None = None) -> Table:
    """For a terminal; of more than `most` jobs, those that run or went wrong come first."""
    jobs = list(now.jobs)
    if most is not None and len(jobs) > most:
        order = ("running", *BAD, "waiting", "finished", "skipped")
        jobs = sorted(sorted(jobs, key=lambda job: order.index(job.state))[:most], key=lambda job: job.number)
    table = Table(*_HEAD, box=None, pad_edge=False, header_style="bold")
    for job in jobs:
        table.add_row(*(Text(cell, style=_COLOURS[job.state] if i == 2 else "") for i, cell in enumerate(_cells(job))))
    return table


def _watch(grid: Grid) -> int:
    console = Console()
    if not console.is_terminal:
        return _watch_plain(grid)
    with Live(console=console, auto_refresh=False, transient=False) as live:
        while True:
            now = progress(grid)
            table = _table(now, max(console.height - 4, 5))
            live.update(Group(Text(_title(now), style="bold"), table), refresh=True)
            if not now.active:
                return _code(now)
            time.sleep(_LOOK)


def _watch_plain(grid: Grid) -> int:
    """A line whenever something has changed, and one a running job."""
    before = ""
    while True:
        now = progress(grid)
        lines = [_title(now), *(f"  {job.options}: {job.text}" for job in now.jobs if job.state == "running")]
        if "\n".join(lines) != before:
            before = "\n".join(lines)
            print(before, flush=True)
        if not now.active:
            return _code(now)
        time.sleep(_LOOK_PLAIN)


def _cancel(grid: Grid) -> int:
    """End a grid. Its leading process ends by itself: jobs that it still starts return at once."""
    if not progress(grid).active:
        print(f"{grid.name}: nothing runs")
        return 0
    grids.cancel(grid.folder)
    queued = slurm_queue.queue(grid.slurm) or set()
    # Before the processes of the rest are looked for: a second SIGTERM ends a run at once, without its checkpoint.
    running = [job for job in _running(grid) if job.slurm not in queued]
    if queued:
        slurm_queue.cancel(queued)
    # Those that are provably still the ones that started these jobs.
    for process in {job.process for job in running}:
        process.terminate()
    until = time.monotonic() + PATIENCE
    while (now := progress(grid)).active or grid.process.alive:
        if time.monotonic() > until:
            print(f"{_title(now)}: still running after {PATIENCE:.0f} s")
            return 1
        time.sleep(0.5)
    print(f"{_title(now)}; to go on: {grid.control('retry')}")
    return 0


def _running(grid: Grid) -> list[Started]:
    running = {job.number for job in progress(grid).jobs if job.state == "running"}
    return [begun for number, begun in grids.started(grid.folder).items() if number in running]


def _retry(grid: Grid) -> int:
    if progress(grid).active:
        raise ValueError(f"{grid.name} is still running; to end it: {grid.control('cancel')}")
    # Hydra takes a while to import.
    from experiments import train

    place = [f"runs={grid.runs.resolve()}"] if grids.moved(grid) else []
    os.chdir(grid.cwd)
    os.environ.update({name: value for name, value in grid.variables.items() if name not in os.environ})
    sys.argv = ["experiments.train", *grid.arguments, *place]
    return train.main()


if __name__ == "__main__":
    sys.exit(main())
