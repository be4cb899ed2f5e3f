"""From a composed config to a checked plan of one run.

`register` puts into Hydra's store what the code knows better than YAML: a `stack` for every registered mixer and the
options of all mixers. `plan` turns the composed tree into objects; every option is checked against the signature that
it configures, so that a typo is an error wherever it stands. Nothing here imports lightning or mlflow: `--help` stays
fast.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import torch
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from arch import layout
from arch.encoder_decoder import EncoderDecoder
from arch.language_model import LanguageModel
from arch.stack import Stack
from experiments import extrapolation, matching, optim, tasks, tuning
from experiments.metrics import direction
from experiments.tasks.base import Task, at_least
from kernels.backend import BACKENDS
from mixers import registry
from mixers.options import call, defaults, nearest

CONF = files("conf")
# Before any run of this process changes it.
_ALL_THREADS = torch.get_num_threads()


@dataclass(frozen=True)
class Settings:
    """The top level of conf/train.yaml."""

    stack: str
    model: dict[str, Any]
    task: dict[str, Any]
    optimizer: dict[str, Any]
    trainer: dict[str, Any]
    seed: int
    sweep: str | None
    runs: str
    mlflow: bool | str
    rerun: Literal["never", "stale", "always"] = "never"
    resume: str | None = None
    match: dict[str, Any] = field(default_factory=dict)
    evaluate: dict[str, Any] = field(default_factory=dict)
    tune: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Trainer:
    """How long and in which way to train: the config node `trainer`, whose YAML says what each option is.

    Raises:
        ValueError: a value out of range, or not exactly one of steps and tokens.
    """

    steps: int | None = 300
    tokens: int | None = None
    batch_size: int = 32
    accumulate: int = 1
    validate_every: int = 100
    monitor: str = "val/loss"
    patience: int | None = None
    target: float | None = None
    log_every: int = 50
    checkpoint_every: int | None = None
    keep_checkpoints: int | None = 2
    precision: Literal[32, 64, "bf16-mixed", "16-mixed"] = 32
    compile: bool = False
    deterministic: bool = False
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    backend: str = "auto"
    threads: int | None = None
    workers: int = 0
    strategy: Literal["single", "ddp", "fsdp"] = "single"
    devices: int | None = 1
    num_nodes: int = 1

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.tokens is None):
            advice = "trainer.steps=N trainer.tokens=null, or trainer.tokens=N trainer.steps=null"
            raise ValueError(f"trainer: steps={self.steps} and tokens={self.tokens}: set exactly one of them: {advice}")
        for name in ("steps", "tokens", "patience", "checkpoint_every", "keep_checkpoints", "threads", "devices"):
            if getattr(self, name) is not None:
                at_least(f"trainer: {name}", getattr(self, name), 1)
        for name in ("batch_size", "accumulate", "validate_every", "log_every", "num_nodes"):
            at_least(f"trainer: {name}", getattr(self, name), 1)
        at_least("trainer: workers", self.workers, 0)
        if not self.monitor.startswith("val/"):
            raise ValueError(f"trainer: monitor={self.monitor!r} must be a metric of validation, such as val/accuracy")
        direction(self.monitor)
        if self.backend not in BACKENDS:
            close = nearest(self.backend, BACKENDS)
            raise ValueError(f"trainer: backend={self.backend!r} is not allowed{close}; allowed: {', '.join(BACKENDS)}")
        if self.precision == "16-mixed" and self.device == "cpu":
            raise ValueError("trainer: precision='16-mixed' needs a GPU; on a CPU: 32, 64 or bf16-mixed")
        if self.accelerator == "gpu" and not torch.cuda.is_available():
            raise ValueError("trainer: accelerator='gpu', but torch sees no GPU here; allowed: auto, cpu")
        self._check_processes()

    def _check_processes(self) -> None:
        gpus = torch.cuda.device_count() if self.device == "cuda" else 0
        if self.devices is None and not gpus:
            raise ValueError("trainer: devices=null is every GPU, and there is none to use here: set trainer.devices=2")
        if gpus and self.devices_per_node > gpus:
            raise ValueError(f"trainer: devices={self.devices} must be at most {gpus}, the GPUs that torch sees here")
        if self.strategy == "single" and self.ranks > 1:
            raise ValueError(f"trainer: devices={self.devices} and num_nodes={self.num_nodes} need trainer=ddp or fsdp")
        if self.batch_size % self.ranks:
            raise ValueError(
                f"trainer: batch_size={self.batch_size} must be a multiple of {self.ranks}, the processes that share it"
            )

    @property
    def devices_per_node(self) -> int:
        """Processes on a node: the devices asked for, or all GPUs."""
        return self.devices or torch.cuda.device_count()

    @property
    def ranks(self) -> int:
        """Processes of the run, on all nodes."""
        return self.devices_per_node * self.num_nodes

    @property
    def sharded(self) -> bool:
        """Has each process a share of the weights?"""
        return self.strategy == "fsdp" and self.ranks > 1

    @property
    def cpu_threads(self) -> int:
        """Threads of a process: those asked for, or its share of what torch takes (all cores, or OMP_NUM_THREADS)."""
        return self.threads or max(1, _ALL_THREADS // self.devices_per_node)

    @property
    def device(self) -> str:
        """Where the accelerator option leads: cuda or cpu."""
        return "cuda" if self.accelerator != "cpu" and torch.cuda.is_available() else "cpu"

    def budget(self, length: int) -> int:
        """Optimiser steps, for rows of `length` tokens; a budget in tokens is rounded up to whole steps."""
        if self.tokens is None:
            return self.steps
        return math.ceil(self.tokens / (self.batch_size * self.accumulate * length))


# What makes a run another run; the rest of `trainer` changes how it is run, watched or kept.
_SEMANTIC = ("batch_size", "accumulate", "precision", "validate_every", "monitor", "patience", "target")


@dataclass(frozen=True)
class Plan:
    """One run, checked. Nothing in it holds weights."""

    settings: Settings
    task: Task
    optimizer: optim.AdamW
    trainer: Trainer
    skeleton: LanguageModel  # on the meta device
    matched: matching.Matched | None = None
    # Names -> scalings of RoPE to test under; empty where nothing turns.
    rope_scaling: Mapping[str, Any] = field(default_factory=dict)
    search: tuning.Search = field(default_factory=tuning.Search)
    choice: tuning.Tuned | None = None
    is_trial: bool = False

    def trial(self, lr: float, seed: int) -> Plan:
        """The same run at another learning rate and seed, as a trial of tuning."""
        return replace(self._at(lr, seed), is_trial=True)

    def tuned(self, choice: tuning.Tuned) -> Plan:
        """The same run at the learning rate that was chosen."""
        return replace(self._at(choice.lr, self.settings.seed), choice=choice)

    def _at(self, lr: float, seed: int) -> Plan:
        # Who trains by these settings has nothing to choose.
        settings = replace(self.settings, seed=seed, optimizer=self.settings.optimizer | {"lr": lr}, tune={})
        return replace(self, settings=settings, optimizer=replace(self.optimizer, lr=lr))

    @property
    def folder(self) -> Path:
        """Of the run's record."""
        return Path(self.settings.runs) / self.key

    def model(self) -> LanguageModel:
        """The model with its initial weights, a function of the config and the seed."""
        # A hash, so that all digits of the seed count: torch looks at the low 32 bits alone.
        torch.manual_seed(int(hashlib.sha256(f"weights {self.settings.seed}".encode()).hexdigest()[:8], 16))
        return self._quietly_built(self.settings.model)

    def rescaled(self, trained: LanguageModel, scaling: Mapping[str, Any], length: int) -> LanguageModel:
        """A copy of the trained model, its RoPE scaled for rows of `length` tokens; see `experiments.extrapolation`."""
        whole = extrapolation.filled(scaling, length, self.task.length)
        options = extrapolation.scaled(self.settings.model, self.skeleton, whole)
        model = self._quietly_built(options).to(trained.embedding.weight)
        model.load_state_dict({name: _whole(weight) for name, weight in trained.state_dict().items()})
        return model

    def _quietly_built(self, options: Mapping[str, Any]) -> LanguageModel:
        # What the mixers have to say was said when the skeleton was built.
        logging.disable(logging.WARNING)
        try:
            return _model(options, self.task)
        finally:
            logging.disable(logging.NOTSET)

    @cached_property
    def steps(self) -> int:
        """Budget in optimiser steps."""
        return self.trainer.budget(self.task.length)

    @cached_property
    def layers(self) -> tuple[layout.Layer, ...]:
        return layout.layers(self.settings.model["layout"], self.settings.model.get("n_layers"))

    @cached_property
    def label(self) -> str:
        """The stack's name, or the layout where that is another one than the stack's."""
        return label(self.settings.stack, self.settings.model["layout"])

    @cached_property
    def config(self) -> dict[str, Any]:
        """The semantic config in plain containers: all that decides the result; defaults in, unused mixers out."""
        trainer = asdict(self.trainer)
        evaluate = {"evaluate": {"rope_scaling": self.rope_scaling}} if self.rope_scaling else {}
        return plain(evaluate | {
            "seed": self.settings.seed,
            "model": model_config(self.settings.model, self.skeleton),
            "task": defaults(type(self.task)) | self.settings.task,
            "optimizer": asdict(self.optimizer) | {"name": self.settings.optimizer["name"]},
            "trainer": {"steps": self.steps} | {name: trainer[name] for name in _SEMANTIC},
        })

    @cached_property
    def key(self) -> str:
        """The run's identity: two spellings of one run, such as 'mha + mha' and 2*mha, have one key."""
        model = self.config["model"] | {"layout": [str(layer) for layer in self.layers]}
        data = self.task.fingerprint()
        if not data:
            return key(self.config | {"model": model})
        task = {name: value for name, value in self.config["task"].items() if name not in self.task.located}
        return key(self.config | {"model": model, "task": task, "data": data})

    @cached_property
    def params(self) -> dict[str, Any]:
        """What runs are told apart and grouped by: the important ones under short names, then the flattened config."""
        short = {
            "stack": self.label, "layout": self.settings.model["layout"], "task": self.settings.task["name"],
            "seed": self.settings.seed, "d_model": self.config["model"]["d_model"], "n_layers": len(self.layers),
            "lr": self.optimizer.lr, "steps": self.steps, "batch_size": self.trainer.batch_size,
        }
        data = self.task.fingerprint()
        matched = self.matched.params if self.matched else {}
        return short | ({"data": data} if data else {}) | matched | flatten(self.config)


def plan(tree: Mapping[str, Any]) -> Plan:
    """Check a composed config, in plain containers, and build all of it that needs no memory.

    Raises:
        ValueError: anything wrong in it; names the option, what it got and what is allowed.
    """
    settings = call(Settings, resolved(tree), "config")
    task = _build("task", settings.task, tasks.get)
    budget = call(matching.Budget, settings.match, "match")
    with torch.device("meta"):
        model, matched = matching.solve(budget, settings.model, lambda options: _model(options, task), task.length)
        settings = replace(settings, model=model)
        skeleton = _model(settings.model, task)
    _check_sources(task, skeleton)
    _check_direction(task, skeleton, settings)
    table = skeleton.stack.position.table
    if table is not None and table.num_embeddings < task.longest:
        raise ValueError(
            f"model: max_length={table.num_embeddings} with position=learned must be at least {task.longest}, the "
            "longest row of the task and its suites"
        )
    optimizer = _build("optimizer", settings.optimizer, optim.get)
    trainer = call(Trainer, settings.trainer, "trainer")
    evaluation = call(extrapolation.Evaluation, settings.evaluate, "evaluate")
    # What the mixers have to say was said with the skeleton.
    with torch.device("meta"), matching.quiet():
        scalings = evaluation.fitting(settings.model, skeleton, lambda options: _model(options, task), task.length)
    search = call(tuning.Search, settings.tune, "tune")
    search.refuse(settings.seed)
    return Plan(settings, task, optimizer, trainer, skeleton, matched, scalings, search)


def _check_sources(task: Task, skeleton: LanguageModel) -> None:
    """A source is read by an encoder, and an encoder reads a source.

    Raises:
        ValueError: one is there without the other.
    """
    encodes = isinstance(skeleton, EncoderDecoder)
    if skeleton.stack.takes_memory and not encodes:
        stack = layout.describe(skeleton.stack.layers)
        raise ValueError(f"model: layout {stack!r} has a cross-attending layer: it needs model=encoder_decoder")
    if encodes and not task.sources:
        what = f"task={task.name} has none"
        raise ValueError(f"model: an encoder needs a source, and {what}: task=transduction task.apart=true has one")
    if task.sources and not encodes:
        raise ValueError(f"task: {task.name} has a source apart: it needs model=encoder_decoder, or task.apart=false")


def _check_direction(task: Task, skeleton: LanguageModel, settings: Settings) -> None:
    """A stack must see what the task's labels are made of, and not the labels.

    Raises:
        ValueError: it does not, or does.
    """
    name = label(settings.stack, settings.model["layout"])
    mixers = ", ".join(skeleton.used)
    if task.reads == "both" and skeleton.causal:
        raise ValueError(
            f"task: {task.name} with objective=mlm needs a stack that sees both sides of a hidden token, and {name} is "
            f"causal: allowed are stack=bert, model.mixers.NAME.causal=false where the mixer has it ({mixers}), or "
            "task.objective=next"
        )
    if task.reads == "past" and not skeleton.causal:
        raise ValueError(
            f"task: {task.name} with objective=next asks for the next token, and {name} would see it: allowed are "
            f"task.objective=mlm, or model.mixers.NAME.causal=true ({mixers})"
        )


def resolved(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A composed config in plain containers, its ${references} replaced by what they name.

    Raises:
        ValueError: a reference that leads nowhere.
    """
    try:
        return OmegaConf.to_container(OmegaConf.create(dict(tree)), resolve=True)
    except OmegaConfBaseException as error:
        raise ValueError(f"{error.full_key or 'config'}: {str(error).splitlines()[0]}") from None


def _build(what: str, options: Mapping[str, Any], get: Any) -> Any:
    """The object that a node `{name: ..., option: value}` describes."""
    if "name" not in options:
        raise ValueError(f"{what} needs the option 'name'")
    return call(get(options["name"]), {k: v for k, v in options.items() if k != "name"}, what)


def model_class(options: Mapping[str, Any]) -> type[LanguageModel]:
    """The model that such options are of."""
    return EncoderDecoder if "encoder" in options else LanguageModel


def _whole(weight: torch.Tensor) -> torch.Tensor:
    """A weight, of which each process may have a share alone."""
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight


def _model(options: Mapping[str, Any], task: Task) -> LanguageModel:
    return call(model_class(options), options, "model", vocabulary=task.vocabulary)


def model_config(options: Mapping[str, Any], model: LanguageModel) -> dict[str, Any]:
    """All options of a model that was built from some: defaults in, unused mixers out."""
    found = defaults(type(model)) | dict(options) | _depth_and_mixers(model.stack)
    if isinstance(model, EncoderDecoder):
        own = {"layout": layout.describe(model.encoder.layers)}
        found["encoder"] = own | _depth_and_mixers(model.encoder)
    return found


def _depth_and_mixers(stack: Stack) -> dict[str, Any]:
    return {"n_layers": len(stack.layers), "mixers": {name: _filled(name, used) for name, used in stack.used.items()}}


def _filled(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a mixer; an alias says which mixer it is."""
    mixer = options["mixer"]
    return registry.options(mixer) | {option: v for option, v in options.items() if option != "mixer" or mixer != name}


def plain(value: Any) -> Any:
    """`value` with lists for tuples: what YAML, JSON and a weights-only torch.load give back."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"model": {"d_model": 64}} -> {"model.d_model": 64}."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        path = f"{prefix}{name}"
        flat |= flatten(value, f"{path}.") if isinstance(value, Mapping) and value else {path: value}
    return flat


def key(config: Any) -> str:
    """16 hexadecimal digits that stand for a config. The order of keys does not count, nor 1 against 1.0."""
    return hashlib.sha256(json.dumps(canonical(config), sort_keys=True).encode()).hexdigest()[:16]


def canonical(value: Any) -> Any:
    """What counts of an option: 1 is 1.0, and a tuple a list."""
    if isinstance(value, Mapping):
        return {str(k): canonical(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [canonical(v) for v in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def choices(group: str) -> list[str]:
    """The names of the files in conf/GROUP; `folder/name` for those in a folder of it."""
    files, folders = [], []
    for entry in (CONF / group).iterdir():
        (folders if entry.is_dir() else files).append(entry.name)
    inner = [f"{folder}/{name}" for folder in folders for name in choices(f"{group}/{folder}")]
    return sorted([file.removesuffix(".yaml") for file in files if file.endswith(".yaml")] + inner)


def preset_layout(stack: str) -> str | None:
    """The layout that `stack=NAME` stands for; None for a preset from somebody else's config folder."""
    if stack in registry.names():
        return stack
    if stack in choices("stack"):
        return OmegaConf.create((CONF / "stack" / f"{stack}.yaml").read_text()).model.layout
    return None


def label(stack: Any, text: Any) -> Any:
    """What a run is called: its stack's name, or its layout where that is another one than the stack's."""
    try:
        return stack if layout.layers(text) == layout.layers(preset_layout(stack)) else text
    except ValueError:
        return text


def register() -> None:
    """Put the nodes that come from code into Hydra's store.

    Raises:
        ValueError: a registered mixer and a file in conf/stack have one name.
    """
    for name in sorted(set(registry.names()) & set(choices("stack"))):
        # The stack of that name stays what it is, whatever is installed.
        if not registry.withdraw(name, f"conf/stack/{name}.yaml has its name; rename it"):
            raise ValueError(f"conf/stack/{name}.yaml has the name of the registered mixer {name!r}; rename one")
    store = ConfigStore.instance()
    for name in registry.names():
        store.store(group="stack", name=name, node={"stack": name, "model": {"layout": name}}, package="_global_")
    options = {name: plain(registry.options(name)) for name in registry.names()}
    store.store(group="mixers", name="registered", node=options, package="model.mixers")
