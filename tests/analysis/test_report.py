from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from analysis import report, sheets
from analysis.comparison import by_task
from analysis.pareto import Standing
from analysis.report import build, figures, headline, main
from analysis.runs import load, only, select
from experiments import grids
from experiments.processes import Process


class Page(HTMLParser):
    """What a browser would load, and what a reader would see."""

    def __init__(self, html):
        super().__init__()
        self.links, self.elements, self.texts, self.inside = [], [], [], []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.elements.append(tag)
        self.links += [value for name, value in attributes if name in ("src", "href", "srcset", "action", "data")]
        if tag not in ("meta", "link", "input"):
            self.inside.append(tag)

    def handle_endtag(self, tag):
        # Every element is closed, in order.
        assert self.inside.pop() == tag

    def handle_data(self, data):
        if self.inside and self.inside[-1] not in ("script", "style"):
            self.texts.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())


def grid(write, **cells):
    """Three seeds a cell with these accuracies at 16 pairs."""
    for stack, values in cells.items():
        for seed, value in enumerate(values):
            write(stack, seed, accuracy={4: 1.0, 16: value, 32: value / 2})


def text(runs):
    return Page(build(load(runs))).text


def test_the_page_says_what_was_compared_and_names_every_cell(write, runs):
    grid(write, mha=[0.99, 0.98, 0.99], linear=[0.1, 0.11, 0.12])
    said = text(runs)
    for words in (
        "2 configurations compared on mqar",
        "linear, mha",
        "200 steps, 2,000 training tokens",
        "0, 1, 2",
        "6 counted of 6",
        "kv [4, 8, 16]",
        "python -m experiments.train stack=mha seed=0",
        "3.11.2",
    ):
        assert words in said


def test_the_page_loads_nothing_from_outside(write, runs):
    grid(write, mha=[0.99, 0.98], linear=[0.1, 0.2])
    html = build(load(runs))
    page = Page(html)
    assert [link for link in page.links if not link.startswith(("#", "data:"))] == []
    assert not {"iframe", "img", "object", "embed"} & set(page.elements)
    styles = "".join(re.findall(r"<style>(.*?)</style>", html, re.S))
    assert "@import" not in styles and "url(" not in styles
    assert html.count("Plotly.newPlot(") >= 1 and html.count("plotly.js v") == 1


def test_means_that_cannot_be_told_apart_are_said_to_be_so(write, runs):
    grid(write, mha=[0.99, 0.98, 0.99], based=[0.98, 0.99, 0.985], linear=[0.1, 0.12, 0.11])
    (about,) = by_task(load(runs))
    assert about.same == {"mha": ["based"], "based": ["mha"], "linear": []}
    assert about.groups == {"mha": "a", "based": "a", "linear": "b"}
    said = text(runs)
    assert (
        "It cannot be told apart from based: their order says nothing." in said
        and "It is told apart from linear." in said
    )


def test_many_overlapping_groups_are_replaced_by_who_is_not_below_the_best(write, runs):
    noise = [(0.02, 0.0, -0.02), (0.0, -0.02, 0.02), (-0.02, 0.02, 0.0)]
    grid(write, **{f"s{i:02}": [0.05 * i + x for x in noise[i % 3]] for i in range(19)})
    (about,) = by_task(load(runs))
    assert about.groups["s18"] == "top" and about.groups["s00"] == "–"
    assert [cell for cell in about.cells if about.groups[cell] == "top"] == ["s18", *about.same["s18"]]
    assert "“top” cannot be told apart from the best" in text(runs)


def test_no_more_is_said_of_one_seed_than_one_seed_can_say(write, runs):
    grid(write, mha=[0.99], linear=[0.1])
    said = text(runs)
    assert "One seed a cell" in said and "told apart from linear: their order" in said and "is told apart" not in said


def test_a_stack_that_still_improved_behind_the_best_was_still_learning(write, runs):
    for seed in range(3):
        write("mha", seed, accuracy={16: 0.99}, curve={100: 0.5, 200: 0.9}, loss={100: 1.0, 200: 0.5})
        write("linear", seed, accuracy={16: 0.5}, curve={100: 0.3, 200: 0.5}, loss={100: 3.0, 200: 2.0})
        write("window", seed, accuracy={16: 0.1}, curve={100: 0.1, 200: 0.1}, loss={100: 4.0, 200: 3.99})
    (about,) = by_task(load(runs))
    assert list(about.learning) == ["linear"]
    assert "linear was still learning at this budget: " in headline(
        load(runs)
    ) and "still learning at this budget" in text(runs)


def test_failed_diverged_running_broken_and_missing_runs_are_listed(write, runs):
    grid(write, mha=[0.99, 0.98])
    write("linear", 0, status="FAILED", reason="ValueError: <too> wide\nsecond line")
    write("window", 0, status="DIVERGED", reason="the loss was not finite at step 7")
    write("gqa", 0, status="RUNNING")
    (write("nsa", 0) / "params.json").unlink()
    said, told = text(runs), headline(load(runs))
    for words in (
        "FAILED",
        "ValueError: <too> wide",
        "DIVERGED",
        "not finite at step 7",
        "RUNNING",
        "UNKNOWN",
        "params.json is missing",
        "MISSING",
    ):
        assert words in said and words in told
    assert "second line" not in told


def test_names_and_reasons_from_records_cannot_become_markup(write, runs):
    hostile = "</script><script>alert(1)</script>"
    grid(write, **{f"a{hostile}": [0.9, 0.8], "b": [0.1, 0.1]})
    write(hostile, 5, status="FAILED", reason=hostile)
    assert build(load(runs)).lower().count("<script") == build_of_plain(write, runs).lower().count("<script")


def build_of_plain(write, runs):
    for folder in runs.iterdir():
        for file in folder.iterdir():
            file.write_text(file.read_text().replace("</script><script>alert(1)</script>", "x"))
    return build(load(runs))


def test_every_cell_failed_is_a_report_that_says_so(write, runs):
    write("mha", 0, status="FAILED", reason="out of memory")
    write("linear", 0, status="DIVERGED", reason="the loss was not finite")
    assert "No run is finished" in text(runs) and "out of memory" in text(runs)
    assert "No run is finished" in headline(load(runs)) and "out of memory" in headline(load(runs))


def test_one_run_is_a_report(write, runs):
    write("mha", 0)
    assert "1 configuration compared" in text(runs) and "mha has the highest mean" in text(runs)


def test_runs_of_an_older_version_are_reported_with_what_they_lack(write, runs):
    grid(write, mha=[0.9, 0.8])
    write("linear", 0, costs={}, accuracy={16: 0.5})
    write("linear", 1, costs={}, accuracy={})
    said = text(runs)
    assert "Not recorded by 2 of 4 finished runs: " in said and "(n = 1)" in said


def test_finished_runs_without_any_quality_are_reported(write, runs):
    write("mha", 0, curve={}, accuracy={})
    write("linear", 0, curve={}, accuracy={}, costs={})
    assert "nothing to compare" in text(runs) and "nothing to compare" in headline(load(runs))


def test_runs_of_different_budgets_are_pointed_out(write, runs):
    write("mha", 0)
    write("linear", 0, curve={100: 0.5, 400: 0.6})
    assert "different budgets: 2,000 to 4,000 training tokens" in text(runs)


def test_runs_of_different_code_are_pointed_out(write, runs):
    for seed, commit in enumerate(("abc", "def", "abc")):
        (write("mha", seed) / "environment.json").write_text(json.dumps({"commit": commit}))
    assert "made by 2 different versions of the code" in text(runs)
    assert "different versions" not in headline(select_seeds(load(runs), 0, 2))


def test_stacks_that_were_not_trained_alike_are_pointed_out(write, runs):
    for seed in (0, 1):
        write("mha", seed, params={"lr": 0.01, "optimizer.lr": 0.01, "task.kv": [4]})
        write("linear", seed, params={"lr": 0.001, "optimizer.lr": 0.001, "task.kv": [64]})
    assert "not trained and tested alike: optimizer.lr is 0.001 or 0.01; task.kv is [4] or [64]." in text(runs)
    # What varies within a stack is in the names of all cells.
    write("linear", 0, params={"lr": 0.01, "optimizer.lr": 0.01, "task.kv": [64]})
    said = text(runs)
    assert "not trained and tested alike: task.kv is [4] or [64]." in said and "mha (lr=0.01)" in said


def test_rates_that_were_chosen_may_differ(write, runs):
    for stack, lr in (("mha", 0.01), ("linear", 0.001)):
        folder = write(stack, params={"lr": lr, "optimizer.lr": lr})
        choice = {"lr": lr, "edge": None, "monitor": "val/loss", "seeds": [9], "scores": [[lr, 1.0]], "runs": [stack],
                  "tokens": 1, "flops": 1.0, "seconds": 1.0}  # fmt: skip
        (folder / "tuning.json").write_text(json.dumps(choice))
    assert "trained and tested alike" not in text(runs)


def test_continued_runs_are_pointed_out(write, runs):
    write("mha", 0)
    folder = write("linear", 0)
    assert "Continued" not in text(runs)
    status = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps(status | {"earlier_keys": ["0123"]}))
    assert f"not what one training under these gives: {folder.name}." in text(runs)


def test_speeds_of_different_machines_are_pointed_out(write, runs):
    for seed, threads in enumerate((1, 1, 8)):
        (write("mha", seed) / "environment.json").write_text(json.dumps({"threads": threads}))
    assert "measured under different conditions (threads; see the environment)" in text(runs)
    assert "different conditions" not in headline(select_seeds(load(runs), 0, 1))


def select_seeds(records, *seeds):
    return only(records, records.runs[records.runs["seed"].isin(seeds)])


def test_tasks_are_compared_each_for_itself(write, runs):
    write("mha", 0)
    write("mha", 0, params={"task": "copy", "task.name": "copy"})
    (write("mha", 0) / "params.json").unlink()
    copy, mqar = by_task(load(runs))
    assert (copy.task, mqar.task) == ("copy", "mqar") and copy.cells == mqar.cells == ["mha"]
    assert "compared on copy" in text(runs) and "compared on mqar" in text(runs)
    assert len(copy.records.runs) + len(mqar.records.runs) == 3


def test_the_headline_has_three_numbers_a_cell(write, runs):
    grid(write, mha=[0.99, 0.98, 0.99])
    (line,) = [line for line in headline(load(runs)).splitlines() if line.startswith("mha ")]
    assert len(re.split(r" {2,}", line)) == 6 and "±" in line


def test_along_lengths_quality_stands_beside_what_is_read(write, runs):
    read = {f"complexity/decode_attention_bytes_at_{length}": 512.0 * length for length in (64, 128)}
    file = write(accuracy={}, costs=read) / "metrics.jsonl"
    tested = {"eval/length64/accuracy": 0.5, "eval/length128/accuracy": 0.25}
    file.write_text(file.read_text() + json.dumps({"step": 200, "tokens": 2000, "metrics": tested}) + "\n")
    lines = [re.split(r" {2,}", line) for line in headline(load(runs)).splitlines() if line.startswith("mha ")]
    assert lines[-1] == ["mha", "0.500 at 32.8 kB", "0.250 at 65.5 kB"]
    for length in (64, 128):
        title = f"Test accuracy on length{length} against attention traffic of a token after {length}"
        assert text(runs).count(title) == 1


def test_the_command_writes_the_page_and_prints_its_path(write, runs, tmp_path, capsys):
    grid(write, mha=[0.99, 0.98])
    page = tmp_path / "new folder" / "out.html"
    assert main(["--runs", str(runs), "--sweep", "grid", "--html", str(page)]) == 0
    out = capsys.readouterr().out
    assert out.rstrip().endswith(f"report: {page}") and "mha" in out
    assert f"--sweep grid --html '{page}'" in Page(page.read_text()).text
    assert main(["--runs", str(runs)]) == 0 and (runs / "report.html").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--runs", "{}/nowhere"], "nowhere is not a folder"),
        (["--runs", "{}/runs", "--html", "{}"], "directory"),
        (["--runs", "{}/runs", "--format", "jsno"], "(did you mean 'json'?); allowed are html, json, csv, md"),
        (["--runs", "{}/runs", "--format", "md", "--html", "x.html"], "leave one out"),
        (["--runs", "{}/runs", "--bench", "{}/nowhere"], "python -m experiments.bench makes one"),
        (["--runs", "{}/runs", "--bench", "{}/empty"], "holds no records of a benchmark"),
    ],
)
def test_what_cannot_be_built_is_one_line_and_code_2(write, tmp_path, capsys, arguments, message):
    write()
    (tmp_path / "empty").mkdir()
    assert main([argument.format(tmp_path) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and error.startswith("error: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--runs", "{}/empty"], "holds no runs; make some"), (["--runs", "{}/runs", "--sweep", "grit"], "mean 'grid'")],
)
@pytest.mark.parametrize("kind", report.FORMATS)
def test_without_runs_the_report_is_built_and_says_why(write, tmp_path, capsys, arguments, message, kind):
    write()
    (tmp_path / "empty").mkdir()
    page = tmp_path / "out.html"
    wanted = ["--html", str(page)] if kind == "html" else ["--format", kind]
    assert main([*(argument.format(tmp_path) for argument in arguments), *wanted]) == 2
    out, error = capsys.readouterr()
    assert message in error and error.count("\n") == 1
    if kind == "html":
        assert message in Page(page.read_text()).text and "Nothing to compare" in page.read_text()
    if kind == "json":
        assert json.loads(out)["results"] == []
    if kind == "csv":
        assert out == "task,cell,metric,unit,better,mean,half,n,seeds,group,deciding\n"


def test_who_leads_where_it_is_hardest_is_said_where_that_is_another(write, runs):
    for seed in range(2):
        write("mha", seed, accuracy={4: 1.0, 16: 0.9, 32: 0.1})
        write("linear", seed, accuracy={4: 1.0, 16: 0.8, 32: 0.5})
    said = text(runs)
    assert "Test accuracy on kv16 (16 key-value pairs to remember): mha has the highest mean" in said
    assert "Test accuracy on kv32: there linear has the best mean, 0.500 ± 0.000; that is not tested." in said


def test_the_verdict_is_that_of_the_common_seeds(write, runs):
    # Over all of its seeds, mha is the better; on those that both have, linear is, by far.
    for seed, value in enumerate([0.5, 0.501, 0.502, 1.0, 1.0, 1.0, 1.0]):
        write("mha", seed, accuracy={16: value})
    for seed, value in enumerate([0.7, 0.701, 0.702]):
        write("linear", seed, accuracy={16: value})
    (about,) = by_task(load(runs))
    assert about.cells[0] == "mha"
    assert [row[-1] for row in sheets.to_best(about).rows] == ["linear is better"]
    assert Standing.DOMINATED not in about.front("complexity/parameters").values()


def test_a_long_name_is_cut_in_the_terminal_alone(write, runs):
    name = "mha + linear, " * 30
    write(name)
    assert max(map(len, headline(load(runs)).split("Cells that share")[0].splitlines())) < 200
    assert name.strip() in text(runs)


def test_a_selection_reports_its_own_runs_only(write, runs):
    write("mha", 0, sweep="one")
    write("linear", 0, sweep="two")
    said = Page(build(select(load(runs), "two"))).text
    assert "linear" in said and "mha" not in said


def test_a_stack_without_any_finished_run_is_named(write, runs):
    grid(write, mha=[0.9, 0.8])
    write("linear", 0, status="FAILED", reason="out of memory")
    assert "Nothing is known of linear: no such run finished." in text(runs)


def test_several_tasks_are_seen_together_from_the_smallest_state_to_the_largest(write, runs):
    small = {"complexity/state_bytes_at_64": 1.0}
    for seed in range(3):
        for task, gain in (("mqar", 0.5), ("copy", 0.0)):
            params = {"task": task, "task.name": task}
            write("mha", seed, accuracy={16: 0.4 + gain + 0.01 * seed}, params=params)
            write("linear", seed, accuracy={16: 0.4 + 0.01 * seed}, params=params, costs=small)
    sheet = sheets.overview(by_task(load(runs)))
    assert [column.title for column in sheet.columns[1:]] == [f"{t}: test accuracy on kv16" for t in ("copy", "mqar")]
    # A star where a cell is the best or cannot be told apart from it.
    linear, mha = sheet.rows
    assert linear[0] == "linear" and [text.endswith("*") for text in linear[1:]] == [True, False]
    assert mha[0] == "mha" and [text.endswith("*") for text in mha[1:]] == [True, True]
    assert "2 configurations on 2 tasks" in text(runs)
    assert {"overview-copy", "overview-mqar", "mqar-ranking", "copy-difficulty"} - set(figures(load(runs))) == {
        "copy-difficulty"
    }


def planned(runs, time, sweep, jobs):
    """The record of a grid of which nothing has begun."""
    folder = runs / ".grids" / time
    grids.begin(grids.Grid(folder, sweep, 1.0, [], ".", {}, Process.this(), jobs))
    (folder / "jobs").mkdir()
    return folder


def test_jobs_that_never_began_are_listed_until_a_later_grid_begins_them(write, runs):
    write("mha", 0)
    for time, begun in (("1", [0]), ("2", [])):
        folder = planned(runs, time, "grid", [[f"stack={stack}", "seed=0"] for stack in ("mha", "linear")])
        for number in begun:
            (folder / "jobs" / f"{number}.json").write_text("{}")
    (runs / ".grids" / "3").mkdir()
    (runs / ".grids" / "3" / "grid.json").write_text('{"sweep": "gr')
    assert load(runs).unstarted.values.tolist() == [["grid", "stack=linear seed=0"]]
    assert "grid: stack=linear seed=0" in text(runs) and "Not begun: 1 jobs of grid" in headline(load(runs))
    (runs / ".grids" / "2" / "jobs" / "1.json").write_text("{}")
    assert "Not begun" not in text(runs)


def test_trials_of_tuning_are_no_results_but_their_cost_is_told(write, runs):
    chosen = {"lr": 0.01, "edge": "highest", "method": "grid", "monitor": "val/loss", "seeds": [100, 101],
              "scores": [[0.001, 2.0], [0.01, 1.0]], "runs": ["a", "b", "c", "d"], "tokens": 8000, "flops": 3.6e9,
              "seconds": 50.4}  # fmt: skip
    (write("mha", 0) / "tuning.json").write_text(json.dumps(chosen))
    write("linear", 0)
    trial = write("mha", 100, params={"lr": 0.001}) / "status.json"
    trial.write_text(json.dumps(json.loads(trial.read_text()) | {"trial": True}))
    (about,) = by_task(load(runs))
    assert sorted(about.cells) == ["linear", "mha"] and len(about.records.runs) == 2
    assert sheets.tuned(about).rows == [
        ["mha", "0.01", "2", "4", "validation loss, seeds 100, 101", "8,000", "3.6 G", "50"]
    ]
    assert "Cost of tuning" in text(runs)


def test_the_pictures_are_there_for_other_programs(write, runs):
    grid(write, mha=[0.99, 0.98], linear=[0.1, 0.2])
    found = figures(load(runs))
    assert {"ranking", "difficulty", "learning-val-accuracy"} <= set(found)
    assert found["difficulty"].layout.title.text == "Accuracy by difficulty (mqar)"
    assert figures(only(load(runs), load(runs).runs.iloc[:0])) == {}


def test_a_sweep_of_which_no_job_has_begun_is_said_to_be_so(write, runs, tmp_path, capsys):
    write("mha", 0, sweep="other")
    planned(runs, "1", "later", [["seed=0"]])
    page = tmp_path / "out.html"
    assert main(["--runs", str(runs), "--sweep", "later", "--html", str(page)]) == 2
    assert "no job of the sweep 'later' has begun" in capsys.readouterr().err
    assert "later: seed=0" in Page(page.read_text()).text
