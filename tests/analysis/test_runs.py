from __future__ import annotations

import json
import math

import numpy as np
import pytest

from analysis.report import build
from analysis.runs import counted, load, only, select


def cells(runs):
    return list(load(runs).runs["cell"])


def problems(runs):
    return load(runs).problems["problem"].tolist()


def test_a_record_comes_back_as_params_last_values_and_curves(write, runs):
    folder = write("mha", 3, curve={100: 0.25, 200: 0.75}, accuracy={16: 0.5})
    records = load(runs)
    run = records.runs.iloc[0]
    assert (run["run"], run["status"], run["stack"], run["seed"], run["sweep"]) == (
        folder.name,
        "FINISHED",
        "mha",
        3,
        "grid",
    )
    assert (run["last_step"], run["last_tokens"], run["val/accuracy"], run["eval/kv16/accuracy"]) == (
        200,
        2000,
        0.75,
        0.5,
    )
    assert (run["task.kv"], run["trainer.patience"]) == ("[4, 8, 16]", "null")
    curve = records.curves[records.curves["metric"] == "val/accuracy"]
    assert curve[["run", "step", "tokens", "value"]].values.tolist() == [
        [folder.name, 100, 1000, 0.25],
        [folder.name, 200, 2000, 0.75],
    ]
    assert records.environment.loc[folder.name, "python"] == "3.11.2"
    assert problems(runs) == []


def test_a_line_cut_short_by_a_kill_is_named_and_the_rest_used(write, runs):
    file = write(curve={100: 0.25, 200: 0.75}) / "metrics.jsonl"
    file.write_text(file.read_text() + '{"step": 300, "tokens": 3000, "metr')
    assert load(runs).runs["val/accuracy"].tolist() == [0.75]
    (problem,) = problems(runs)
    assert "metrics.jsonl is broken in line 5 of 5" in problem


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "3",
        '{"step": 1}',
        '{"step": 1, "tokens": 2, "metrics": {"val/loss": null}}',
        '{"step": 1, "tokens": Infinity, "metrics": {"val/loss": 1.0}}',
        "\0\0\0",
    ],
)
def test_a_line_that_is_no_event_is_named(write, runs, line):
    file = write() / "metrics.jsonl"
    file.write_text(line + "\n" + file.read_text())
    assert "line 1 of" in problems(runs)[0]
    assert load(runs).runs["val/accuracy"].tolist() == [1.0]


def test_what_a_resumed_run_logs_again_replaces_the_first_try(write, runs):
    file = write(curve={100: 0.25, 200: 0.75}) / "metrics.jsonl"
    file.write_text(
        file.read_text() + json.dumps({"step": 200, "tokens": 2000, "metrics": {"val/accuracy": 0.5}}) + "\n"
    )
    records = load(runs)
    assert records.curves[records.curves["metric"] == "val/accuracy"]["value"].tolist() == [0.25, 0.5]
    assert records.runs["val/accuracy"].tolist() == [0.5]


def test_values_that_are_not_finite_are_left_out_and_named(write, runs):
    file = write(curve={100: 0.25}) / "metrics.jsonl"
    file.write_text(
        file.read_text() + '{"step": 200, "tokens": 2000, "metrics": {"val/accuracy": NaN, "val/loss": Infinity}}\n'
    )
    records = load(runs)
    assert records.runs["val/accuracy"].tolist() == [0.25] and "val/loss" not in records.metrics
    assert np.isfinite(records.curves["value"]).all()
    assert sorted(p.split(" is not")[0] for p in problems(runs)) == ["val/accuracy", "val/loss"]


@pytest.mark.parametrize("name", ["status.json", "params.json"])
@pytest.mark.parametrize("content", [None, "", '{"status": "FINI', "[]"])
def test_a_record_without_status_or_params_is_listed_and_not_counted(write, runs, name, content):
    write(seed=0)
    folder = write(seed=1)
    (folder / name).unlink() if content is None else (folder / name).write_text(content)
    records = load(runs)
    assert records.runs["status"].tolist() == ["FINISHED", "UNKNOWN"]
    assert records.runs["cell"].tolist() == ["mha", f"run {folder.name}"]
    assert counted(records).runs["seed"].tolist() == [0]
    assert records.problems["run"].tolist() == [folder.name] and name in problems(runs)[0]


def test_a_run_without_metrics_is_loaded_and_named(write, runs):
    (write() / "metrics.jsonl").unlink()
    assert math.isnan(load(runs).runs["last_tokens"].iloc[0])
    assert "metrics.jsonl is missing" in problems(runs)[0]


def test_other_folders_and_files_are_no_runs(write, runs):
    write()
    (runs / "artifacts").mkdir()
    (runs / "mlflow.db").write_text("")
    assert len(load(runs).runs) == 1


def test_a_folder_without_runs_gives_empty_tables(tmp_path):
    records = load(tmp_path)
    assert records.runs.empty and records.curves.empty and records.environment.empty and records.problems.empty
    assert {"run", "cell", "stack", "seed", "status"} <= set(records.runs)


def test_a_missing_folder_is_an_error_that_names_it(tmp_path):
    with pytest.raises(ValueError, match="nowhere is not a folder"):
        load(tmp_path / "nowhere")


def test_a_cell_is_a_stack_where_nothing_else_varies_within_it(write, runs):
    write("mha", 0, params={"lr": 0.1})
    write("mha", 1, params={"lr": 0.1})
    write("linear", 0, params={"lr": 0.2})
    assert cells(runs) == ["mha", "mha", "linear"]


def test_a_param_that_varies_within_a_stack_is_in_the_name_once(write, runs):
    write("mha", params={"lr": 0.1, "optimizer.lr": 0.1})
    write("mha", params={"lr": 0.2, "optimizer.lr": 0.2})
    assert cells(runs) == ["mha (lr=0.1)", "mha (lr=0.2)"]


def test_a_number_has_one_spelling(write, runs):
    for seed, (dropout, kv) in enumerate(((0, [2, 4]), (0.0, [2.0, 4]))):
        write("mha", seed, params={"model.mixers.mha.dropout": dropout, "task.kv": kv})
    assert cells(runs) == ["mha", "mha"]


def test_a_layout_has_one_spelling_and_seeds_of_two_are_of_one_cell(write, runs):
    for seed, spelled in enumerate(("mha", "2*mha", "mha + mha")):
        write("mha", seed, params={"layout": spelled, "model.layout": spelled, "n_layers": 2})
    assert cells(runs) == ["mha"] * 3
    write("mha", 3, params={"layout": "mha", "model.layout": "mha", "n_layers": 3})
    assert len(set(cells(runs))) == 2


def test_params_of_one_last_name_keep_their_full_names(write, runs):
    for a, b in ((1, 1), (1, 2), (2, 1)):
        write("mha", params={"x.width": a, "y.width": b})
    assert cells(runs) == [f"mha (x.width={a}, y.width={b})" for a, b in ((1, 1), (1, 2), (2, 1))]


def test_cells_are_named_by_what_varies_in_the_selection(write, runs):
    write(sweep="a", params={"lr": 0.1})
    write(sweep="b", params={"lr": 0.2})
    records = load(runs)
    assert list(select(records, "a").runs["cell"]) == ["mha"]
    assert list(only(records, records.runs[records.runs["lr"] == 0.2]).runs["cell"]) == ["mha"]


def test_a_refused_run_with_few_params_does_not_rename_the_others(write, runs):
    write("mha", 0)
    folder = write("mha", 1, status="FAILED")
    (folder / "params.json").write_text(json.dumps({"stack": "mha", "layout": "mha", "task": "mqar", "seed": 1}))
    assert cells(runs) == ["mha", "mha"]


def test_a_finished_run_that_lacks_a_param_is_a_cell_of_its_own(write, runs):
    write("mha", 0, params={"bias": False})
    write("mha", 1)
    assert cells(runs) == ["mha (bias=false)", "mha (bias=?)"]


def test_an_integer_stays_one_beside_a_run_that_lacks_it(write, runs):
    write("mha", params={"window": 16})
    write("mha", params={"window": 32})
    write("linear")
    assert cells(runs) == ["mha (window=16)", "mha (window=32)", "linear"]


def test_a_sweep_is_selected_with_all_its_tables(write, runs):
    write("mha", sweep="one")
    kept = write("linear", sweep="two")
    (kept / "environment.json").unlink()
    records = select(load(runs), "two")
    for names in (records.runs["run"], records.curves["run"].unique(), records.problems["run"]):
        assert list(names) == [kept.name]


def test_a_run_of_several_sweeps_is_in_each_of_them(write, runs):
    folder = write("mha", sweep="one")
    status = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps(status | {"sweeps": ["one", "two"]}))
    assert all(list(select(load(runs), name).runs["run"]) == [folder.name] for name in ("one", "two"))


def test_an_unknown_sweep_is_answered_with_the_nearest(write, runs):
    write(sweep="quickstart")
    with pytest.raises(ValueError, match=r"'quikstart'.*did you mean 'quickstart'"):
        select(load(runs), "quikstart")


def test_one_finished_run_a_cell_and_seed_is_counted_the_newest(write, runs):
    write("mha", 0, accuracy={16: 0.2}, started="2025-01-02T00:00:00+00:00")
    write("mha", 0, accuracy={16: 0.1}, started="2025-01-01T00:00:00+00:00")
    write("mha", 1, accuracy={16: 0.3})
    write("mha", 2, status="FAILED")
    records = counted(load(runs))
    assert records.runs["eval/kv16/accuracy"].tolist() == [0.2, 0.3]
    assert set(records.curves["run"]) == set(records.runs["run"])


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ({"started": 5, "sweeps": 7}, "started, sweeps"),
        ({"sweeps": "grid", "command": ["x"]}, "command, sweeps"),
        ({"status": ["FINISHED"], "reason": {"a": 1}}, "status, reason"),
    ],
)
def test_entries_of_a_status_that_are_not_of_their_type_are_left_out_and_named(write, runs, entries, named):
    file = write(seed=0) / "status.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))
    write(seed=1)
    assert problems(runs) == [f"status.json has no sense in {named}: left out"]
    records = load(runs)
    assert records.runs["status"].tolist() == ["UNKNOWN" if "status" in entries else "FINISHED", "FINISHED"]
    assert len(build(records)) and records.runs["sweeps"].tolist() == [("grid",), ("grid",)]


@pytest.mark.parametrize("content", ['{"lr": 1}', '{"lr": ', "[]"])
def test_a_choice_of_a_learning_rate_that_is_not_whole_is_named(write, runs, content):
    (write() / "tuning.json").write_text(content)
    records = load(runs)
    assert records.problems["problem"].str.startswith("tuning.json").tolist() == [True]
    assert records.runs["tuning"].isna().all() and len(build(records))


def test_tokens_are_those_trained_though_what_was_logged_last_is_not_finite(write, runs):
    file = write(curve={}) / "metrics.jsonl"
    file.write_text(file.read_text() + '{"step": 900, "tokens": 9000, "metrics": {"val/accuracy": NaN}}\n')
    assert load(runs).runs["last_tokens"].tolist() == [9000]
