"""How runs end, and the table of a grid."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock
from hydra.experimental.callback import Callback
from omegaconf import DictConfig


@dataclass(frozen=True)
class Outcome:
    """How a run ended: a line of a grid's table.

    Args:
        status: finished, skipped, failed or diverged.
        text: the result, or why there is none.
        job: its number in the grid; None for a run alone.
    """

    label: str
    task: str
    seed: Any
    status: str
    text: str
    folder: str
    seconds: float | None = None
    job: int | None = None

    @property
    def good(self) -> bool:
        return self.status in ("finished", "skipped")


class Grid(Callback):
    """The outcomes of a multirun, in a file of its folder: jobs may be other processes, on other machines."""

    folder: Path | None = None
    options: DictConfig | None = None

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        Grid.folder, Grid.options = Path(config.hydra.sweep.dir), config

    @staticmethod
    def add(folder: Path, outcome: Outcome, kind: str = "outcomes") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # On a network's disk, what two processes append at once can be lost.
        with FileLock(folder / f".{kind}.lock"), (folder / f"{kind}.jsonl").open("ab+") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - 1, 0))
            # Whoever died over its line must not spoil the next one.
            start = "" if file.read() in (b"", b"\n") else "\n"
            file.write(f"{start}{json.dumps(asdict(outcome))}\n".encode())

    @classmethod
    def outcomes(cls) -> list[Outcome] | None:
        """What the grid of this process has so far; None without a grid."""
        return None if cls.folder is None else outcomes(cls.folder)


def outcomes(folder: Path, kind: str = "outcomes") -> list[Outcome]:
    """How the jobs of the grid in a folder ended so far; of the kind `trials`, how those of its tuning did.

    A line that is not all there is left out: its process writes it, or died over it.
    """
    file, found = folder / f"{kind}.jsonl", []
    for line in file.read_text().splitlines() if file.exists() else []:
        with suppress(ValueError):
            found.append(Outcome(**json.loads(line)))
    return found


def table(outcomes: Sequence[Outcome], varying: Sequence[str] = ()) -> str:
    """A grid's end: a line a run in the order of the jobs, and how many finished, were skipped, failed and diverged.

    Args:
        varying: of every job, the options that not all jobs have; they tell apart what would read the same.
    """
    ordered = sorted(outcomes, key=lambda outcome: -1 if outcome.job is None else outcome.job)
    alike = Counter((outcome.label, outcome.task, outcome.seed) for outcome in outcomes)

    def named(outcome: Outcome) -> Outcome:
        known = outcome.job is not None and outcome.job < len(varying)
        if alike[outcome.label, outcome.task, outcome.seed] == 1 or not known:
            return outcome
        return replace(outcome, label=f"{outcome.label} ({varying[outcome.job]})")

    rows = [("stack", "task", "seed", "status", "seconds", "result"), *(_row(named(outcome)) for outcome in ordered)]
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


def headline(values: Mapping[str, float]) -> str:
    """The results in one line: validation, and the accuracy of every test suite."""
    shown = [f"{name} {value:.4g}" for name, value in values.items() if name.startswith("val/")]
    suites = {name.split("/")[1]: value for name, value in values.items() if re.fullmatch("eval/.+/accuracy", name)}
    return "  ".join([*shown, *(["test accuracy"] if suites else []), *(f"{s} {v:.3f}" for s, v in suites.items())])
