"""The report on its way into MLflow: at a grid's end and by command, and never in the way of either."""

from __future__ import annotations

import json
import subprocess

import kaleido
import pytest
from omegaconf import OmegaConf

from analysis import at_end, publish, report
from analysis.runs import load


@pytest.fixture
def sent(monkeypatch):
    """What MLflow would get: (uri, sweep, names of the files)."""
    calls = []

    def take(uri, sweep, folder):
        files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        calls.append((uri, sweep, files))
        return "http://there"

    monkeypatch.setattr(publish, "publish", take)
    return calls


@pytest.fixture
def draws(monkeypatch):
    """Pictures without a browser."""
    monkeypatch.setattr(kaleido, "write_fig_from_object_sync",
                        lambda asked: [one["path"].write_bytes(b"png") for one in asked])


def tracked(folder, uri, run_id="an id"):
    status = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps(status | {"mlflow_run_id": run_id, "mlflow_uri": uri}))


def test_the_command_publishes_the_page_and_every_picture(write, runs, sent, draws, capsys):
    for stack in ("mha", "linear"):
        tracked(write(stack), "http://host:5000")
    assert report.main(["--runs", str(runs), "--sweep", "grid"]) == 0
    (uri, sweep, files), = sent
    assert (uri, sweep) == ("http://host:5000", "grid")
    pictures = report.figures(load(runs))
    assert pictures and files == sorted(["report.html", *(f"pictures/{name}.png" for name in pictures)])
    assert capsys.readouterr().out.splitlines()[-1] == "report in MLflow: http://there"


@pytest.mark.parametrize("options", [["--sweep", "grid", "--no-mlflow"], []])
def test_a_page_alone_stays_here(write, runs, sent, options):
    tracked(write(), "http://host:5000")
    assert report.main(["--runs", str(runs), *options]) == 0
    assert sent == []


def test_runs_that_are_not_in_mlflow_have_no_report_there(write, runs, sent):
    write()
    assert publish.report(load(runs), runs, "grid", runs / "report.html") == []
    assert sent == []


def test_the_database_may_have_moved_with_its_runs(write, runs):
    tracked(write(started="2025-01-01"), "http://old")
    tracked(write(started="2025-01-02"), f"sqlite:///{runs}/elsewhere/mlflow.db")
    assert publish.place(load(runs), runs) is None
    (runs / "mlflow.db").touch()
    assert publish.place(load(runs), runs) == f"sqlite:///{runs}/mlflow.db"


def test_without_a_browser_the_page_goes_alone_and_a_line_says_so(write, runs, sent, monkeypatch):
    def nothing(_):
        raise RuntimeError("Chrome was not found\nand more")

    monkeypatch.setattr(kaleido, "write_fig_from_object_sync", nothing)
    tracked(write(), "http://host:5000")
    report.main(["--runs", str(runs), "--no-mlflow"])
    first, last = publish.report(load(runs), runs, "grid", runs / "report.html")
    assert first == "no PNGs beside the report, which need Chrome or Chromium: RuntimeError: Chrome was not found"
    assert last == "report in MLflow: http://there" and sent[0][2] == ["report.html"]


def test_a_server_that_is_away_is_a_warning(write, runs, monkeypatch, draws, capsys):
    def away(*_):
        raise ConnectionError("no route")

    monkeypatch.setattr(publish, "publish", away)
    tracked(write(), "http://host:5000")
    assert report.main(["--runs", str(runs), "--sweep", "grid"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "warning: the report is not in MLflow: ConnectionError: no route"


@pytest.fixture
def commands(monkeypatch):
    """Runs nothing, and ends as `code` and `stderr` say."""
    done = subprocess.CompletedProcess([], 0, "a table\nreport: page\nreport in MLflow: http://there\n", "")
    calls = []

    def run(command, **_):
        calls.append(command[1:])
        return done

    monkeypatch.setattr(subprocess, "run", run)
    return calls, done


@pytest.mark.parametrize("options", [{"sweep": None, "mlflow": True}, {"sweep": "a", "mlflow": False}])
def test_a_grid_without_a_name_or_mlflow_ends_without_a_report(commands, options):
    at_end.Report().on_multirun_end(OmegaConf.create(options | {"runs": "runs"}))
    assert commands[0] == []


def test_a_grid_ends_with_its_report(commands, capsys):
    at_end.Report().on_multirun_end(OmegaConf.create({"sweep": "a b", "mlflow": True, "runs": "r"}))
    assert commands[0] == [["-m", "analysis.report", "--runs=r", "--sweep=a b"]]
    assert capsys.readouterr().out == "\nreport: page\nreport in MLflow: http://there\n"


def test_a_failing_report_is_a_line_under_the_grid(commands, capsys):
    commands[1].returncode, commands[1].stderr = 1, "Traceback\nValueError: broken\n"
    at_end.Report().on_multirun_end(OmegaConf.create({"sweep": "a", "mlflow": True, "runs": "r"}))
    assert capsys.readouterr().err == "warning: no report of the sweep a: ValueError: broken\n"
