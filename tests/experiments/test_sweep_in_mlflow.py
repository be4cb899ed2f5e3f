"""What a sweep has in MLflow besides its runs: views that its own runs alone are in, links, one run with its report."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from experiments import tracking, ui, views
from experiments.record import Description
from experiments.tracking import Tracker, join_sweep, sweep

URL = "#/experiments/1/runs?viewStateShareKey={}&compareRunsMode=CHART&workflowType=machine_learning"


@pytest.fixture
def uri(new_database, tmp_path):
    return f"sqlite:///{new_database(tmp_path)}"


@pytest.fixture(autouse=True)
def nothing_was_warned_about(monkeypatch):
    monkeypatch.setattr(tracking.server, "_warned", False)


@pytest.fixture(autouse=True)
def views_are_cheap(monkeypatch):
    """However slow this machine is just now."""
    monkeypatch.setattr(sweep, "_CHEAP", float("inf"))


@pytest.fixture
def finish(tmp_path, uri):
    """Makes one run of a sweep and returns its folder."""

    def one(name, stack="mha", seed=0, outcome="FINISHED", task="mqar", where=uri):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        about = Description(stack, {"stack": stack, "seed": seed, "task": task}, {}, {}, "", name, folder.name)
        tracker = Tracker(folder, about, where)
        tracker.log(1, 64, {"val/accuracy": 0.5, "complexity/flops_per_token_train": 7.0})
        tracker.finish(outcome, None if outcome == "FINISHED" else "because")
        return folder

    return one


def experiment(uri):
    return MlflowClient(uri).get_experiment_by_name("mixerlab")


def found(uri, search):
    return {run.info.run_name for run in MlflowClient(uri).search_runs([experiment(uri).experiment_id], search)}


def test_every_run_that_ends_brings_the_view_up_to_date(uri, finish):
    view = views.identity("mine", "mqar")
    for stack, outcome in (("mha", "FINISHED"), ("linear", "KILLED"), ("based", "DIVERGED")):
        finish("mine", stack, outcome=outcome)
        assert json.loads(experiment(uri).tags[views.TAG + view])["name"] == "mine"
    # What ended early is no result.
    assert found(uri, sweep.search("mine")) == {"mha mqar seed 0"}
    assert experiment(uri).tags[sweep.NOTE] == (
        f"- Comparison [mine]({URL.format(view)}): 3 runs of 3 stacks, 2 failed or killed")


def test_where_views_are_dear_a_run_leaves_them_to_later_ones(uri, finish, monkeypatch, new_database, tmp_path):
    monkeypatch.setattr(sweep, "_CHEAP", 0.0)
    other = tmp_path / "other"
    other.mkdir()
    other = f"sqlite:///{new_database(other)}"
    for where in (uri, other):
        finish("mine", where=where)
        first = experiment(where).tags[sweep.NOTE]
        assert ": 1 run of 1 stack" in first
        finish("mine", "linear", where=where)
        assert experiment(where).tags[sweep.NOTE] == first
        sweep.links(where, "mine")
        assert ": 2 runs of 2 stacks" in experiment(where).tags[sweep.NOTE]


def test_a_view_holds_the_runs_of_its_sweep_alone(uri, finish):
    finish("a")
    finish("ab", "linear")
    finish("it's \"quoted\" `so`, 100%", "window")
    join_sweep(finish("first", "based"), "a", uri)
    assert found(uri, sweep.search("a")) == {"mha mqar seed 0", "based mqar seed 0"}
    assert found(uri, sweep.search("first")) == {"based mqar seed 0"}
    assert found(uri, sweep.search("it's \"quoted\" `so`, 100%")) == {"window mqar seed 0"}


def test_each_task_of_a_sweep_has_a_view(uri, finish):
    finish("mine")
    finish("mine", task="mad/compression")
    links = sweep.links(uri, "mine")
    assert [link.split("=")[1].split("&")[0] for link in links] == [
        views.identity("mine", task) for task in ("mad/compression", "mqar")]
    assert found(uri, sweep.search("mine", "mad/compression")) == {"mha mad/compression seed 0"}


def test_the_description_starts_with_the_newest_and_keeps_what_people_wrote(uri, finish):
    MlflowClient(uri).set_experiment_tag("1", sweep.NOTE, "Our notes.\n\n- a list")
    for name in ("old", "new", "old"):
        finish(name, seed=name == "old")
    first, second, *rest = experiment(uri).tags[sweep.NOTE].splitlines()
    assert first.startswith("- Comparison [old](#/") and second.startswith("- Comparison [new](#/")
    assert rest == ["", "Our notes.", "", "- a list"]
    for i in range(sweep.MOST_LISTED):
        sweep._list(MlflowClient(uri), "1", {f"view-{i}": f"- Comparison view-{i}"})
    lines = experiment(uri).tags[sweep.NOTE].splitlines()
    assert len(lines) == sweep.MOST_LISTED + len(rest) and lines[-4:] == rest


def test_the_newest_comparison_comes_first_and_strange_views_do_no_harm(uri, finish):
    for name in ("old", "new"):
        finish(name)
    for name, text in {"shared": "deflate;eNqrrgUAAXUA+Q==", "list": "[]"}.items():
        MlflowClient(uri).set_experiment_tag("1", views.TAG + name, text)
    assert [name for name, _ in sweep.newest(uri)] == ["new", "old", "all runs"]


def test_without_a_sweep_or_a_quality_the_link_leads_to_the_plain_charts(uri):
    assert sweep.links(uri) == [f"http://127.0.0.1:5000/{views.link('', '1')[1:]}"]
    assert "searchFilter=tags.%60sweep.none%60" in sweep.links(uri, "none")[0]
    assert sweep.newest(uri) == [("all runs", sweep.links(uri)[0])]


@pytest.mark.parametrize(("uri_", "base"), [
    ("http://me:secret@host:5000/", "http://host:5000"), ("https://host/mlflow", "https://host/mlflow"),
    ("postgresql://me:secret@host/db", "http://127.0.0.1:5000"), ("sqlite:////x/mlflow.db", "http://127.0.0.1:5000")])
def test_links_name_the_server_and_no_password(uri_, base):
    assert sweep.base(uri_) == base


def test_a_view_that_mlflow_refuses_harms_no_run(uri, finish, monkeypatch, capsys):
    def refuse(*_):
        raise MlflowException("too long")

    monkeypatch.setattr(MlflowClient, "set_experiment_tag", refuse)
    folder = finish("mine")
    status = json.loads((folder / "status.json").read_text())
    assert (status["status"], status["behind"]) == ("FINISHED", False)
    assert "too long" in capsys.readouterr().err
    assert sweep.links(uri, "mine") == []


def test_a_sweep_has_one_report_and_the_newest(uri, finish, tmp_path):
    finish("mine")
    for name in ("old", "new"):
        folder = tmp_path / name
        (folder / "pictures").mkdir(parents=True)
        (folder / "report.html").write_text(name)
        (folder / "pictures" / f"{name}.png").touch()
        link = sweep.publish(uri, "mine", folder)
    run, = MlflowClient(uri).search_runs(["1"], "tags.`mixerlab.kind` = 'report'")
    kept = Path(run.info.artifact_uri.removeprefix("file://"))
    assert (kept / "report.html").read_text() == "new"
    assert [path.name for path in (kept / "pictures").iterdir()] == ["new.png"]
    place = f"#/experiments/1/runs/{run.info.run_id}/artifacts/report.html?workflowType=machine_learning"
    assert link == f"http://127.0.0.1:5000/{place}"
    assert (run.info.run_name, run.info.status) == ("report of mine", "FINISHED")
    # It has no metrics: nothing to compare.
    assert found(uri, sweep.search("mine")) == {"mha mqar seed 0"}
    assert f"[report]({place})" in experiment(uri).tags[sweep.NOTE]


def test_a_grid_ends_with_its_link(command_line, tmp_path, new_database):
    new_database(tmp_path / "runs")
    code, out, _ = command_line("-m", "seed=0,1", "sweep=mine", "trainer.steps=2", "~hydra.callbacks.report")
    counts, link, served = out.splitlines()[-3:]
    assert (code, counts) == (0, "2 finished, 0 skipped, 0 failed, 0 diverged")
    assert link == f"compare: http://127.0.0.1:5000/{URL.format(views.identity('mine', 'mqar'))}"
    assert served == "... which this serves: python -m experiments.ui"
    assert found(f"sqlite:///{tmp_path}/runs/mlflow.db", sweep.search("mine")) == {"mha mqar seed 0", "mha mqar seed 1"}


@pytest.mark.parametrize(("options", "message"), [
    (["prot=1"], "'prot' is no option here"), (["port=x"], "port='x' must be a whole number"),
    (["mlflow=false"], "mlflow=false names nothing"), (["runs=nowhere"], "has no runs in MLflow yet")])
def test_the_interface_says_what_is_wrong(monkeypatch, capsys, tmp_path, options, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["ui", *options])
    assert ui.main() == 2
    assert message in capsys.readouterr().err


def test_another_server_on_the_port_is_not_taken_for_this_one(monkeypatch, capsys, tmp_path):
    (tmp_path / "mlflow.db").touch()
    monkeypatch.setattr(ui, "newest", lambda uri: [("all runs", "http://127.0.0.1:5000/")])
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        monkeypatch.setattr("sys.argv", ["ui", f"runs={tmp_path}", f"port={port}"])
        assert ui.main() == 2
    printed = capsys.readouterr()
    assert f"port={port} is taken by another program" in printed.err and printed.out == ""


@pytest.mark.parametrize("screen", [True, False])
def test_the_newest_comparison_opens_where_there_is_a_screen(monkeypatch, screen):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.setenv("DISPLAY", ":0" if screen else "")
    ui._open("http://here")
    assert opened == ["http://here"] * screen
