"""Test suites past the trained length, under RoPE scalings that training did not have."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import experiments
from experiments import cli, config, extrapolation, tasks

L, D, HEADS = 8, 16, 2
# One layer of attention, and nothing that is not in `losses`.
TINY = (
    "task=text", f"task.length={L}", "task.factors=[1,4]", "task.rows_per_suite=8", f"model.d_model={D}",
    "model.n_layers=1", "model.mlp=none", "model.max_length=32", f"model.mixers.mha.n_heads={HEADS}",
    "trainer.precision=64", "trainer.steps=3", "trainer.batch_size=4", "trainer.threads=1", "mlflow=false",
    "optimizer.lr=0.1",
)  # fmt: skip
SCALINGS = "evaluate.rope_scaling={pi: {rope_type: linear}, ntk: {rope_type: ntk}, yarn: {rope_type: yarn}}"


def rates(kind: str, factor: float) -> tuple[torch.Tensor, float]:
    """Radians a token of each pair, and the factor of queries and keys; linear and yarn by transformers."""
    width = D // HEADS
    if kind in ("plain", "ntk"):
        base = 10_000.0 * (factor ** (width / (width - 2)) if kind == "ntk" else 1)
        return base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width), 1.0
    rope = {"rope_type": kind, "rope_theta": 10_000.0, "factor": factor, "original_max_position_embeddings": L}
    llama = LlamaConfig(hidden_size=D, num_attention_heads=HEADS, max_position_embeddings=32, rope_parameters=rope)
    found, amplitude = ROPE_INIT_FUNCTIONS[kind](llama, "cpu")
    return found.double(), amplitude


def turned(x: torch.Tensor, kind: str, factor: float) -> torch.Tensor:
    """[T, H, K] as complex numbers of the pairs (i, i + K/2), each times exp(i angle)."""
    speed, amplitude = rates(kind, factor)
    pairs = torch.complex(*x.chunk(2, -1))
    angles = torch.outer(torch.arange(len(x), dtype=torch.float64), speed)[:, None]
    pairs = pairs * torch.polar(torch.full_like(angles, amplitude), angles)
    return torch.cat([pairs.real, pairs.imag], -1)


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMSNorm over the channels."""
    return x / (x.pow(2).mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).sqrt() * weight


def losses(w: dict[str, torch.Tensor], tokens: torch.Tensor, scheme: str, kind: str, factor: float) -> torch.Tensor:
    """[T, V] log-probabilities of one row by a model of one layer, written down from its parts."""
    time = len(tokens)
    x = w["embedding.weight"][tokens]
    if scheme == "learned":
        x = x + w["stack.position.table.weight"][:time]
    if scheme == "sinusoidal":
        for t in range(time):
            for c in range(D):
                wave = math.sin if c % 2 == 0 else math.cos
                x[t, c] += wave(t / 10_000 ** (c // 2 * 2 / D))
    inner = "stack.blocks.0.mixing.mixers.0."
    h = norm(x, w["stack.blocks.0.mixing.before.weight"])
    q, k, v = ((h @ w[f"{inner}{name}.weight"].T).reshape(time, HEADS, -1) for name in "qkv")
    if scheme == "rope":
        q, k = turned(q, kind, factor), turned(k, kind, factor)
    scores = torch.einsum("thk,shk->hts", q, k) / math.sqrt(D // HEADS)
    distance = torch.arange(time)[:, None] - torch.arange(time)
    if scheme == "alibi":
        scores = scores - torch.tensor([2**-4, 2**-8])[:, None, None] * distance
    scores = scores.masked_fill(distance < 0, -math.inf)
    y = torch.einsum("hts,shk->thk", scores.softmax(-1), v).flatten(1) @ w[f"{inner}out.weight"].T
    return F.log_softmax(norm(x + y, w["stack.norm.weight"]) @ w["embedding.weight"].T, -1)


def independent(folder, scheme: str, kind: str, factor: int) -> float:
    """Nats a token over the rows of the suite of that factor."""
    weights = experiments.load(folder).state_dict()
    task = tasks.get("text")(length=L, factors=[1, 4], rows_per_suite=8)
    suite = task.suites("test")["text" if factor == 1 else f"text_x{factor}"]
    total, count = 0.0, 0
    for row in range(len(suite)):
        tokens, labels = suite[row]["tokens"], suite[row]["labels"]
        scored = labels >= 0
        found = losses(weights, tokens, scheme, kind, factor)[scored, labels[scored]]
        total, count = total - found.sum().item(), count + len(found)
    return total / count


@pytest.mark.parametrize("scheme", ["rope", "alibi", "none", "sinusoidal", "learned"])
def test_every_scheme_and_scaling_is_what_its_definition_gives(command_line, tmp_path, read_events, scheme):
    code, _, err = command_line(f"stack=position/{scheme}", *TINY, SCALINGS, tiny=False)
    assert (code, err) == (0, "")
    folder = next((tmp_path / "runs").glob("*/status.json")).parent
    found = {name: value for event in read_events(folder) for name, value in event["metrics"].items()}
    kinds = {"": "plain"} | ({"pi/": "linear", "ntk/": "ntk", "yarn/": "yarn"} if scheme == "rope" else {})
    assert {name for name in found if name.startswith("eval/") and name.endswith("/loss")} == {
        f"eval/{suite}/{name}loss" for suite in ("text", "text_x4") for name in kinds
    }
    for name, kind in kinds.items():
        for factor, suite in ((1, "text"), (4, "text_x4")):
            truth = independent(folder, scheme, kind, factor)
            assert found[f"eval/{suite}/{name}loss"] == pytest.approx(truth, rel=1e-6)
        # At the trained length, a scaling is no scaling.
        assert found[f"eval/text/{name}loss"] == pytest.approx(found["eval/text/loss"], rel=1e-12)
    if scheme == "rope":
        past = [found[f"eval/text_x4/{name}loss"] for name in kinds]
        assert min(abs(a - b) for i, a in enumerate(past) for b in past[:i]) > 1e-4


def test_a_finished_run_is_tested_again_without_training(command_line, tmp_path, read_events):
    assert command_line("stack=position/rope", *TINY, tiny=False)[0] == 0
    folder = next((tmp_path / "runs").glob("*/status.json")).parent
    trained = [event for event in read_events(folder) if "train/loss" in event["metrics"]]
    code, out, err = command_line(f"resume={folder.name}", SCALINGS, tiny=False)
    assert (code, err) == (0, "") and "going on after step 3" in out
    moved = next((tmp_path / "runs").glob("*/status.json")).parent
    events = read_events(moved)
    assert moved != folder and [event for event in events if "train/loss" in event["metrics"]] == trained
    found = {name: value for event in events for name, value in event["metrics"].items()}
    assert found["eval/text_x4/yarn/loss"] == pytest.approx(independent(moved, "rope", "yarn", 4), rel=1e-6)


def plan(*options: str) -> config.Plan:
    return config.plan(cli.composed("train", list(options)))


def test_what_a_scaling_leaves_out_is_that_of_the_rows():
    assert extrapolation.filled({"rope_type": "linear"}, 32, 8) == {"rope_type": "linear", "factor": 4}
    # Shorter rows than trained are not stretched.
    assert extrapolation.filled({"rope_type": "ntk"}, 4, 8) == {"rope_type": "ntk", "factor": 1}
    whole = {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 16}
    assert extrapolation.filled(whole, 32, 8) == whole
    assert extrapolation.filled({"rope_type": "llama3", "low_freq_factor": 2}, 32, 8) == {
        "rope_type": "llama3", "factor": 4, "original_max_position_embeddings": 8, "low_freq_factor": 2}
    # It looks at the length by itself.
    assert extrapolation.filled({"rope_type": "dynamic", "factor": 2}, 32, 8) == {
        "rope_type": "dynamic", "factor": 2, "original_max_position_embeddings": 8}


def test_a_run_tested_otherwise_is_another_run_where_something_turns():
    turning, straight = ("stack=position/rope",), ("stack=position/alibi",)
    assert plan(*turning, SCALINGS).key != plan(*turning).key
    assert plan(*turning, SCALINGS.replace("linear", "linear, factor: 4")).key != plan(*turning, SCALINGS).key
    assert plan(*straight, SCALINGS).key == plan(*straight).key
    assert plan(*straight, SCALINGS).rope_scaling == {}


def test_an_alias_without_positions_stays_without():
    found = plan("stack=smollm3", "model.d_model=64", "model.n_layers=4", SCALINGS)
    model = found.rescaled(found.model(), found.rope_scaling["pi"], 4 * found.task.length)
    assert {name: used["rope_scaling"] for name, used in model.used.items()} == {
        "gqa": {"factor": 4, "rope_type": "linear"}, "nope": None}


def test_an_encoder_is_scaled_too():
    options = ("model=encoder_decoder", "model.layout=mha + cross", "task=transduction", "task.apart=true")
    found = plan(*options, SCALINGS, "model.mixers.mha.position=none", "+model.encoder.mixers.mha.position=rope")
    model = found.rescaled(found.model(), found.rope_scaling["ntk"], 2 * found.task.length)
    assert model.encoder.used["mha"]["rope_scaling"] == {"factor": 2, "rope_type": "ntk"}
    assert model.used["mha"]["rope_scaling"] is None


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ("{a/b: {rope_type: linear}}", "evaluate: rope_scaling: the name 'a/b' must be of letters, digits, _ and -"),
        ("{none: {rope_type: linear}}", "evaluate: rope_scaling: 'none' names the model as it was trained"),
        ("{x: {rope_type: [yarn]}}", "evaluate: rope_scaling.x: .*rope_type=['yarn'] is not allowed; allowed: linear"),
        ("{x: {factor: 2}}", "evaluate: rope_scaling.x: .*rope_type=None is not allowed"),
        ("{pi: linear}", "evaluate: rope_scaling.pi='linear' must be a mapping such as {rope_type: yarn}"),
        ("{x: {rope_type: yarm}}", "evaluate: rope_scaling.x: .*'yarm' is not allowed (did you mean 'yarn'?)"),
        ("{x: {rope_type: linear, factr: 2}}", "evaluate: rope_scaling.x: .*has no option 'factr' (did you mean"),
        ("{x: {rope_type: dynamic}}", "evaluate: rope_scaling.x: .*'dynamic' needs the option 'factor'"),
    ],
)
def test_a_wrong_scaling_is_said_before_training(scaling, message):
    for stack in ("mha", "linear"):  # linear has no RoPE: nothing to scale, but no reason to let a slip pass
        with pytest.raises(ValueError, match=re.escape(message).replace(r"\.\*", ".*")):
            plan(f"stack={stack}", f"evaluate.rope_scaling={scaling}")
