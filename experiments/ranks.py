"""The processes of one run (`trainer=ddp`): a leader, which keeps the record, and followers, which only train.

On one machine the leader starts the followers itself, as `python -m experiments.ranks`, whatever started the leader: a
command, a grid, a launcher. Where torchrun or srun has started all of them, with the same command, the first one leads.
Followers are told what to train; they write nothing and end with their leader.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from experiments import config
from experiments.record import Position
from experiments.signals import Terminated

# A process that waits longer for the others gives up; a validation of the leader's suites may take some minutes.
_PATIENCE = timedelta(minutes=10)
_VARIABLE = "MIXERLAB_PLACE"
# What the leader has told the others in this run.
_told: list[Any] = []


@dataclass(frozen=True)
class Place:
    """Where a process stands among those of its run; `meeting` is where they find each other, a URL of torch's."""

    rank: int
    ranks: int
    local_rank: int
    node: int
    meeting: str


class Group:
    """What the processes of a run say to each other. Alone, a process hears its own words."""

    def __init__(self, place: Place | None = None) -> None:
        self.place = place
        self.rank, self.ranks = (place.rank, place.ranks) if place else (0, 1)

    def total(self, *counts: int) -> tuple[int, ...]:
        """The sums of counts over all processes."""
        if self.ranks == 1:
            return counts
        values = torch.tensor(counts)
        dist.all_reduce(values)
        return tuple(values.tolist())

    def any(self, flag: bool) -> bool:
        """Is it so for one of the processes?"""
        return self.total(int(flag))[0] > 0

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """A scalar's sum over all processes, in float64."""
        if self.ranks > 1:
            value = value.double()
            dist.all_reduce(value)
        return value

    def gather(self, what: Any) -> list[Any]:
        """What each process has, by rank."""
        found = [what] * self.ranks
        if self.ranks > 1:
            dist.all_gather_object(found, what)
        return found

    def tell(self, what: Any) -> Any:
        """What the leader says."""
        said = [what]
        if self.ranks > 1:
            dist.broadcast_object_list(said)
        return said[0]


ALONE = Group()


class Silent:
    """In place of a tracker, in a follower."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.record, self.checkpoints = folder, self, folder / "checkpoints"

    def log(self, step: int, tokens: int, metrics: Any) -> None:
        """Nothing: the leader logs the values of all."""

    def position(self, step: int) -> Position:
        return Position(step, 0, 0.0)


@contextmanager
def led(plan: config.Plan, start: Path | None, folder: Path) -> Iterator[Group]:
    """The group of a run's processes, told what to train; this process leads it.

    Args:
        start: the checkpoint that training goes on from.
        folder: of the record.
    Raises:
        RuntimeError: a follower failed; says which, and with what.
    """
    if plan.trainer.ranks == 1:
        yield Group()
        return
    with followers(plan.trainer.ranks) as others, joined(others.place) as group:
        _told.append(group.tell(_order(plan, start, folder)))
        try:
            yield group
        except RuntimeError as error:
            others.explain(error)
            raise


def _order(plan: config.Plan, start: Path | None, folder: Path) -> dict[str, Any]:
    # The model has been matched already, and a continued run has been found.
    settings = asdict(replace(plan.settings, match={}, resume=None))
    return {"settings": settings, "key": plan.key, "start": start, "folder": folder}


def follow(place: Place) -> None:
    """Train as the leader says, if it says so.

    Raises:
        ValueError: this process would train something else, for it has other code or data.
    """
    with joined(place) as group:
        order = group.tell(None)
        if order is None:
            return
        from experiments import checkpoints, module

        plan = config.plan(order["settings"])
        if plan.key != order["key"]:
            raise ValueError(f"the run's key is {order['key']} for the leader and {plan.key} here: other code or data")
        start = order["start"] and checkpoints.read(order["start"])
        # All come to the same conclusion; the leader records it.
        with suppress(module.Diverged, Terminated):
            module.train(plan, Silent(order["folder"]), lambda line: None, start, group)


@contextmanager
def leading(place: Place | None) -> Iterator[None]:
    """Processes that torchrun or srun has started are told at the end of this that there is nothing, if they were told
    nothing in it."""
    _told.clear()
    try:
        yield
    finally:
        if place and not _told:
            with joined(place) as group:
                group.tell(None)


def check(options: config.Trainer, place: Place | None) -> None:
    """Raises ValueError where other processes were started than the options ask for."""
    asked = f"trainer: devices={options.devices_per_node} and num_nodes={options.num_nodes}"
    if place and place.ranks != options.ranks:
        raise ValueError(f"{asked} are {options.ranks} processes, and {place.ranks} were started")
    if place is None and options.num_nodes > 1:
        raise ValueError(f"{asked} need a process for each device on every node: start them with torchrun or srun")


@contextmanager
def joined(place: Place) -> Iterator[Group]:
    """Meet the other processes."""
    # Counts and words go over the CPU, without waiting for a GPU.
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, init_method=place.meeting, rank=place.rank, world_size=place.ranks,
                            timeout=_PATIENCE)
    try:
        yield Group(place)
    finally:
        dist.destroy_process_group()


def started() -> Place | None:
    """This process's place among those that torchrun or srun has started; None where it is alone."""
    of = os.environ.get
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return Place(int(of("RANK")), int(of("WORLD_SIZE")), int(of("LOCAL_RANK")), int(of("GROUP_RANK")), "env://")
    if int(of("SLURM_STEP_NUM_TASKS", "1")) > 1:
        from lightning.pytorch.plugins.environments import SLURMEnvironment

        host = SLURMEnvironment.resolve_root_node_address(of("SLURM_STEP_NODELIST", "127.0.0.1"))
        meeting = f"tcp://{host}:{20_000 + int(of('SLURM_JOB_ID')) % 20_000}"
        return Place(int(of("SLURM_PROCID")), int(of("SLURM_STEP_NUM_TASKS")), int(of("SLURM_LOCALID")),
                     int(of("SLURM_NODEID")), meeting)
    return None


class Followers:
    """The processes that a leader at `place` has started; none where they were started for it."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.processes: list[tuple[subprocess.Popen[str], Path]] = []

    def start(self, place: Place, log: Path) -> None:
        root = str(Path(__file__).parents[1])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {_VARIABLE: json.dumps(asdict(place)), "PYTHONPATH": path}
        with log.open("w") as errors:
            # A session of its own: Ctrl-C is the leader's, which ends it.
            self.processes.append((subprocess.Popen(
                [sys.executable, "-m", "experiments.ranks"], env=environment, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True), log))

    def ready(self) -> None:
        """Wait until all have imported what they need.

        Raises:
            RuntimeError: one has ended instead.
        """
        for process, _ in self.processes:
            if not process.stdout.readline():
                process.wait()
                self.explain(RuntimeError("a process of the run ended before it began"))

    def explain(self, error: RuntimeError) -> None:
        """Raise what a follower died of, if one did: the leader's own error is only that the others are gone."""
        until = time.monotonic() + 5
        while time.monotonic() < until and not any(process.poll() for process, _ in self.processes):
            time.sleep(0.1)
        dead = [(rank, process.returncode, log.read_text())
                for rank, (process, log) in enumerate(self.processes, 1) if process.poll()]
        # Those that are left die of the first one's death.
        for rank, code, said in sorted(dead, key=lambda one: "losed by peer" in one[2]):
            last = said.strip().splitlines()[-1] if said.strip() else f"ended with exit code {code}"
            found = RuntimeError(f"process {rank} of {len(self.processes) + 1}: {last}")
            found.add_note(said)
            raise found from error

    def end(self) -> None:
        for process, _ in self.processes:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()


@contextmanager
def followers(ranks: int) -> Iterator[Followers]:
    """The other processes of a run: started on this machine, and ended, unless torchrun or srun has started them."""
    outer = started()
    if outer:
        yield Followers(outer)
        return
    with tempfile.TemporaryDirectory() as folder:
        place = Place(0, ranks, 0, 0, f"file://{folder}/meeting")
        found = Followers(place)
        try:
            for rank in range(1, ranks):
                found.start(replace(place, rank=rank, local_rank=rank), Path(folder) / f"{rank}.txt")
            found.ready()
            yield found
        finally:
            found.end()


def _end_with_the_leader() -> None:
    # Its end of the pipe closes with it, however it ends.
    sys.stdin.read()
    os._exit(1)


def main() -> None:
    """A follower that its leader has started."""
    threading.Thread(target=_end_with_the_leader, daemon=True).start()
    from experiments import module  # noqa: F401

    print("ready", flush=True)
    follow(Place(**json.loads(os.environ[_VARIABLE])))


if __name__ == "__main__":
    main()
