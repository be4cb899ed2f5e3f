"""Every file of conf is composed and instantiated; its options are those of the signature that it configures."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from arch.encoder_decoder import EncoderDecoder
from arch.language_model import LanguageModel
from experiments import bench_cell, cli, config, launchers, optim, slurm, tasks, tuning
from mixers.options import defaults

FOLDER = Path(__file__).resolve().parents[2] / "conf"


def node(file):
    return OmegaConf.to_container(OmegaConf.load(FOLDER / file))


def files(group):
    return [f"{group}/{path.relative_to(FOLDER / group)}" for path in sorted((FOLDER / group).rglob("*.yaml"))]


def test_the_model_node_is_the_signature():
    # The task says the vocabulary, the registry the mixers; the layout has no default.
    signature = {name: value for name, value in defaults(LanguageModel).items() if name != "mixers"}
    assert node("model/language_model.yaml") == {"layout": "???"} | signature
    assert set(inspect.signature(LanguageModel).parameters) == {"layout", "vocabulary", "mixers", *signature}


def test_the_node_of_an_encoder_decoder_adds_its_own_options():
    found = node("model/encoder_decoder.yaml")
    assert found.pop("defaults") == ["language_model", "_self_"] and found.pop("mixers")["cross"]["cross"] is True
    assert found.pop("encoder") == {"layout": "mha", "n_layers": None, "mixers": {}}
    inherited = {"layout": None, "vocabulary": None, "mixers": None, **defaults(LanguageModel)}
    assert set(inspect.signature(EncoderDecoder).parameters) == {"encoder", *found, *inherited}
    assert defaults(EncoderDecoder) == found | defaults(LanguageModel)


@pytest.mark.parametrize("file", files("task"))
def test_a_task_node_is_the_signature(file):
    found = node(file)
    name = file.removeprefix("task/").removesuffix(".yaml")
    assert found == {"name": name} | config.plain(defaults(tasks.get(name)))


@pytest.mark.parametrize("file", files("optimizer"))
def test_an_optimizer_node_is_the_signature(file):
    found = node(file)
    assert found == {"name": Path(file).stem} | config.plain(defaults(optim.get(found["name"])))


@pytest.mark.parametrize("file", files("tune"))
def test_a_tune_node_is_the_signature(file):
    assert set(node(file)) == set(defaults(tuning.Search))
    assert config.call(tuning.Search, node(file), "tune").runs == {"none": 0, "lr": 8, "optuna_lr": 16}[Path(file).stem]


def test_the_trainer_node_is_the_signature():
    assert node("trainer/default.yaml") == defaults(config.Trainer)


@pytest.mark.parametrize(("program", "settings"), [("train", config.Settings), ("bench", bench_cell.Settings)])
def test_the_top_level_is_the_signature(program, settings):
    assert set(cli.composed(program, [])) == set(inspect.signature(settings).parameters)


def test_the_default_benchmark_is_the_one_of_the_help_page():
    cell = bench_cell.plan(cli.composed("bench", []))
    assert (cell.label, cell.settings.length, cell.config["model"]["d_model"]) == ("mha", 2048, 256)


def test_every_task_and_optimizer_has_a_file():
    assert set(config.choices("task")) == set(tasks.names())
    assert set(config.choices("optimizer")) == set(optim.OPTIMIZERS)


@pytest.mark.parametrize("group", ["ddp", "fsdp"])
def test_further_trainers_change_defaults_of_the_first(group):
    found = node(f"trainer/{group}.yaml")
    assert found.pop("defaults") == ["default"] and set(found) <= set(defaults(config.Trainer))
    assert cli.composed("train", [f"trainer={group}"])["trainer"] == defaults(config.Trainer) | found


@pytest.mark.parametrize(("name", "launcher"), [("joblib", launchers.Joblib), ("submitit_slurm", slurm.Slurm)])
def test_a_launcher_node_is_the_signature(name, launcher):
    found = node(f"hydra/launcher/{name}.yaml")
    assert found.pop("_target_") == f"hydra_plugins.mixerlab.{launcher.__name__}"
    named = set(inspect.signature(launcher).parameters) - {"options"}
    assert named <= set(found) and (named == set(found) or name == "submitit_slurm")


def test_the_options_of_the_slurm_launcher_are_submitits():
    sbatch = pytest.importorskip("submitit.slurm.slurm")._make_sbatch_string
    given = set(node("hydra/launcher/submitit_slurm.yaml")) - {"_target_", "folder", "max_num_timeout"}
    assert given <= set(inspect.signature(sbatch).parameters)


GROUPS = ("model", "task", "optimizer", "trainer", "hydra/launcher")


@pytest.mark.parametrize("file", [file for group in GROUPS for file in files(group)])
def test_every_option_says_in_a_line_what_it_is(file):
    for line in (FOLDER / file).read_text().splitlines():
        if line and not line.startswith(("#", "name:")):
            assert re.fullmatch(r"\w+: \S.* +# \S.*", line), line


@pytest.mark.parametrize("stack", config.choices("stack"))
def test_every_preset_builds(stack):
    plan = config.plan(cli.composed("train", [f"stack={stack}"]))
    assert plan.label == stack


def sweep(experiment):
    """The overrides of every cell of an experiment's grid."""
    params = yaml.safe_load((FOLDER / f"experiment/{experiment}.yaml").read_text())["hydra"]["sweeper"]["params"]
    cells = [[]]
    for option, values in params.items():
        cells = [[*cell, f"{option}={value.strip()}"] for cell in cells for value in str(values).split(",")]
    return cells


@pytest.mark.parametrize("experiment", config.choices("experiment"))
def test_every_cell_of_an_experiment_is_a_run_of_its_own(experiment):
    plans = [config.plan(cli.composed("train", [f"+experiment={experiment}", *cell])) for cell in sweep(experiment)]
    assert len({plan.key for plan in plans}) == len(plans)
    assert {plan.settings.sweep for plan in plans} == {experiment}


def test_the_stacks_of_hybrid_ratio_have_the_same_parameters():
    for task in ("mqar", "text"):
        cells = [cell for cell in sweep("hybrid_ratio") if f"+hybrid_ratio={task}" in cell and "seed=0" in cell]
        plans = [config.plan(cli.composed("train", ["+experiment=hybrid_ratio", *cell])) for cell in cells]
        sizes = {sum(parameter.numel() for parameter in plan.skeleton.parameters()) for plan in plans}
        assert len(plans) == 5 and len(sizes) == 1


def test_the_quickstart_is_the_grid_of_six_stacks_and_three_seeds():
    labels = {"mha", "based", "linear", "window", "mha + linear", "mha + window"}
    cells = [dict(override.split("=") for override in cell) for cell in sweep("quickstart")]
    assert {(cell["model.layout"], cell["seed"]) for cell in cells} == {(s, n) for s in labels for n in "012"}
    plan = config.plan(cli.composed("train", ["+experiment=quickstart", "model.layout=mha + window"]))
    model = plan.config["model"]
    sizes = {"d_model": 64, "n_layers": 2, "mlp": "none", "convolution": 4, "tied": False, "position": "none"}
    assert sizes.items() <= model.items()
    assert model["mixers"]["window"]["window"] == 16
    assert {options["position"] for options in model["mixers"].values()} == {"none"}
    task = plan.task
    assert (task.vocabulary, task.length, task.kv, task.test_kv) == (256, 64, (4, 8, 16), (4, 8, 16, 32))
