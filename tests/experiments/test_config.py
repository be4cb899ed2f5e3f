from __future__ import annotations

import pytest
import torch
from omegaconf import OmegaConf

from arch.language_model import LanguageModel
from experiments import cli, config
from kernels.backend import BACKENDS
from mixers import registry
from mixers.options import call


@pytest.mark.parametrize("name", registry.names())
def test_every_registered_mixer_is_a_stack(plan_of, name):
    plan = plan_of(f"stack={name}")
    assert (plan.label, plan.settings.model["layout"]) == (name, name)
    assert set(plan.skeleton.used) == {name}


def test_the_base_node_holds_every_mixers_options_and_defaults():
    node = cli.composed("train", ["stack=linear"])["model"]["mixers"]
    assert set(node) == set(registry.names())
    for name, options in node.items():
        assert options == config.plain(registry.options(name))


def test_mixer_options_hold_under_any_stack_and_win_over_the_preset(plan_of):
    plan = plan_of("stack=gemma3", "model.d_model=16", "model.mixers.window.window=5", "model.mixers.gqa.n_heads=4")
    assert plan.skeleton.used["window"]["window"] == 5
    assert plan.skeleton.used["gqa"]["n_heads"] == 4
    # Untouched options are the preset's.
    assert plan.skeleton.used["gqa"]["rope_base"] == 1e6


def test_an_alias_may_be_added_on_the_command_line(plan_of):
    plan = plan_of("+model.mixers.local.mixer=window", "+model.mixers.local.window=3", "model.layout=local + mha")
    assert plan.config["model"]["mixers"]["local"]["window"] == 3
    assert plan.config["model"]["mixers"]["local"]["mixer"] == "window"


def test_a_preset_named_like_a_mixer_is_an_error(monkeypatch):
    monkeypatch.setattr(registry, "names", lambda: ["mha", "gemma3"])
    with pytest.raises(ValueError, match=r"conf/stack/gemma3.yaml has the name of the registered mixer"):
        config.register()


@pytest.mark.parametrize(
    ("overrides", "label"),
    [
        (["stack=gemma3"], "gemma3"),
        (["stack=gemma3", "model.n_layers=7"], "gemma3"),
        (["stack=gemma3", "model.layout=5*window+gqa"], "gemma3"),
        (["stack=gemma3", "model.layout=4*window + gqa"], "4*window + gqa"),
        (["model.layout=mha + linear"], "mha + linear"),
        (["model.layout=mha"], "mha"),
        (["stack=linear", "model.layout=mha"], "mha"),
    ],
)
def test_label_is_the_stack_unless_the_layout_is_another(plan_of, overrides, label):
    plan = plan_of(*overrides)
    assert plan.label == plan.params["stack"] == label


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+modle=1", "config has no option 'modle' .did you mean 'model'"),
        ("+model.n_layer=2", "model has no option 'n_layer' .did you mean 'n_layers'"),
        ("+model.mixers.mha.n_head=2", "mixer 'mha' has no option 'n_head' .did you mean 'n_heads'"),
        ("+model.vocabulary=9", "model has no option 'vocabulary'"),
        ("+task.lenght=9", "task has no option 'lenght' .did you mean 'length'"),
        ("+optimizer.lrr=9", "optimizer has no option 'lrr' .did you mean 'lr'"),
        ("+trainer.step=9", "trainer has no option 'step' .did you mean 'steps'"),
        ("seed=a", "seed='a' must be a whole number"),
        ("seed=1.5", "seed=1.5 must be a whole number"),
        ("mlflow=1", "mlflow=1 must be true or false"),
        ("sweep=[1]", r"sweep=\[1\] must be a text or null"),
        ("model.d_model=wide", "d_model='wide' must be a whole number"),
        ("model.d_model=8.5", "d_model=8.5 must be a whole number"),
        ("model.bias=1", "bias=1 must be true or false"),
        ("model.mlp=swiglo", "mlp='swiglo' is not allowed .did you mean 'swiglu'.*allowed: swiglu, "),
        ("model.mixers.mha.n_heads=3", "n_heads=3.*d_model=8"),
        ("model.mixers.mha=3", "model.mixers.mha=3 must be a mapping"),
        ("model.layout=mha + + linear", r"layout: expected a mixer, found '\+'"),
        ("model.layout=mhaa", "unknown mixer 'mhaa' .did you mean 'mha'"),
        ("model.d_model=${nowhere}", "model.d_model: .*nowhere.* not found"),
        ("task.length=7", "length=7 must be at least"),
        ("task.name=mqra", "task='mqra' is not a task .did you mean 'mqar'"),
        ("~task.name", "task needs the option 'name'"),
        ("~seed", "config needs the option 'seed'"),
        ("optimizer.name=adam", "optimizer='adam' is not an optimiser .did you mean 'adamw'"),
        ("optimizer.lr=-1", "lr=-1.0 must be above 0"),
        ("trainer.steps=0", "trainer: steps=0 must be a whole number of at least 1"),
        ("trainer.steps=null", "steps=None and tokens=None: set exactly one"),
        ("trainer.tokens=100", "steps=4 and tokens=100: set exactly one.*trainer.steps=null"),
        ("trainer.batch_size=0", "batch_size=0 must be a whole number of at least 1"),
        ("trainer.precision=16", "precision=16 is not allowed.*allowed: 32, 64, bf16-mixed, 16-mixed"),
        ("trainer.monitor=train/loss", "monitor='train/loss' must be a metric of validation"),
        ("trainer.monitor=val/acuracy", "'val/acuracy' is unknown .did you mean 'val/accuracy'"),
        ("trainer.backend=tritn", "backend='tritn' is not allowed .did you mean 'triton'.*allowed: auto, triton"),
    ],
)
def test_a_wrong_option_is_named_with_what_is_allowed(plan_of, override, message):
    with pytest.raises(ValueError, match=message):
        plan_of(override)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.accelerator=gpu", "accelerator='gpu', but torch sees no GPU"),
        ("trainer.precision=16-mixed", "precision='16-mixed' needs a GPU"),
    ],
)
def test_what_needs_a_gpu_is_an_error_without_one(plan_of, monkeypatch, override, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=message):
        plan_of(override)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_is_an_option(backend):
    assert call(config.Trainer, {"backend": backend}, "trainer").backend == backend


@pytest.mark.parametrize(("tokens", "steps"), [(1, 1), (128, 1), (129, 2), (1280, 10)])
def test_a_budget_in_tokens_is_rounded_up_to_whole_steps(plan_of, tokens, steps):
    # A step is 2 batches of 4 rows of 16 tokens.
    plan = plan_of("trainer.steps=null", f"trainer.tokens={tokens}", "trainer.accumulate=2")
    assert plan.steps == plan.config["trainer"]["steps"] == steps


SAME = {
    "spelling of the layout": ("model.layout=mha + mha + linear + linear", "model.layout=2*mha + 2*linear"),
    "depth said or not": ("model.layout=mha + linear", "model.n_layers=2", "model.layout=mha + linear"),
    "stack or layout": ("stack=linear", "model.layout=linear"),
    "tokens or steps": ("trainer.steps=null", "trainer.tokens=200", "trainer.steps=4"),
    "unused mixers": ("model.mixers.window.window=3", "seed=0"),
    "0 or 0.0": ("model.dropout=0", "model.dropout=0.0"),
    "where it runs": ("trainer.threads=3", "trainer.log_every=9", "trainer.checkpoint_every=1", "trainer.compile=true",
                      "trainer.backend=reference", "runs=elsewhere", "mlflow=false", "sweep=mine"),
}


@pytest.mark.parametrize("what", SAME)
def test_same_runs_have_one_key(plan_of, what):
    *first, last = SAME[what]
    if what == "where it runs":
        first, last = SAME[what], "seed=0"
    assert plan_of(*first).key == plan_of(last).key


@pytest.mark.parametrize(
    "override",
    ["seed=1", "model.layout=linear + mha", "model.d_model=16", "model.tied=false", "model.mixers.mha.position=none",
     "task.length=20", "task.alpha=0.5", "optimizer.lr=2e-3", "optimizer.schedule=wsd", "trainer.steps=5",
     "trainer.batch_size=8", "trainer.precision=64", "trainer.patience=3"],
)
def test_what_decides_the_result_changes_the_key(plan_of, override):
    assert plan_of("model.layout=mha + linear", override).key != plan_of("model.layout=mha + linear").key


def test_the_data_counts_and_not_where_it_lies(plan_of, monkeypatch):
    def lying(path, fingerprint):
        plan = plan_of()
        monkeypatch.setattr(plan.task, "fingerprint", lambda: fingerprint)
        plan.config["task"]["path"] = path
        return plan.key

    assert lying("here", "abc") == lying("there", "abc") != lying("here", "abd")
    assert lying("here", "") != lying("there", "")


def test_the_recorded_config_builds_the_same_run_again(plan_of):
    plan = plan_of("stack=gemma3", "model.d_model=16", "model.n_layers=7", "optimizer.betas=[0.8,0.9]")
    recorded = OmegaConf.to_container(OmegaConf.create(OmegaConf.to_yaml(OmegaConf.create(plan.config))))
    assert recorded == plan.config
    rest = {"stack": "gemma3", "sweep": None, "runs": "runs", "mlflow": False}
    assert config.plan(recorded | rest).key == plan.key


def test_initial_weights_follow_from_all_digits_of_the_seed(plan_of):
    # torch would take these two seeds for the same.
    one, other = (plan_of(f"seed={seed}").model().embedding.weight for seed in (1, 1 + 2**32))
    assert not torch.equal(one, other)
    assert torch.equal(plan_of("seed=1").model().embedding.weight, one)


def test_a_plan_holds_no_weights(plan_of):
    assert {p.device.type for p in plan_of().skeleton.parameters()} == {"meta"}
    assert isinstance(plan_of().skeleton, LanguageModel)


def test_params_have_the_short_names_and_the_flat_config(plan_of):
    params = plan_of("seed=3", "optimizer.lr=0.5").params
    assert {"stack": "mha", "layout": "mha", "task": "mqar", "seed": 3, "d_model": 8, "n_layers": 2, "lr": 0.5,
            "model.mixers.mha.n_heads": None, "task.kv": [2], "trainer.steps": 4}.items() <= params.items()


def test_a_learned_position_table_must_reach_to_the_longest_row(plan_of):
    # Rows of 16 in training, of 16 with 4 pairs at the most in the suites; then 6 pairs make rows of 24.
    learned = ("model.position=learned", "task.test_kv=[2,6]")
    assert plan_of(*learned, "model.max_length=24").task.longest == 24
    with pytest.raises(ValueError, match="max_length=23 with position=learned must be at least 24"):
        plan_of(*learned, "model.max_length=23")


def test_longest_is_the_longest_row_of_all_suites(plan_of):
    task = plan_of("task.test_kv=[2,6]").task
    suites = [suite for split in ("validation", "test") for suite in task.suites(split).values()]
    assert max(len(item["tokens"]) for suite in suites for item in suite) == task.longest
