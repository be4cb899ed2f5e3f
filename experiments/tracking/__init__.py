"""MLflow beside the local record. Nothing outside of this folder touches MLflow.

    server.py   where it is, and names and texts as it takes them
    mirror.py   the MLflow run of a record
    sweep.py    what a sweep has besides its runs: comparison views, their links, the run with its report
"""

from __future__ import annotations

from experiments.tracking.mirror import Tracker, catch_up, join_sweep, upload
from experiments.tracking.server import address, connect, cut, exists, safe
from experiments.tracking.sweep import links, newest, publish, refresh

__all__ = [
    "Tracker", "address", "catch_up", "connect", "cut", "exists", "join_sweep", "links", "newest", "publish",
    "refresh", "safe", "upload",
]
