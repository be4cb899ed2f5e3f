"""A folder of things that are made once: whole or not there, whoever makes them, however often, at the same time."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock


def place(cache: str | None) -> Path:
    """The cache's folder: the one asked for, or `mixerlab` in $XDG_CACHE_HOME, by default ~/.cache."""
    if cache is not None:
        return Path(cache).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mixerlab"


def once(folder: Path, make: Callable[[Path], None]) -> Path:
    """`folder`, made by `make` if it is not there; a second process waits for the first and takes what it made.

    `make` fills another folder beside it, which takes the name when all is written. If it raises, or its process is
    killed, nothing is left that counts: the rest of a killed process goes when the same folder is made again.
    Raises:
        ValueError: the folder cannot be written. What `make` raises.
    """
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f"{folder.name}.lock")):
            if not folder.is_dir():
                _make(folder, make)
    except OSError as error:
        raise ValueError(f"cache={str(folder.parent)!r} cannot be written: {error}") from None
    return folder


def _make(folder: Path, make: Callable[[Path], None]) -> None:
    new = folder.with_name(f".{folder.name}")
    # Of a process that was killed: nobody else makes this folder while we hold its lock.
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    try:
        make(new)
        for path in new.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        new.rename(folder)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
