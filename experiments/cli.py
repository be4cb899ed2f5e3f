"""The command line around Hydra: layouts quoted, mistakes explained in one message, a help page for a newcomer."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hydra import compose, initialize_config_module
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments import config, launchers, tasks
from mixers import registry
from mixers.options import nearest

# Values that Hydra reads as they are: in quotes, a list, or one of its functions.
_READABLE = re.compile(r"\s*([\"'\[]|(choice|shuffle|sort)\()")
_LAYOUT = re.compile(r"(?P<key>\+{0,2}model\.layout)=(?P<value>.*)", re.DOTALL)


class UsageError(ValueError):
    """A wrong command line; the message is for the user."""


def help_or_options(program: str, page: str) -> None:
    """Of a program whose options are words NAME=VALUE: print its help where asked to; leave the words in sys.argv."""
    parser = argparse.ArgumentParser(
        f"python -m {program}", description=page, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("options", nargs="*", metavar="NAME=VALUE")
    sys.argv[1:] = parser.parse_args().options


def pairs(words: Sequence[str], allowed: Sequence[str]) -> list[tuple[str, str]]:
    """(name, value) of words NAME=VALUE about a run.

    Raises:
        UsageError: an unknown name; no run.
    """
    found = [(name, value) for name, _, value in (word.partition("=") for word in words)]
    for name, _ in found:
        if name not in allowed:
            raise UsageError(f"{name} is no option{nearest(name, allowed)}; allowed: {', '.join(allowed)}")
    if not dict(found).get("run"):
        raise UsageError("run=... is missing; see --help")
    return found


def run(main: Callable[[], None], name: str) -> int:
    """Call a `hydra.main` function; a mistake of the user becomes one message on stderr.

    Args:
        name: the config's name, `train`.
    Returns:
        0, or 2 after a mistake.
    """
    # Hydra raises instead of printing, so that there is one place to explain.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        sys.argv[1:] = prepare(sys.argv[1:], name)
        register(name)
        main()
    except UsageError as error:
        return fail(str(error))
    except (HydraException, OmegaConfBaseException) as error:
        return fail(explain(error, sys.argv[1:], name))
    except BrokenPipeError:
        # The reader has seen enough (`--help | head`). What is still buffered has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        # What is missing among our own files is no matter of where runs are.
        hint = "" if str(error.filename).startswith(str(config.CONF)) else "; runs=FOLDER chooses another folder"
        return fail(f"{error.filename}: {error.strerror}{hint}")
    except ValueError as error:
        return fail(str(error))
    return 0


def fail(message: str) -> int:
    """Tell a user of a mistake; the exit code for it."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    return 2


def prepare(arguments: Sequence[str], name: str) -> list[str]:
    """The arguments as Hydra wants them: flags first, layouts in quotes.

    Raises:
        UsageError: words that belong to no option; after a layout, the command with its quotes.
    """
    flags = [argument for argument in arguments if argument in ("-m", "--multirun")]
    rest = [argument for argument in arguments if argument not in flags]
    _refuse_loose_words(rest, name)
    return [*flags, *(_quote_layout(argument) for argument in rest)]


def _refuse_loose_words(arguments: list[str], name: str) -> None:
    overrides = get_args_parser().parse_known_args(arguments)[0].overrides
    for place, word in enumerate(overrides):
        if "=" in word or word.startswith("~"):
            continue
        before = overrides[place - 1] if place else ""
        if not _LAYOUT.match(before):
            raise UsageError(f"{word!r} is no option: options are written NAME=VALUE, without spaces; see --help")
        loose = [before]
        for after in overrides[place:]:
            if "=" in after:
                break
            loose.append(after)
        whole = shlex.quote(" ".join(loose))
        raise UsageError(f"a layout with spaces or parentheses needs quotes: python -m experiments.{name} ... {whole}")


def _quote_layout(argument: str) -> str:
    """Hydra's own quotes around layouts that it cannot read without: those with parentheses."""
    match = _LAYOUT.fullmatch(argument)
    if not match or not re.search(r"[()]", match["value"]) or _READABLE.match(match["value"]):
        return argument
    # A layout has no commas: they separate the values of a sweep.
    return f"{match['key']}=" + ",".join(f"'{part.strip()}'" for part in match["value"].split(","))


def explain(error: Exception, arguments: Sequence[str], name: str) -> str:
    """Hydra's message in our words: the option, what it got, what is allowed, the closest."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and "/" in error.missing_cfg_file:
        group, _, choice = error.missing_cfg_file.rpartition("/")
        options = sorted(error.options or [])
        if group.startswith("task"):
            # Hydra does not list what is in folders.
            group, choice, options = "task", error.missing_cfg_file.removeprefix("task/"), config.choices("task")
        plus = "+" if group == "experiment" else ""
        return f"{plus}{group}={choice!r} does not exist{nearest(choice, options)}; allowed: {', '.join(options)}"
    text = f"{error}\n{error.__cause__ or ''}"
    if isinstance(error, OverrideParseException):
        reason = error.message.splitlines()[0]
        return f"{error.override!r} cannot be read: {reason}; quote values with special signs: NAME='\"...\"'"
    if match := re.search(r"Could not override '([^']+)'\. No match in the defaults list", text):
        choice = f"{match[1]}={_value(match[1], arguments)}"
        return f"{choice} is written with a plus: +{choice}"
    if match := re.search(r"Could not (?:override|delete from config\.) '([^']+)'", text):
        base = _launcher(arguments, name) if match[1].startswith("hydra.") else _base(arguments, name)
        return unknown(match[1], base)
    if match := re.search(r"Could not append to config\. An item is already at '([^']+)'", text):
        return f"{match[1]} exists: write {match[1]}=VALUE, without the plus"
    if match := re.search(r"(?:Ambiguous value for argument|Sweep parameters) '([^']+)'", text):
        return f"{match[1]} has several values, which needs -m: python -m experiments.{name} -m {shlex.quote(match[1])}"
    return " ".join(line.strip() for line in text.strip().splitlines() if line.strip())


def unknown(key: str, tree: Mapping[str, Any]) -> str:
    """The message for an option that is not in the config."""
    node: Any = tree
    parts = key.split(".")
    for depth, part in enumerate(parts):
        if not isinstance(node, Mapping):
            return f"{key} is no option: {'.'.join(parts[:depth])} is a single value"
        if part not in node:
            break
        node = node[part]
    prefix = "".join(f"{parent}." for parent in parts[:depth])
    if parts[:2] == ["model", "mixers"] and parts[3:] == ["causal"] and depth == 3:
        return f"{prefix[:-1]} {registry.ONE_WAY}"
    # The right name in the wrong place, as lr for optimizer.lr, is nearer than another name in this place.
    same = [path for path in config.flatten(tree) if path.rpartition(".")[2] == parts[-1]]
    allowed = [f"{prefix}{name}" for name in node]
    close = f" (did you mean {' or '.join(map(repr, same[:3]))}?)" if same else nearest(prefix + part, allowed)
    return f"{key} is no option{close}; allowed: {', '.join(allowed)}"


def _value(key: str, arguments: Sequence[str]) -> str:
    return next((a.partition("=")[2] for a in arguments if a.startswith(f"{key}=")), "NAME")


def _base(arguments: Sequence[str], name: str) -> Mapping[str, Any]:
    """The config that a mistaken option was meant for: the chosen groups alone."""
    groups = [a for a in arguments if re.match(r"\+?(stack|task|optimizer|trainer|tune|experiment)=[\w/]+$", a)]
    try:
        return composed(name, groups)
    except HydraException:
        return composed(name, [])


def _launcher(arguments: Sequence[str], name: str) -> Mapping[str, Any]:
    """The options of Hydra itself under the chosen launcher."""
    groups = [a for a in arguments if a.startswith("hydra/launcher=")]
    with initialize_config_module("conf", version_base="1.3"):
        tree = compose(_config(name), overrides=groups, return_hydra_config=True)
    return {"hydra": OmegaConf.to_container(tree.hydra)}


def composed(name: str, overrides: Sequence[str]) -> dict[str, Any]:
    """The config of a command line, in plain containers, without running anything."""
    register(name)
    with initialize_config_module("conf", version_base="1.3"):
        tree = OmegaConf.to_container(compose(_config(name), overrides=list(overrides)))
    if "match" in tree:
        # Only a Hydra job can say by itself what was asked for.
        tree["match"]["command"] = list(overrides)
    return tree


def _config(name: str) -> str:
    """The config of `python -m experiments.NAME`: show looks at what train would train."""
    return "train" if name == "show" else name


_TRAIN = """\
Train a stack of sequence mixers on a task, or a grid of stacks, and log quality and complexity side by side.

    python -m experiments.train stack=gqa task=mqar seed=0
        one run: the mixer gqa in every layer
    python -m experiments.train -m stack=mha,linear,gemma3 seed=0,1
        a grid (-m): every combination of the values with commas, six runs here
    python -m experiments.train -m 'model.layout=mha,linear,mha + linear' seed=0,1
        stacks of your own; a layout with spaces stands in quotes
    python -m experiments.train -m +experiment=quickstart
        a grid kept in a file of conf/experiment
    python -m experiments.train -m +experiment=quickstart hydra/launcher=joblib
        several runs at a time; submitit_slurm: on a cluster, see docs/cluster.md
    python -m experiments.train -m stack=mha,gqa match.metric=parameters match.target=1.0e6 match.knob=model.mlp_width
        equal budgets: the knob is set so that every run has the target within 1% (stack:gqa: what gqa has)
    python -m experiments.train -m stack=mha,linear seed=0,1,2 tune=lr 'tune.values=[1e-3,3e-3,1e-2]'
        each stack at the best of these learning rates, by validation and seeds of its own
    python -m experiments.train stack=gqa trainer.steps=1000 --cfg job
        print the composed config, run nothing
    python -m experiments.show stack=gemma3 model.d_model=512
        print the layers with their parameters, FLOPs and state bytes, run nothing; explain=true: with the formulas

Options are written NAME=VALUE. A run is kept in runs/KEY, whose KEY stands for its options: a finished run is not run
again. Wrong options end with exit code 2; a run, or one run of a grid, that fails or diverges, with 1.

"""
_BENCH = """\
Measure what stacks of sequence mixers take on this machine, at one length or several: a training step, the reading of a
prompt, a decoded token behind it, memory; beside them what was counted, and how each grows with the length.

    python -m experiments.bench -m stack=mha,window,linear length=512,2048,8192
        nine cells: a table, and a page with the growth of time and memory, measured and counted
    python -m experiments.bench stack=gemma3 length=4096 model.d_model=512 batch_size=4
        one cell
    python -m experiments.bench -m 'model.layout=mha,linear + mha' length=1024,4096 precision=bf16-mixed
        stacks of your own; a layout with spaces stands in quotes

A training step is forward, loss and backward, without the optimiser. Each cell has a fresh process for its memory;
first calls are left out; the stacks of one length take turns, and medians count. A time that would need more FLOPs a
second than this machine has is refused. Where others use the machine, the table says so; growth on a CPU is fitted to
CPU time.

Options are written NAME=VALUE. Records are in runs/bench/TIME and in MLflow. Wrong options end with exit code 2; a cell
that fails, for want of memory too, with 1: the others are still measured.

"""
_REST = """\
GROUPS
{groups}

OPTIONS, with their defaults
{options}

OPTIONS OF THE MIXERS, as model.mixers.NAME.OPTION=VALUE; they hold for any stack that uses the mixer;
MIXERLAB_PLUGINS=FILE.py adds mixers of your own
{mixers}
"""
# What a program's page starts with, its groups besides stack, and the files that its options are in.
_PAGES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "train": (
        _TRAIN,
        ("model", "task", "optimizer", "trainer", "tune", "experiment", "hydra/launcher"),
        ("model/language_model", "model/encoder_decoder", *(f"task/{task}" for task in tasks.names()),
         "optimizer/adamw", "trainer/default", "match/default", "evaluate/default", "tune/lr", "tune/optuna_lr"),
    ),
    "bench": (_BENCH, (), ("model/language_model",)),
}


def register(name: str) -> None:
    """Put into Hydra's store what comes from code: the stacks and mixers, and our page for `--help`."""
    config.register()
    launchers.register()
    name = _config(name)
    # Made of the configs and the registry, so it cannot be out of date. Hydra fills in $names.
    node = {"app_name": name, "header": "", "footer": "", "template": help_page(name).replace("$", "$$")}
    ConfigStore.instance().store(group="hydra/help", name=name, node=node)


def help_page(name: str) -> str:
    """The page of `--help`."""
    start, more, files = _PAGES[name]
    groups = [
        ("stack=", "a mixer in every layer: " + " ".join(registry.names())),
        ("", "or a published stack, without its size: " + " ".join(config.choices("stack"))),
        *((f"{'+' if group == 'experiment' else ''}{group}=", " ".join(config.choices(group))) for group in more),
    ]
    own = OmegaConf.to_container(OmegaConf.load(config.CONF / f"{name}.yaml"))
    options = _options("", name, {})
    for file in files:
        group, _, choice = file.partition("/")
        # The other groups have one choice each.
        said = group in ("task", "tune") or choice == "encoder_decoder"
        options += ["", *([f"  with {group}={choice}"] if said else [])]
        options += _options(f"{group}.", file, own.get(group, {}))
    mixers = [(mixer, _spell_all(registry.options(mixer))) for mixer in registry.names()]
    return start + _REST.format(groups=_columns(groups), options="\n".join(options), mixers=_columns(mixers))


def _options(prefix: str, file: str, instead: Mapping[str, Any]) -> list[str]:
    """A line for every `option: default  # what it is` of a config file; `instead`: other defaults."""
    text = (config.CONF / f"{file}.yaml").read_text()
    found = re.findall(r"^(?!defaults)(\w+): (.+?) +# (.+)$", text, re.MULTILINE)
    return [
        f"  {f'{prefix}{option}={instead.get(option, default.strip())}':36} {meaning}"
        for option, default, meaning in found
    ]


def _columns(rows: Sequence[tuple[str, str]]) -> str:
    indents = {"initial_indent": 16 * " ", "subsequent_indent": 16 * " "}
    columns = [f"  {left:14}{textwrap.fill(right, 118, **indents).lstrip()}" for left, right in rows]
    return "\n".join(columns)


def _spell_all(options: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={_spell(value)}" for name, value in options.items())


def _spell(value: Any) -> str:
    """A value as it is written on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(list(value) if isinstance(value, tuple) else value)
