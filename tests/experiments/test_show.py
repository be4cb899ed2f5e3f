from __future__ import annotations

import json
import re
import sys

import pytest
import torch

from arch import cost
from experiments import cli, config, show


@pytest.fixture
def call(monkeypatch, capsys):
    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["show", *arguments])
        capsys.readouterr()
        code = show.main()
        return code, *capsys.readouterr()

    return call


def test_json_lists_every_layer_and_totals_are_those_of_the_run(call):
    options = ["stack=gemma3", "model.d_model=64", "model.n_layers=7", "model.mixers.window.window=9"]
    code, out, err = call(options[0], "--json", *options[1:])
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert [part["name"] for part in found["parts"]] == ["embedding", *["window"] * 5, "gqa", "window", "head"]
    plan = config.plan(cli.composed("train", options))
    whole = cost.measure(plan.skeleton, plan.task.length)
    assert found["total"]["parameters"] == whole.parameters
    assert found["total"]["flops_per_token_forward"] == pytest.approx(whole.flops_per_token_forward)
    for length in (1024, 32_768, 1_048_576):
        assert found["total"][f"state_bytes_at_{length}"] == cost.measure(plan.skeleton, length).state_bytes
    # One key and one value of 64 floats in 9 slots, at any length: the window's state does not grow.
    assert {found["parts"][1][f"state_bytes_at_{n}"] for n in (1024, 1_048_576)} == {2 * 64 * 9 * 4}
    assert (found["stack"], found["layout"], found["length"]) == (plan.label, "5*window + gqa + window", 64)


def test_equal_layers_are_one_row(call):
    code, out, _ = call("stack=gemma3", "model.d_model=64", "model.n_layers=26")
    rows = [line.split() for line in out.splitlines()]
    assert code == 0
    assert [row[:3] for row in rows if row[1:2] == ["x"]] == [["22", "x", "window"], ["4", "x", "gqa"]]
    assert "layout: 4*(5*window + gqa) + 2*window" in out and "26 layers, d_model 64, vocabulary 256" in out


def test_a_row_by_hand(call):
    """Three layers of mha, one head of width 64, without MLPs."""
    _, out, _ = call("stack=mha", "model.mlp=none", "model.n_layers=3", "task.vocabulary=100", "task.test_kv=[4]")
    row = next(line for line in out.splitlines() if " x " in line)
    # 4 D^2 + D; 2 (4 D^2 + 2 D (T + 1) / 2) at T = 64; 2 D floats of 4 bytes a token.
    assert row.split() == ["3", "x", "mha", "16.4", "k", "41.1", "k", "524", "kB", "16.8", "MB", "537", "MB"]
    head = next(line for line in out.splitlines() if "head" in line)
    # The norm's weights; the head is the embedding, read once: 2 D V FLOPs.
    assert head.split() == ["head", "64", "12.8", "k", "0", "B", "0", "B", "0", "B"]


def test_layers_that_share_weights_are_another_row(call):
    _, out, _ = call("model.layout=gqa@a + gqa@a + gqa@a")
    rows = [line.split() for line in out.splitlines() if " x " in line]
    assert [row[:4] for row in rows] == [["1", "x", "gqa@a", rows[0][3]], ["2", "x", "gqa@a", "0"]]


def test_a_70b_stack_prints_without_memory(call):
    before = torch.get_default_device()
    code, out, _ = call("stack=llama3", "model.n_layers=80", "model.d_model=8192", "model.mlp_width=28672",
                        "model.mixers.gqa.n_heads=64", "model.mixers.gqa.n_kv_heads=8", "task=text", "--json")
    found = json.loads(out)
    # Llama 3 70B less its own vocabulary: 80 (2 D^2 + 2 D 1024 + 3 D 28672 + 2 D) + D, and two tables of 256 rows.
    d = 8192
    assert code == 0 and torch.get_default_device() == before
    assert found["total"]["parameters"] == 80 * (2 * d * d + 2 * d * 1024 + 3 * d * 28_672 + 2 * d) + d + 2 * 256 * d
    assert found["total"]["state_bytes_at_1048576"] == 80 * 2 * 1024 * 4 * 2**20


def test_a_model_that_does_not_generate_has_no_state(call):
    code, out, _ = call("stack=bert")
    assert code == 0 and "No state: a mixer sees later tokens" in out
    assert next(line for line in out.splitlines() if "total" in line).split()[-3:] == ["-", "-", "-"]
    assert json.loads(call("stack=bert", "--json")[1])["total"]["state_bytes_at_1024"] is None


def test_the_figures_of_the_whole_model_by_hand(call):
    """Three layers of mha, one head of width 64, 64 tokens a row: D 64, V 100."""
    _, out, _ = call("stack=mha", "model.mlp=none", "model.n_layers=3", "task.vocabulary=100", "task.test_kv=[4]")
    forward = 3 * (2 * 4 * 64**2 + 4 * 64 * 65 / 2) + 2 * 64 * 100
    assert f"a training row of 64: {3 * forward / 1000:.3g} k FLOPs a token" in out
    # q, k, v and y; 64 x 64 scores.
    assert f"at least {3 * 4 * 64 * 64 * 4 / 1000:.3g} kB" in out and f"are {3 * 64 * 64 * 4 / 1000:.3g} kB" in out
    rows = {line.split("  ")[1].strip(): line.split()[-6:] for line in out.splitlines() if line.startswith("  ")}
    assert rows["state in bfloat16"] == ["786", "kB", "25.2", "MB", "805", "MB"]
    # The token after 1024 others sees 1025 keys.
    token = 3 * (2 * 4 * 64**2 + 4 * 64 * 1025) + 2 * 64 * 100
    assert rows["FLOPs of the next token"][:2] == [f"{token / 1000:.3g}", "k"]


def test_explain_prints_the_formulas_and_the_convention(call):
    options = ["model.layout=mha + linear", "model.convolution=4", "model.mixers.mha.n_heads=4"]
    code, out, _ = call("explain=true", *options)
    assert code == 0 and cost.CONVENTION in out and cost.CONVENTION not in call(*options)[1]
    assert "  1 x attention: 2 * B*H*(K+V) * visible pairs = 2 * 1*4*(16+16) * 2,080 = 532,480" in out
    assert "  1 x linear_attention: 2 * B*T*H * 2*K*(V+1) = 2 * 1*64*1 * 2*64*(64+1) = 1,064,960" in out
    # 1 + 2 + 3 taps of the first tokens, then 61 times 4.
    assert "  1 x causal_conv: 2 * B*D * taps inside = 2 * 1*64 * 250 = 32,000" in out
    assert "  4 x matrix product: 2 * rows*inner*columns = 2 * 64*64*64 = 524,288" in out


def test_the_formulas_add_up_to_the_figures(call):
    found = json.loads(call("stack=gemma3", "model.n_layers=6", "model.convolution=4", "--json")[1])
    for part in found["parts"]:
        assert sum(term["flops"] for term in part["terms"]) == part["flops_per_token_forward"] * found["length"]


def test_json_has_every_figure(call):
    """Those at the row's length, and those of decoding at all three."""
    total = json.loads(call("stack=gqa", "--json")[1])["total"]
    for name in cost.FIGURES:
        for length in (64,) if name.startswith(("activation", "attention", "score")) else show.LENGTHS:
            assert total[name.replace("<length>", str(length))] > 0
    plan = config.plan(cli.composed("train", ["stack=gqa"]))
    assert total["activation_bytes_at_64"] == cost.measure(plan.skeleton, 64).activation_bytes
    assert total["bookkeeping_bytes_at_1024"] == cost.measure(plan.skeleton, 1024).bookkeeping_bytes


def test_a_match_is_shown(call):
    options = ["match.metric=parameters", "match.target=1.0e6", "match.knob=model.mlp_width"]
    _, out, _ = call("stack=gqa", *options)
    assert re.search(r"Matched: model.mlp_width=\d+ gives parameters [\d,]+, [+-]0\.0\d% of 1,000,000", out)
    found = json.loads(call("stack=gqa", "--json", *options)[1])
    assert found["match"]["match.achieved"] == found["total"]["parameters"]
    assert json.loads(call("stack=gqa", "--json")[1])["match"] is None


def test_layouts_with_spaces_and_parentheses_are_read(call):
    code, out, _ = call("model.layout=2*(linear + mha)")
    assert code == 0 and "layout: 2*(linear + mha)" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["stack=gema3"], "stack='gema3' does not exist (did you mean 'gemma3'?)"),
        (["model.d_modl=3"], "model.d_modl is no option (did you mean 'model.d_model'?)"),
        (["stack=mamba", "model.mixers.mamba.causal=false"], "model.mixers.mamba has no bidirectional form"),
        (["stack=mha,gqa"], "'stack=mha,gqa' has several values; show prints one model at a time"),
        (["model.layout=mha,2*(gqa)"], "has several values; show prints one"),
        (["model.layout=2*mha", "+", "gqa"], "needs quotes: python -m experiments.show ... 'model.layout=2*mha + gqa'"),
        (["model.layout=gqaa"], "unknown mixer 'gqaa' (did you mean 'gqa'?)"),
        (["explain=yes"], "'explain=yes': allowed are explain=true and explain=false"),
        (["gemma3"], "'gemma3' is no option: options are written NAME=VALUE"),
        (["stack='"], "cannot be read"),
    ],
)
def test_mistakes_are_one_message(call, arguments, message):
    code, out, err = call(*arguments)
    assert (code, out) == (2, "") and err.startswith("error: ") and message in err


def test_help_says_what_it_prints(call, capsys):
    with pytest.raises(SystemExit, match="0"):
        call("--help")
    assert "stack=gemma3" in capsys.readouterr().out


def test_a_recomputing_mixer_says_so(call, monkeypatch):
    from mixers import registry
    from mixers.base import Mixer

    registry.names()
    monkeypatch.setattr(registry, "_classes", dict(registry._classes))

    @registry.register("naive")
    class Naive(Mixer):
        def __init__(self, d_model: int):
            super().__init__()

        def whole(self, x):
            return (x @ x.transpose(1, 2)).softmax(-1) @ x

    _, out, _ = call("model.layout=naive")
    assert "its state is all of its inputs" in out and "counted with its masked pairs" in out
