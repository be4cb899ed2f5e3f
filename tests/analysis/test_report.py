from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from analysis.comparison import by_task
from analysis.report import build, headline, main
from analysis.runs import load, only, select


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
    assert "was not recorded by 2 of 4 finished runs" in said and "(n = 1)" in said


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
        (["--runs", "{}/empty"], "holds no runs"),
        (["--runs", "{}/runs", "--sweep", "grit"], "did you mean 'grid'"),
        (["--runs", "{}/runs", "--html", "{}"], "directory"),
    ],
)
def test_what_cannot_be_built_is_one_line_and_code_2(write, tmp_path, capsys, arguments, message):
    write()
    (tmp_path / "empty").mkdir()
    assert main([argument.format(tmp_path) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and error.startswith("error: ")


def test_a_selection_reports_its_own_runs_only(write, runs):
    write("mha", 0, sweep="one")
    write("linear", 0, sweep="two")
    said = Page(build(select(load(runs), "two"))).text
    assert "linear" in said and "mha" not in said
