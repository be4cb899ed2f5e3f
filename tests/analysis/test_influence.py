"""`python -m analysis.influence`: the runs of a model, looked at from the command line, and in a report."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

import experiments
from analysis import canvas, influence, influence_plots
from analysis.influence_map import Row
from analysis.report import build
from analysis.runs import counted, load
from experiments import train

TINY = (
    "model.d_model=8", "model.n_layers=2", "model.mlp=none", "task.length=16", "task.rows_per_suite=4",
    "trainer.steps=1", "trainer.batch_size=2", "trainer.threads=1", "mlflow=false",
)  # fmt: skip
OF = {
    "text": ("task=text", "model.layout=window|linear", "model.mixers.window.window=4", "model.position=learned"),
    "mqar": ("model.layout=mha", "task.vocabulary=32", "task.kv=[2]", "task.test_kv=[2]"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where there are runs: runs/text of text, runs/mqar of ids, and runs/bare of ids without a checkpoint."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, options in OF.items():
            patch.setattr(sys, "argv", ["train", *TINY, *options])
            assert train.main() == 0
            (made,) = (path.parent for path in Path("runs").glob("*/status.json") if path.parent.name not in OF)
            made.rename(f"runs/{name}")
        shutil.copytree("runs/mqar", "runs/bare")
        shutil.rmtree("runs/bare/checkpoints")
        params = Path("runs/bare/params.json")
        params.write_text(json.dumps(json.loads(params.read_text()) | {"stack": "bare", "layout": "bare"}))
    return folder


@pytest.fixture
def ask(folder, monkeypatch, capsys):
    """Call the program: exit code, what it printed, its errors."""

    def call(*arguments):
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", ["influence", *arguments])
        capsys.readouterr()
        code = influence.main()
        return code, *capsys.readouterr()

    return call


def test_a_text_is_looked_at_layer_by_layer(ask, folder):
    code, out, err = ask("run=text", "text=To <b>be</b>, no", "queries=5", "directions=2", "out=deep/page.html")
    assert (code, err) == (0, "")
    found = {line.split("   ")[0].strip(): line for line in out.splitlines()}
    assert {"whole model", "0 window", "0 linear", "1 window", "1 linear"} <= set(found)
    cells = re.split(r" {2,}", found["0 window"])
    # Of a window of 4, exactly 0 lies beyond and ahead, and the farthest token is 3 away.
    assert cells[4:] == ["4", "0", "3", "0"]
    assert re.split(r" {2,}", found["1 linear"])[3:5] == ["–", "–"]
    assert "Tokens after a query have exactly no influence on it, in any part." in out
    assert out.endswith("picture: deep/page.html\n")
    page = (folder / "deep" / "page.html").read_text()
    assert "&lt;" in page and "<b>be" not in page and page.count('id="influence-') == 5
    assert page.count('id="weights-') == 2 and page.count("No attention weights") == 2
    loaded = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    assert "http" not in loaded and "src=" not in loaded


def test_a_row_of_the_test_suite_is_looked_at_where_it_is_scored(ask):
    code, out, _ = ask("run=runs/mqar", "row=3", "window=8", "directions=1")
    assert code == 0 and "row 3 of the test suite kv2, 16 tokens, 2 queries" in out
    assert "picture: influence.html" in out
    whole = re.split(r" {2,}", next(line for line in out.splitlines() if line.startswith("whole model")))
    assert whole[3:5] == ["–", "8"]


def test_queries_are_the_scored_ones_or_an_even_spread_over_their_second_half():
    def asked(scored):
        return influence.Asked(Row(torch.zeros(20)), "", ["x"] * 20, scored)

    assert asked([3, 7, 8]).effort(4, 1).queries == [3, 7, 8]
    assert asked(range(20)).effort(4, 1).queries == [10, 13, 16, 19]
    assert asked(range(20)).effort(1, 1).queries == [19]
    assert asked([19]).effort(1, 1).queries == [19]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["text=a"], "run=... is missing"),
        (["run=txt", "text=a"], "run='txt' is no run (did you mean 'text'?)"),
        (["run=bare"], "bare has no checkpoint that can be read"),
        (["run=mqar", "text=a"], "run='mqar' is of task=mqar, whose tokens stand for no text"),
        (["run=text", "text="], "text= is empty"),
        (["run=text", "text=" + 3000 * "a"], "the given text has 3000 tokens; at most 1024 are looked at"),
        (["run=mqar", "suite=kv3"], "suite=kv3 does not exist (did you mean 'kv2'?); the suites are kv2"),
        (["run=mqar", "row=4"], "row=4 must be from 0 to 3"),
        (["run=text", "text=a", "row=1"], "text= and suite= or row= name two things"),
        (["run=text", "text=a", "querys=3"], "querys is no option (did you mean 'queries'?)"),
        (["run=text", "text=a", "queries=0"], "queries=0 must be a whole number of at least 1"),
        (["run=text", "text=a", "window=2.5"], "window=2.5 must be a whole number of at least 1"),
        (["run=text", "text=a", "seed=4294967297"], "seed=4294967297 must be at most 4294967295"),
        (["run=text", "text=a", "loose"], "'loose' is no option"),
    ],
)
def test_mistakes_are_one_message(ask, arguments, message):
    code, out, err = ask(*arguments)
    assert (code, out) == (2, "")
    assert message in err and err.startswith("error: ") and err.count("\n") == 1


def test_a_learned_position_bounds_the_text(ask, folder):
    longest = experiments.load(folder / "runs" / "text").stack.position.max_length
    code, _, err = ask("run=text", f"text={(longest + 1) * 'a'}")
    assert code == 2 and f"has {longest + 1} tokens; at most {min(longest, 1024)} are looked at" in err


def test_the_section_of_a_report_has_a_map_of_each_cell_or_says_why_not(folder):
    records = counted(load(folder / "runs"))
    cells = dict(zip(records.runs["run"], records.runs["cell"], strict=True))
    pictures, missing = influence.section(records, canvas.styles(records.runs))
    seen = {cells["mqar"], cells["text"]}
    assert {picture.title for picture in pictures[1:]} == {f"What {cell} depends on" for cell in seen}
    assert {trace.legendgroup for trace in pictures[0].figure.data} == seen
    assert len(missing) == 1 and missing[0].startswith(f"{cells['bare']}: ") and "has no checkpoint" in missing[0]


def test_of_each_cell_the_lowest_seed_is_looked_at(write, runs, monkeypatch):
    write("mha", 10)
    wanted = {str(write("mha", 9)), str(write("linear", 2))}
    seen = set()
    monkeypatch.setattr(influence, "_looked_at", lambda folder: seen.add(folder) or Path("nothing").stat())
    assert influence.section(counted(load(runs)), {})[0] == [] and seen == wanted


def test_a_report_has_the_section_where_it_is_asked_for(folder):
    records = load(folder / "runs")
    page, plain = build(records, influence=True), build(records)
    assert "What the models depend on" in page and "has no checkpoint" in page
    assert "picture-0-influence-0" in page and "picture-1-influence-0" in page
    assert "What the models depend on" not in plain and "--influence asks for" in plain


def test_a_map_tells_nothing_from_little_and_from_no_token():
    """Query 1 takes all from itself; query 2 all but 1e-17, from token 0. No token is 2 before query 1."""
    values = torch.tensor([[0, 1, 0], [1e-17, 0, 1]], dtype=torch.float64)
    figure = influence_plots.heat_map(values, (1, 2), ["a", "<", "c"])
    nothing, some = figure.data
    assert list(some.x) == [0, 1, 2]
    assert list(some.z) == [[0.0, None, None], [0.0, None, -influence_plots.DECADES]]
    assert list(nothing.z) == [[None, 0.0, None], [None, 0.0, None]]
    assert figure.layout.yaxis.ticktext == ("1  &lt;", "2  c")
    assert "2 c ← 0 a (2 back): 1e-15%" in some.text[1][2]
