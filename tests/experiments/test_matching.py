"""Equal budgets from the command line: grids, stacks as targets, the run's key, mistakes."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest

from arch import cost
from experiments import cli, config

STACKS = ("mha", "gqa", "linear", "based", "window", "mha + linear")
BASE = ("model.d_model=128", "model.n_layers=2")
PARAMETERS = ("match.metric=parameters", "match.target=1.0e6", "match.knob=model.mlp_width")
# What holds the state of each: the first of these that a stack has is its knob.
STATES = ("model.mixers.window.window", "model.mixers.based.feature_dim", "model.mixers.gqa.head_dim",
          "model.mixers.mha.head_dim", "model.d_model")


@cache
def plan(*overrides, layout="mha"):
    return config.plan(cli.composed("train", [*BASE, f"model.layout={layout}", *overrides]))


def counted(plan, name, length):
    return cost.measure(plan.skeleton, length).figure(name)


def options(metric, target, knob):
    return f"match.metric={metric}", f"match.target={target}", f"match.knob={knob}"


GRIDS = {
    "parameters": PARAMETERS,
    "flops_per_token_train": options("flops_per_token_train", "6.0e6", "model.mlp_width"),
    "state_bytes_at_2048": (
        *options("state_bytes_at_2048", "stack:mha", f"[{','.join(STATES)}]"), "model.mixers.linear.n_heads=1"),
}


@pytest.mark.parametrize("metric", GRIDS)
def test_a_grid_of_six_stacks_is_matched(metric):
    """Within 1% of one target, counted anew from the solved model."""
    plans = [plan(*GRIDS[metric], layout=layout) for layout in STACKS]
    target, = {plan.matched.target for plan in plans}
    length = int(metric.rpartition("_")[2]) if "_at_" in metric else plans[0].task.length
    for found in plans:
        achieved = counted(found, metric, length)
        assert achieved == found.matched.achieved and abs(achieved / target - 1) <= 0.01


@pytest.mark.parametrize(
    ("name", "knob"),
    [
        ("activation_bytes_at_200", "model.mlp_width"),
        ("decode_flops_per_token_at_300", "model.mlp_width"),
        ("bf16_state_bytes_at_100", "model.mixers.mha.head_dim"),
    ],
)
def test_figures_counted_while_solving_are_those_counted_alone(name, knob):
    """Models are built on meta by default then."""
    found = plan(*options(name, "3.0e6", knob))
    assert found.matched.achieved == counted(found, name, int(name.rpartition("_")[2]))


def test_the_documented_tables_are_what_is_solved():
    text = (Path(__file__).resolve().parents[2] / "docs" / "matching.md").read_text()
    for metric, grid in GRIDS.items():
        rows = re.findall(rf"^\| (.+?) \| `{metric}` \| `(\S+)=(\d+)` \| ([\d,]+) \|", text, re.MULTILINE)
        assert [row[0] for row in rows] == list(STACKS), metric
        for layout, knob, value, achieved in rows:
            found = plan(*grid, layout=layout).matched
            assert (found.knob, found.value) == (knob, int(value))
            assert round(found.achieved) == int(achieved.replace(",", ""))


def test_the_target_of_a_stack_is_its_count_under_the_same_options():
    """Whatever the stack of the cell: gemma2's own norms, MLPs and mixers' options do not leak into it."""
    others = "model.sandwich=false", "model.bias=true", "model.mixers.gqa.qk_norm=true"
    expected = counted(plan(*others, layout="gqa"), "parameters", 64)
    matched = options("parameters", "stack:gqa", "model.mlp_width")
    for stack in ("gemma2", "qwen3", "window"):
        found = config.plan(cli.composed("train", [*BASE, *others, f"stack={stack}", *matched]))
        assert found.matched.target == expected and found.label == stack
    preset = config.plan(cli.composed("train", [*BASE, "stack=gemma2"]))
    matched = plan(*options("parameters", "stack:gemma2", "model.mlp_width"), layout="linear")
    assert matched.matched.target == counted(preset, "parameters", 64)


def test_a_stack_as_target_inside_an_experiment():
    matched = options("parameters", "stack:based", "model.d_model")
    found = config.plan(cli.composed("train", ["+experiment=quickstart", "model.layout=mha + linear", *matched]))
    alone = config.plan(cli.composed("train", ["+experiment=quickstart", "model.layout=based"]))
    assert found.matched.target == counted(alone, "parameters", 64)


def test_two_spellings_of_a_solved_config_are_one_run():
    matched = plan(*PARAMETERS)
    spelled = plan(f"model.mlp_width={matched.matched.value}")
    assert matched.key == spelled.key and matched.config == spelled.config
    assert matched.key != plan().key and plan().matched is None


def test_target_and_achieved_are_params():
    found = plan(*PARAMETERS, "match.step=8").params
    assert found["match.target"] == 1e6 and found["match.achieved"] == 1_000_064 and found["model.mlp_width"] % 8 == 0
    assert (found["match.metric"], found["match.knob"]) == ("parameters", "model.mlp_width")
    assert not [name for name in plan().params if name.startswith("match")]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (options("parametres", 1e6, "model.mlp_width"), "'parametres' is unknown (did you mean 'parameters'?); known"),
        (options("state_bytes", 1e6, "model.mlp_width"), "(did you mean 'state_bytes_at_<length>'?)"),
        (options("state_bytes_at_0", 1e6, "model.mlp_width"), "'state_bytes_at_0' is unknown"),
        (options("parameters", 1e6, "model.mlp_widht"), "(did you mean 'model.mlp_width'?); this stack has: model.d_"),
        (options("parameters", 1e6, "model.dropout"), "'model.dropout' is no whole-number option"),
        (options("parameters", 1e6, "trainer.steps"), "'trainer.steps' is no whole-number option"),
        (options("parameters", 1e6, "model.mixers.window.window"), "the layout 'mha' does not use it; it has: "),
        (options("parameters", "gqa", "model.mlp_width"), "'gqa' must be a number, such as 1.0e6, or stack:NAME"),
        (options("parameters", "stack:gqq", "model.mlp_width"), "stack:gqq does not exist (did you mean 'gqa'?)"),
        (options("parameters", -1, "model.mlp_width"), "match.target=-1.0 must be above 0"),
        (options("parameters", 1e6, "model.n_layers"), "below: 824,448 with model.n_layers=4, above: 1,022,336"),
        (options("state_bytes_at_2048", 1e6, "model.mlp_width"), "model.mlp_width does not change state_bytes"),
        ((*PARAMETERS, "match.step=0"), "match: step=0 must be a whole number of at least 1"),
        (("match.metric=parameters", "match.target=1.0e6"), "match.knob is missing"),
        (("match.knob=model.mlp_width",), "match.metric is missing"),
        ((*options("state_bytes_at_64", 1e6, "model.d_model"), "model.mixers.mha.causal=false"),
         "the layout 2*mha has no such figure: a mixer sees later tokens"),
    ],
)  # fmt: skip
def test_mistakes_are_named(overrides, message):
    with pytest.raises(ValueError) as error:
        plan(*overrides)
    assert message in str(error.value)


ENCODES = ("model=encoder_decoder", "task=transduction", "task.apart=true", "model.mlp=none")


@pytest.mark.parametrize(
    ("knob", "value", "layers"),
    [("model.encoder.n_layers", 5, 5), ("model.encoder.mixers.mha.head_dim", 56, 2)],
)
def test_an_encoder_has_knobs_of_its_own(knob, value, layers):
    """A layer of attention at width D has 4 D H K weights, H = D / 64 heads, and a norm of D."""
    d, heads = 128, 2
    decoder = plan(*ENCODES, layout="mha + cross").skeleton
    fixed = sum(p.numel() for p in decoder.parameters()) - sum(p.numel() for p in decoder.encoder.parameters())
    width = value if knob.endswith("head_dim") else 64
    target = fixed + layers * (4 * d * heads * width + d) + d
    found = plan(*ENCODES, *options("parameters", target, knob), layout="mha + cross")
    assert (found.matched.value, found.matched.achieved) == (value, target)
    # The decoder's attention stays as it was.
    assert found.skeleton.used == decoder.used


def test_a_mixer_that_the_encoder_does_not_use_is_no_knob():
    with pytest.raises(ValueError, match=r"does not use it; it has: .*model\.encoder\.mixers\.mha\.n_heads"):
        plan(*ENCODES, *options("parameters", 1e6, "model.encoder.mixers.gqa.n_heads"), layout="mha + cross")


def test_solving_does_not_repeat_the_warnings_of_mixers(caplog):
    """One a layer, as without a budget."""
    plan(*options("parameters", 1e6, "model.mlp_width"), "model.mixers.gqa.n_heads=1", layout="gqa")
    assert len([record for record in caplog.records if "same as mha" in record.message]) == 2


def test_a_grid_is_matched_inside_of_hydra(command_line, tmp_path):
    """Each job of a multirun composes the target's stack again."""
    wanted = options("parameters", "stack:gqa", "model.mlp_width")
    grid = "-m", "stack=linear,window", "model.mlp=gelu", "mlflow=false", "trainer.steps=1"
    code, _, err = command_line(*grid, *wanted)
    records = [json.loads(path.read_text()) for path in (tmp_path / "runs").glob("*/params.json")]
    assert (code, err) == (0, "") and {record["stack"] for record in records} == {"linear", "window"}
    # D 8, 32 tokens: the embedding, the last norm; two layers of 4 D^2, an MLP of 2 D 4 D, two norms.
    assert {record["match.target"] for record in records} == {32 * 8 + 8 + 2 * (4 * 8**2 + 2 * 8 * 32 + 2 * 8)}
    assert all(abs(record["match.achieved"] / record["match.target"] - 1) <= 0.01 for record in records)


def test_the_help_explains_it():
    page = cli.help_page("train")
    assert "match.metric=parameters match.target=1.0e6 match.knob=model.mlp_width\n" in page
    assert "match.knob=null" in page and "match.command" not in page
