"""Records of runs that were never trained: for pages with all that a page may have."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

STACKS = ("mha", "linear", "window", "mha + linear", "mamba2")


def grid(
    folder: Path, stacks: Sequence[str] = STACKS, seeds: int = 3, points: int = 30, diverged: tuple[str, int] = ("", 0)
) -> Path:
    """Runs of a sweep named look, in `folder`; one of them, a stack and its seed, may have diverged."""
    for number, (stack, seed) in enumerate((stack, seed) for stack in stacks for seed in range(seeds)):
        status = "DIVERGED" if (stack, seed) == diverged else "FINISHED"
        _record(folder / f"{number:016x}", stack, seed, points, status)
    return folder


def _record(folder: Path, stack: str, seed: int, points: int, status: str) -> None:
    """A run as `experiments.record` leaves it, with curves that a run may have."""
    folder.mkdir(parents=True)
    rank = STACKS.index(stack) if stack in STACKS else 0
    best = 0.98 - 0.12 * rank - 0.01 * seed
    params = {"stack": stack, "layout": stack, "task": "mqar", "seed": seed, "task.name": "mqar", "task.length": 64,
              "task.kv": [4, 8], "d_model": 64, "lr": 0.01, "optimizer.lr": 0.01}
    counted = {"complexity/parameters": 60_000.0 + 4000 * rank, "complexity/flops_per_token_train": 4e5 + 3e4 * rank,
               "complexity/flops_per_token_forward": 2e5 + 1e4 * rank,
               "complexity/state_bytes_at_64": 65_536.0 / 2**rank}
    events = [(0, counted)]
    for i in range(1, points + 1):
        learned = 1 - math.exp(-4 * i / points)
        values = {"train/loss": 5 - 4 * best * learned, "val/loss": 5 - 3.9 * best * learned,
                  "val/accuracy": best * learned}
        events.append((10 * i, values if i % 10 == 0 or points < 50 else {"train/loss": values["train/loss"]}))
    if status == "FINISHED":
        suites = {f"eval/kv{kv}/accuracy": max(best - 0.004 * kv, 0.0) for kv in (4, 8, 16)}
        events.append((10 * points, suites | {"measured/train_tokens_per_second": 40_000.0 - 4000 * rank,
                                              "measured/peak_memory_bytes": 5e8}))
    lines = [{"step": step, "tokens": 2048 * step, "time": 1.7e9 + step, "metrics": values} for step, values in events]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "params.json").write_text(json.dumps(params))
    (folder / "environment.json").write_text(json.dumps({"python": "3.11", "threads": 1, "device": "cpu"}))
    (folder / "config.yaml").write_text("seed: 0\n")
    reason = None if status == "FINISHED" else "the training loss was not finite at step 40"
    (folder / "status.json").write_text(json.dumps({
        "status": status, "reason": reason, "sweep": "look", "sweeps": ["look"], "key": folder.name, "seconds": 60.0,
        "started": f"2025-01-01T00:00:{seed:02}+00:00", "ended": "2025-01-01T00:01:00+00:00",
        "command": f"python -m experiments.train 'model.layout={stack}' seed={seed}"}))
