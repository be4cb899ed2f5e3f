"""The tasks by name. A task's constructor is its config: `task: {name: mqar, length: 64}` builds `MQAR(length=64)`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mixers.options import call, nearest

if TYPE_CHECKING:
    from experiments.tasks.base import Task

# Names only, so that listing the tasks (`--help`) does not pay for importing torch.
_CLASSES = {
    "copying": "experiments.tasks.copying:Copying",
    "forgetting": "experiments.tasks.forgetting:Forgetting",
    "induction": "experiments.tasks.induction:Induction",
    "mad/compression": "experiments.tasks.mad.compression:Compression",
    "mad/fuzzy_recall": "experiments.tasks.mad.fuzzy_recall:FuzzyRecall",
    "mad/in_context_recall": "experiments.tasks.mad.in_context_recall:InContextRecall",
    "mad/memorization": "experiments.tasks.mad.memorization:Memorization",
    "mad/noisy_recall": "experiments.tasks.mad.noisy_recall:NoisyRecall",
    "mad/selective_copying": "experiments.tasks.mad.selective_copying:SelectiveCopying",
    "mqar": "experiments.tasks.mqar:MQAR",
    "needle": "experiments.tasks.needle:Needle",
    "parity": "experiments.tasks.parity:Parity",
    "text": "experiments.tasks.text:Text",
    "transduction": "experiments.tasks.transduction:Transduction",
}


def names() -> list[str]:
    """The names of all tasks, sorted."""
    return sorted(_CLASSES)


def get(name: str) -> type[Task]:
    """The class of a task.

    Raises:
        ValueError: no task has this name; the message gives the nearest and all of them.
    """
    if name not in _CLASSES:
        raise ValueError(f"task={name!r} is not a task{nearest(name, names())}; the tasks are {', '.join(names())}")
    module, _, attribute = _CLASSES[name].partition(":")
    task: type[Task] = getattr(import_module(module), attribute)
    return task


def build(options: Mapping[str, Any]) -> Task:
    """The task of a run's record, from its config `{name: ..., option: value}`.

    Raises:
        ValueError: an unknown task or option, or a value that it refuses.
    """
    return call(get(options["name"]), {name: value for name, value in options.items() if name != "name"}, "task")
