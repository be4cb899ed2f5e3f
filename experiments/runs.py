"""One run from its config to its record.

A run's folder is `runs/KEY`, KEY standing for its semantic config: a finished one is not run again, an interrupted one
goes on from its newest checkpoint, and only one process works in it. Whatever goes wrong in a run stays in it, as
status, reason and traceback; the other runs of a grid go on.
"""

from __future__ import annotations

import json
import re
import shlex
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments import config, grids, ranks, resume, trials
from experiments.environment import code, environment
from experiments.outcomes import Grid, Outcome, headline, outcomes
from experiments.record import Description, discard, lock, read_status, write, write_status
from experiments.signals import Terminated
from experiments.tracking import Tracker, address, catch_up, join_sweep
from mixers import registry

if TYPE_CHECKING:
    from experiments.checkpoints import Checkpoint


class ConfigError(ValueError):
    """Something is wrong in the options; the message is for the user."""


def execute(
    tree: Mapping[str, Any], command: str, *, alone: bool, overrides: Sequence[str] = (), grid: Path | None = None
) -> Outcome | None:
    """Run one composed config, in plain containers. Whatever happens in the run ends in its outcome.

    Of the processes that torchrun or srun has started for one run, only the first has an outcome.

    Args:
        command: repeats this run.
        alone: no cell of a grid; wrong options are then an error of the command and leave no record.
        overrides: the words of the command line that the config was composed with.
        grid: the folder of the grid that the run is of.
    Raises:
        ConfigError: wrong options of a run alone, or a runs folder that cannot be written.
    """
    place = _place(tree)
    if place and place.rank:
        return ranks.follow(place)
    with ranks.leading(place):
        return _lead(tree, command, alone, overrides, grid, place)


def follows(tree: Mapping[str, Any]) -> bool:
    """Does another process lead this one, of those that torchrun or srun has started for one run?"""
    place = _place(tree)
    return bool(place and place.rank)


def _place(tree: Mapping[str, Any]) -> ranks.Place | None:
    """This process's place in a run for several, where they were started for it. Options may be of any type."""
    trainer = tree.get("trainer")
    several = isinstance(trainer, Mapping) and trainer.get("strategy", "single") != "single"
    return ranks.started() if several else None


def _lead(
    tree: Mapping[str, Any], command: str, alone: bool, overrides: Sequence[str], grid: Path | None,
    place: ranks.Place | None,
) -> Outcome:
    try:
        plan = _plan(tree, overrides)
        ranks.check(plan.trainer, place)
        if plan.search.method:
            if place:
                raise ValueError("tune makes several runs, and torchrun or srun has started processes for one")
            plan = _tuned(plan, overrides, grid)
            # From an earlier try, of which no trial came to anything.
            discard(_refused(tree))
        outcome = _locked(plan, command)
        told = f"; {plan.choice.brief}" if plan.choice and outcome.good else ""
        return replace(outcome, text=outcome.text + told)
    except trials.NoRate as error:
        return _refuse(tree, command, error)
    except ValueError as error:
        wrong = error
    except OSError as error:
        wrong = ValueError(f"runs={tree.get('runs')!r} cannot be written: {error}")
    if alone:
        raise ConfigError(str(wrong)) from None
    return _refuse(tree, command, wrong)


def _plan(tree: Mapping[str, Any], overrides: Sequence[str]) -> config.Plan:
    """The plan of a config, or of the run that it continues, whose record is then the plan's."""
    run = tree.get("resume")
    if run is None:
        return config.plan(tree)
    if (tree.get("tune") or {}).get("method"):
        raise ValueError(f"resume={run} goes on at the learning rate that it has, or at optimizer.lr=...: without tune")
    folder = resume.find(str(run), str(tree.get("runs")))
    plan = config.plan(resume.changed(folder, tree, overrides))
    resume.move(folder, plan)
    if Path(run).name != plan.key:
        print(f"{_name(plan)}: {run} is now {Path(plan.settings.runs) / plan.key}", flush=True)
    return plan


def _tuned(plan: config.Plan, overrides: Sequence[str], grid: Path | None) -> config.Plan:
    """The plan at the best learning rate of its cell, after the trials that are not there yet."""
    if any(re.match(r"\+*optimizer\.lr=", word) for word in overrides):
        raise ValueError("optimizer.lr is what tune chooses: leave one of them out")
    since = grids.read(grid).started if grid else time.time()
    noted = {outcome.folder for outcome in outcomes(grid, "trials")} if grid else set()
    # Options of which a trial has other values.
    words = [word for word in overrides if not re.match(r"\+*(seed|tune(\.\w+)?)=", word)]

    def note(outcome: Outcome) -> None:
        if grid and outcome.folder not in noted:
            Grid.add(grid, outcome, "trials")
        noted.add(outcome.folder)

    def run(trial: config.Plan) -> None:
        own = [f"seed={trial.settings.seed}", f"optimizer.lr={trial.optimizer.lr}"]
        note(_run(trial, trial.folder, command([*words, *own])))

    def settled(trial: config.Plan) -> bool:
        status = read_status(trial.folder)
        if status is None or status.status in ("RUNNING", "KILLED"):
            return False
        # In one grid, what fails is tried once, and not again for every seed.
        kept = status.status != "FAILED" and not _again(trial, trial.folder)
        if not kept and not trials.ended_since(status, since):
            return False
        join_sweep(trial.folder, trial.settings.sweep, _address(trial), trial=True)
        note(_outcome(trial, trial.folder, "skipped", f"{status.status} {status.ended}"))
        return True

    tuned = trials.tune(plan, run, settled)
    print(f"{_name(plan)}: {'warning: ' if tuned.choice.edge else ''}{tuned.choice}", flush=True)
    return tuned


def command(overrides: Sequence[str]) -> str:
    """The command that repeats one run."""
    # An experiment's file may ask for a grid.
    single = ["hydra.mode=RUN"] if any(override.startswith("+experiment=") for override in overrides) else []
    return shlex.join(["python", "-m", "experiments.train", *overrides, *single])


def _locked(plan: config.Plan, command: str) -> Outcome:
    """Run what is neither finished nor being run."""
    folder = plan.folder
    with lock(folder) as free:
        if free:
            return _settled(plan, folder) or _run(plan, folder, command)
    status = read_status(folder)
    who = f"{status.owner} is running it" if status and status.owner else "another process is running it"
    print(f"{_name(plan)}: skipped, {who}: {folder}", flush=True)
    return _outcome(plan, folder, "skipped", who)


def _settled(plan: config.Plan, folder: Path) -> Outcome | None:
    """The outcome of a run that has one already and is not to be run again."""
    status = read_status(folder)
    if status and status.key not in (None, plan.key):
        # It was continued as another run, by a process that died before it could move the record.
        folder.rename(folder.with_name(status.key))
        return None
    if status is None or status.status not in ("FINISHED", "DIVERGED") or _again(plan, folder):
        return None
    uri = _address(plan)
    join_sweep(folder, plan.settings.sweep, uri)
    if plan.choice:
        write(folder / "tuning.json", json.dumps(_tuning(plan, folder), indent=1))
    if status.behind and uri:
        catch_up(folder, uri)
    if status.status == "DIVERGED":
        outcome = _outcome(plan, folder, "diverged", f"{status.reason} ({status.ended}; rerun=always tries again)")
    else:
        other = ", by other code (rerun=stale runs it again)" if _stale(plan, folder) else ""
        outcome = _outcome(plan, folder, "skipped", f"finished {status.ended}{other}")
    print(f"{_name(plan)}: {outcome.status}, {outcome.text}: {folder}", flush=True)
    return outcome


def _tuning(plan: config.Plan, folder: Path) -> dict[str, Any] | None:
    """How the learning rate was chosen, and in which sweeps: in others the same run is one at a given rate."""
    if plan.choice is None:
        return None
    path, own = folder / "tuning.json", [plan.settings.sweep] if plan.settings.sweep else []
    before = json.loads(path.read_text()).get("sweeps", []) if path.exists() else []
    return plan.choice.record | {"sweeps": list(dict.fromkeys([*before, *own]))}


def _again(plan: config.Plan, folder: Path) -> bool:
    """Is what there is of this run to be thrown away?"""
    return plan.settings.rerun == "always" or (plan.settings.rerun == "stale" and _stale(plan, folder))


def _stale(plan: config.Plan, folder: Path) -> bool:
    """Was this run made by other code than there is now?"""
    try:
        made_by = json.loads((folder / "environment.json").read_text()).get("code")
    except (OSError, ValueError):
        return False
    return made_by is not None and made_by != _code(plan)


def _code(plan: config.Plan) -> str:
    used = [options for stack in plan.skeleton.stacks for options in stack.used.values()]
    return code(*(registry.get(options["mixer"]) for options in used))


def _run(plan: config.Plan, folder: Path, command: str) -> Outcome:
    start = _start(plan, folder)
    tracker = _tracker(plan, folder, command, start)
    try:
        # Lightning takes seconds to import: `--help` and skipped runs do without.
        from experiments import module

        name = _name(plan)
        print(f"{name}: {_opening(plan, start)}", flush=True)
        try:
            with ranks.led(plan, start and start.path, folder) as group:
                values = module.train(plan, tracker, lambda line: print(f"{name}: {line}", flush=True), start, group)
        except module.Diverged as error:
            return _end(plan, tracker, "DIVERGED", str(error))
        return _end(plan, tracker, "FINISHED", headline(values))
    except Exception as error:
        return _end(plan, tracker, "FAILED", f"{type(error).__name__}: {error}", traceback.format_exc())
    except BaseException as error:
        # Lightning turns Ctrl-C into SystemExit.
        ended = isinstance(error, Terminated)
        _end(plan, tracker, "KILLED", "terminated (SIGTERM)" if ended else "interrupted (Ctrl-C)")
        raise Terminated if ended else KeyboardInterrupt from None


def _start(plan: config.Plan, folder: Path) -> Checkpoint | None:
    """Where an earlier try of this run stopped; None: from the beginning.

    Raises:
        ValueError: there is a checkpoint of another config, of other weights, or of weights divided otherwise.
    """
    status = read_status(folder)
    if status is None or _again(plan, folder):
        return None
    from experiments import checkpoints

    start, faults = checkpoints.newest(folder, {plan.key, status.key, *status.earlier_keys})
    for fault in faults:
        print(f"{_name(plan)}: {fault}", flush=True)
    wrong = start and checkpoints.misfit(start, plan.skeleton)
    if wrong:
        raise ValueError(f"the code has changed since {folder} was interrupted: {wrong}; rerun=always starts it anew")
    if start and start.content.get("sharded", False) != plan.trainer.sharded:
        # The optimiser's state is in another order, and would be taken for that of other weights.
        made = "trainer=fsdp" if start.content["sharded"] else "another trainer than fsdp"
        raise ValueError(f"{start.path} is of {made}: go on with that, or rerun=always starts the run anew")
    return start


def _end(plan: config.Plan, tracker: Tracker, outcome: str, text: str, log: str | None = None) -> Outcome:
    """Close the record and tell how the run ended."""
    try:
        status = tracker.finish(outcome, None if outcome == "FINISHED" else text, log)
    except OSError as error:
        # The record says RUNNING, and nobody does: the run counts as interrupted.
        text = f"{text} (and its record cannot be written: {error}; the same command goes on)"
        status = replace(tracker.record.status, status="FAILED", seconds=tracker.record.seconds)
    log_file = tracker.folder / "log.txt"
    where = log_file if log_file.exists() else tracker.folder
    print(f"{_name(plan)}: {status.status} in {status.seconds:.1f} s: {text} ({where})", flush=True)
    return _outcome(plan, tracker.folder, status.status.lower(), text, status.seconds)


def _refuse(tree: Mapping[str, Any], command: str, error: Exception) -> Outcome:
    """The record of a cell whose options are wrong, and may be of any type, or that has no learning rate."""
    semantic, folder = _semantic(tree), _refused(tree)
    model, task = (node if isinstance(node := tree.get(name), Mapping) else {} for name in ("model", "task"))
    layout, seed, sweep, runs = model.get("layout"), tree.get("seed"), tree.get("sweep"), str(tree.get("runs"))
    label = str(config.label(tree.get("stack"), layout))
    params = {"stack": label, "layout": layout, "task": task.get("name"), "seed": seed}
    reason, sweep = f"{type(error).__name__}: {error}", sweep if isinstance(sweep, str) else None
    about = Description(label, params, config.plain(semantic), environment({}), command, sweep, folder.name)
    try:
        tracker = Tracker(folder, about, _possible_address(runs, tree.get("mlflow")))
        tracker.finish("FAILED", reason, "".join(traceback.format_exception(error)))
        where = f" ({folder}/log.txt)"
    # There is no place for a record: the table and this line tell it.
    except (OSError, ValueError):
        where = ""
    print(f"{label} seed {seed}: FAILED: {reason}{where}", flush=True)
    return Outcome(label, str(task.get("name")), seed, "failed", reason, str(folder))


def _semantic(tree: Mapping[str, Any]) -> dict[str, Any]:
    """What decides the result of a config that was not checked."""
    return {name: tree[name] for name in tree if name not in ("runs", "sweep", "mlflow", "rerun", "resume", "tune")}


def _refused(tree: Mapping[str, Any]) -> Path:
    """The folder of the record of a config that was not run."""
    return Path(str(tree.get("runs"))) / config.key(_semantic(tree))


def lost(tree: Mapping[str, Any], said: str, reason: str, *, overrides: Sequence[str] = ()) -> Outcome:
    """The outcome of a run whose process ended without one; its record says so, unless that has its end already.

    Args:
        said: the command that repeats the run.
    """
    try:
        plan = _plan(tree, overrides)
        if plan.search.method:
            # Which of its runs it was, nobody has said.
            return _refuse(tree, said, trials.NoRate(reason))
        folder = plan.folder
        with lock(folder) as free:
            settled = _settled(plan, folder) if free else None
            if settled is None and free:
                _close(plan, folder, said, reason)
    except ValueError as error:
        return _refuse(tree, said, error)
    if settled:
        return settled
    print(f"{_name(plan)}: FAILED: {reason} ({folder})", flush=True)
    return _outcome(plan, folder, "failed", reason)


def _close(plan: config.Plan, folder: Path, said: str, reason: str) -> None:
    """Say in the record, and in MLflow, that the run has failed; what it has so far is kept, to go on from."""
    status, uri = read_status(folder), _address(plan)
    if status is None:
        _tracker(plan, folder, said, None).finish("FAILED", reason)
    elif status.status == "RUNNING":
        write_status(folder, replace(status, status="FAILED", reason=reason, owner=None, behind=uri is not None))
        if uri:
            catch_up(folder, uri)


def _possible_address(runs: str, wanted: Any) -> str | None:
    """The database or server of a run whose options may be wrong; None where they name none."""
    try:
        return address(runs, wanted) if isinstance(wanted, (bool, str)) else None
    except ValueError:
        return None


def _tracker(plan: config.Plan, folder: Path, command: str, start: Checkpoint | None) -> Tracker:
    apart = {name: value for name, value in asdict(plan.trainer).items() if name not in plan.config["trainer"]}
    machine = apart | {"threads": plan.trainer.cpu_threads, "device": plan.trainer.device,
                       "device_count": plan.trainer.ranks, "precision": plan.trainer.precision, "code": _code(plan)}
    params, sweep = config.plain(plan.params), plan.settings.sweep
    about = Description(plan.label, params, plan.config, environment(machine), command, sweep, plan.key, plan.is_trial,
                        _tuning(plan, folder))  # fmt: skip
    return Tracker(folder, about, _address(plan), start and start.position)


def _address(plan: config.Plan) -> str | None:
    return address(plan.settings.runs, plan.settings.mlflow)


def _outcome(plan: config.Plan, folder: Path, status: str, text: str, seconds: float | None = None) -> Outcome:
    return Outcome(plan.label, plan.settings.task["name"], plan.settings.seed, status, text, str(folder), seconds)


def _name(plan: config.Plan) -> str:
    trial = f" lr {plan.optimizer.lr:g}" if plan.is_trial else ""
    return f"{plan.label} seed {plan.settings.seed}{trial}"


def _opening(plan: config.Plan, start: Checkpoint | None) -> str:
    """The budget, how tokens became steps, and where the run goes on."""
    step = plan.trainer.batch_size * plan.trainer.accumulate * plan.task.length
    asked = f", the first whole step at or above {plan.trainer.tokens:,}" if plan.trainer.tokens is not None else ""
    begin = f", going on after step {start.position.step:,}" if start else ""
    return f"{plan.steps:,} steps of {step:,} tokens, {plan.steps * step:,} in all{asked}{begin}"
