"""The report at a grid's end: a Hydra callback, named in conf/train.yaml. What makes records never imports this."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

# Seconds; a browser that hangs must not hold a grid.
PATIENCE = 600


class Report(Callback):
    """Writes the report of a sweep, and its run in MLflow. Without a sweep's name, or MLflow, it does nothing."""

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        if config.get("sweep") is None or config.get("mlflow") is False:
            return
        # Another program: what takes seconds to import is not imported where runs are trained, and its trouble stays
        # with it.
        command = [sys.executable, "-m", "analysis.report", f"--runs={config.runs}", f"--sweep={config.sweep}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        except (OSError, subprocess.TimeoutExpired) as error:
            print(f"warning: no report of the sweep {config.sweep}: {error}", file=sys.stderr, flush=True)
            return
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            print(f"warning: no report of the sweep {config.sweep}: {reason}", file=sys.stderr, flush=True)
            return
        print(done.stderr, file=sys.stderr, end="", flush=True)
        places = [line for line in done.stdout.splitlines() if line.startswith(("report: ", "report in MLflow: "))]
        print("\n".join(["", *places]), flush=True)
