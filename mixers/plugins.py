"""Where mixers of other people come from: installed packages, and files that an environment variable names.

A package says so in its pyproject.toml; what it names, a module or something in one, is imported and registers its
mixers with `mixers.registry.register`:

    [project.entry-points."mixerlab.mixers"]
    decay = "their_package.decay"

A file needs no package: MIXERLAB_PLUGINS=/path/decay.py, several with ":" between them (";" on Windows). Worker
processes inherit the variable; a relative path is taken from the folder that a process runs in.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from importlib.metadata import EntryPoint, entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

GROUP = "mixerlab.mixers"
VARIABLE = "MIXERLAB_PLUGINS"


@dataclass(frozen=True)
class Source:
    """One plug-in, not imported yet.

    Attributes:
        label: what it is called in messages.
        load: imports it and returns what it names, a module or something in one. Raises whatever the import raises.
    """

    label: str
    load: Callable[[], Any]


def sources() -> Iterator[Source]:
    """All plug-ins: installed ones by name, then the files in their order."""
    # One package may be found twice, installed and in the current folder.
    found = {(entry.name, entry.value): entry for entry in entry_points(group=GROUP)}
    for _, entry in sorted(found.items()):
        yield Source(_label(entry), entry.load)
    for path in filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)):
        yield Source(f"{VARIABLE}={path}", partial(_file, Path(path).expanduser().resolve()))


def _label(entry: EntryPoint) -> str:
    package = f" of {entry.dist.name} {entry.dist.version}" if entry.dist else ""
    return f"{entry.name} = {entry.value}{package}"


def _file(path: Path) -> Any:
    """The module of a file outside of any package."""
    # The folder counts too: two people may call their file mixer.py.
    name = f"mixerlab_plugin_{path.stem}_{blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError("it must be a Python file, ending in .py")
    module = module_from_spec(spec)
    # As `import` does: dataclasses look their module up, and a failed one leaves nothing behind.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
