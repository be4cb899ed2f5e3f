"""`resume=RUN`: continue a run under changed options, on purpose; and get a trained model back.

The record moves to the folder of its new config's key, with its checkpoints, its curves and its MLflow run. From then
on it is an interrupted run of the new config. What it was before is in its status, so that the same command finds it
again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from hydra.core.override_parser.overrides_parser import OverridesParser

from arch.language_model import LanguageModel
from experiments import config
from experiments.corpus.tokenisers import Bytes, Tokeniser
from experiments.corpus.tokenisers import load as load_file
from experiments.record import Status, lock, read_description, read_status, write_status
from mixers.options import call, nearest

# Of a batch there are so many in a step: the position in the data and in the validations is counted in them.
_FIXED = ("batch_size", "accumulate")


def find(run: str, runs: str) -> Path:
    """The folder of a run, by its folder, its key, or a key that it had before it was continued.

    Raises:
        ValueError: there is none.
    """
    for folder in (Path(run), Path(runs) / run):
        if (folder / "status.json").is_file():
            # Of ".", the name is no key.
            return folder if folder.name not in ("", "..") else folder.resolve()
    known = {path.parent.name: path.parent for path in sorted(Path(runs).glob("*/status.json"))}
    for folder in known.values():
        status = _status(folder)
        if status and Path(run).name in status.earlier_keys:
            return folder
    close = nearest(Path(run).name, known)
    raise ValueError(f"run={run!r} is no run{close}; give its folder, or its key in runs={runs!r} ({len(known)} runs)")


def changed(folder: Path, tree: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The recorded config with the options of the command line in it, as a composed tree.

    Args:
        tree: as composed, in plain containers.
        overrides: the words of the command line that led to it.
    Raises:
        ValueError: the record cannot be read; an override that is more than one option's value.
    """
    about = read_description(folder)
    recorded = about.config
    both = {"trainer": dict(tree["trainer"]) | recorded["trainer"]}
    new = dict(tree) | recorded | both | {"stack": about.label, "runs": str(folder.parent)}
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        path = override.key_or_group
        if path == "task" and override.value() == recorded["task"]["name"]:
            continue
        if path.partition(".")[0] not in recorded:
            if path in ("stack", "experiment") or override.is_delete():
                raise ValueError(
                    f"resume: {override.input_line!r} cannot change; allowed are single options such as "
                    "trainer.steps=600"
                )
            continue
        if path in ("model", "task", "optimizer", "trainer") or override.is_delete():
            raise ValueError(f"resume: {override.input_line!r} is not one option's value, such as trainer.steps=600")
        _put(new, path.split("."), tree)
    return new


def _put(target: dict[str, Any], path: Sequence[str], source: Mapping[str, Any]) -> None:
    """target[path] = source[path], without changing what target shares with others."""
    name, *rest = path
    if not rest:
        target[name] = source[name]
        return
    target[name] = dict(target.get(name) or {})
    _put(target[name], rest, source[name])


def move(folder: Path, plan: config.Plan) -> None:
    """Give a record to the config of `plan`, with which it is then an interrupted run.

    Raises:
        ValueError: it is being run, the new config has a record already, or no checkpoint of it fits; nothing changed.
    """
    target = folder.parent / plan.key
    if target == folder:
        return
    with lock(folder) as free, lock(target) as also:
        if not free or not also:
            raise ValueError(f"resume: {folder if also else target} is being run by another process")
        status = read_status(folder)
        if target.exists():
            raise ValueError(f"resume: {target} is the run with these options already")
        _check(folder, status, plan)
        keys = list(dict.fromkeys([*status.earlier_keys, folder.name]))
        reason = "to be continued under changed options"
        write_status(folder, replace(status, status="KILLED", reason=reason, key=plan.key, earlier_keys=keys))
        folder.rename(target)


def _check(folder: Path, status: Status, plan: config.Plan) -> None:
    # Lightning takes seconds to import.
    from experiments import checkpoints

    start, faults = checkpoints.newest(folder, {status.key, folder.name, *status.earlier_keys})
    if start is None:
        raise ValueError(f"resume: {folder} has no checkpoint to go on from{''.join(f'; {fault}' for fault in faults)}")
    before = start.content["config"]["trainer"]
    for name in _FIXED:
        if getattr(plan.trainer, name) != before[name]:
            raise ValueError(f"resume: trainer.{name}={getattr(plan.trainer, name)} must stay {before[name]}")
    seed = start.content["config"]["seed"]
    if plan.settings.seed != seed:
        raise ValueError(f"resume: seed={plan.settings.seed} must stay {seed}, of which weights and rows are")
    if plan.steps < start.position.step:
        raise ValueError(
            f"resume: trainer.steps={plan.steps} must be at least {start.position.step}, where {start.path} is"
        )
    fault = checkpoints.misfit(start, plan.skeleton)
    if fault:
        raise ValueError(f"resume: the options change the weights: {fault}")
    if start.content.get("vocabulary", "") != plan.task.vocabulary_digest:
        raise ValueError(
            f"resume: task.tokenizer={plan.config['task'].get('tokenizer')} is not the tokeniser that {start.path} was "
            "trained with: its ids mean other text"
        )


def load(run: str | Path, runs: str | Path = "runs") -> LanguageModel:
    """The trained model of a run on the CPU, in eval mode: `model = experiments.load("runs/0123456789abcdef")`.

    Args:
        run: its folder, or its key in the folder `runs`.
    Raises:
        ValueError: no such run, no checkpoint that can be read, or one that the present code does not fit.
    """
    from experiments import checkpoints

    folder = find(str(run), str(runs))
    found, faults = checkpoints.newest(folder)
    if found is None:
        raise ValueError(f"{folder} has no checkpoint that can be read{''.join(f'; {fault}' for fault in faults)}")
    # The task, whose text may lie elsewhere now, is not needed.
    vocabulary = len(found.weights["embedding.weight"])
    options = found.content["config"]["model"]
    model = call(config.model_class(options), options, "model", vocabulary=vocabulary)
    fault = checkpoints.misfit(found, model)
    if fault:
        raise ValueError(f"the code has changed since {folder} was made: {fault}")
    if found.weights["embedding.weight"].dtype == torch.float64:
        model.double()
    model.load_state_dict(found.weights)
    return model.eval()


def tokeniser(run: str | Path, runs: str | Path = "runs") -> Tokeniser:
    """What turns text into the ids of a run's model and back: `.encode("To be")`, `.decode(ids)`.

    Args:
        run: its folder, or its key in the folder `runs`.
    Raises:
        ValueError: no such run, its task has no text, or its tokeniser is not that of its checkpoint.
    """
    from experiments import checkpoints

    folder = find(str(run), str(runs))
    task = read_description(folder).config["task"]
    if task["name"] != "text":
        raise ValueError(f"run={str(run)!r} is of task={task['name']}, whose tokens stand for no text")
    file = folder / "tokenizer.json"
    found = Bytes() if task.get("tokenizer", "bytes") == "bytes" else load_file(file, str(file))
    start, _ = checkpoints.newest(folder)
    if start is not None and start.content.get("vocabulary", "") != found.digest:
        raise ValueError(f"{file} is not the tokeniser that {start.path} was trained with")
    return found


def _status(folder: Path) -> Status | None:
    try:
        return read_status(folder)
    except ValueError:
        return None
