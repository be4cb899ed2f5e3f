"""SIGTERM, by which schedulers end a job: what was done is kept, and the exit says why."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Terminated(BaseException):
    """The process was asked to end. Like KeyboardInterrupt it passes by whoever catches errors."""


@contextmanager
def on_terminate(first: Callable[[], None] | None = None) -> Iterator[Callable[[], None]]:
    """Inside, SIGTERM calls `first`, and at the second time, or without `first`, raises `Terminated`.

    Gives a function that says so again, should somebody have put another handler in front.
    """
    if threading.current_thread() is not threading.main_thread():
        # Only the main thread may say what signals do.
        yield lambda: None
        return
    calls = [first] if first else []

    def handle(*_: Any) -> None:
        if not calls:
            raise Terminated
        calls.pop()()

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield lambda: signal.signal(signal.SIGTERM, handle) and None
    finally:
        signal.signal(signal.SIGTERM, before)
