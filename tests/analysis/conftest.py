"""Records as `experiments.tracking` leaves them, made by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PARAMS = {
    "task": "mqar",
    "d_model": 64,
    "lr": 0.005,
    "model.d_model": 64,
    "optimizer.lr": 0.005,
    "trainer.patience": None,
    "task.name": "mqar",
    "task.kv": [4, 8, 16],
    "task.length": 64,
}
COSTS = {
    "complexity/parameters": 66_000.0,
    "complexity/flops_per_token_forward": 150_000.0,
    "complexity/flops_per_token_train": 450_000.0,
    "complexity/state_bytes_at_64": 32_768.0,
    "complexity/state_bytes_at_1024": 524_288.0,
}
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes one record to tmp_path/runs and returns its folder."""

    def one(
        stack: str = "mha",
        seed: int = 0,
        *,
        accuracy: dict[int, float] | None = None,
        curve: dict[int, float] | None = None,
        loss: dict[int, float] | None = None,
        costs: dict[str, float] | None = None,
        status: str = "FINISHED",
        reason: str | None = None,
        sweep: str | None = "grid",
        started: str = "2025-01-01T00:00:00+00:00",
        params: dict[str, Any] | None = None,
    ) -> Path:
        """`accuracy`: of the test suites by kv pairs; `curve`, `loss`: of validation by step of 10 tokens."""
        folder = tmp_path / "runs" / f"{len(list(tmp_path.glob('runs/*'))):04d}"
        folder.mkdir(parents=True)
        curve = {100: 0.5, 200: 1.0} if curve is None else curve
        events = [(0, COSTS if costs is None else costs)]
        events += [(step, {"val/accuracy": value}) for step, value in curve.items()]
        events += [(step, {"val/loss": value}) for step, value in (loss or {}).items()]
        if status == "FINISHED":
            suites = {4: 1.0, 16: 0.99, 32: 0.9} if accuracy is None else accuracy
            last = {f"eval/kv{kv}/accuracy": value for kv, value in suites.items()} | {
                "measured/train_tokens_per_second": 50_000.0
            }
            events.append((200, last))
        files = {
            "params.json": PARAMS | {"stack": stack, "layout": stack, "seed": seed} | (params or {}),
            "environment.json": {"python": "3.11.2", "threads": 1},
            "status.json": {
                "status": status,
                "reason": reason,
                "started": started,
                "ended": None,
                "seconds": 12.5,
                "mlflow_run_id": None,
                "sweep": sweep,
                "command": f"python -m experiments.train stack={stack} seed={seed}",
            },
        }
        for name, content in files.items():
            (folder / name).write_text(json.dumps(content))
        lines = [
            json.dumps({"step": step, "tokens": 10 * step, "metrics": metrics}) for step, metrics in events if metrics
        ]
        (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
        return folder

    return one


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """The folder that `write` writes to."""
    return tmp_path / "runs"
