"""Learning rates are chosen on validation and seeds of their own, with as many trials for every stack."""

from __future__ import annotations

import builtins
import json
import math
import shlex
import threading
from dataclasses import asdict
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from analysis.runs import load
from experiments import cli, config, module, runs, trials
from experiments.outcomes import outcomes
from experiments.record import lock, read_status
from experiments.signals import Terminated
from experiments.tuning import Search, Tuned

GRID = {"method": "grid", "values": (1e-3, 3e-3, 1e-2), "seeds": (100, 101), "monitor": "val/loss"}
OPTUNA = {"method": "optuna", "low": 1e-4, "high": 1e-1, "trials": 12, "seeds": (100,), "monitor": "val/loss"}


def valley(rates):
    """A loss whose best rate is 10^-2.5."""
    return [(math.log10(rate) + 2.5) ** 2 for rate in rates]


@pytest.mark.parametrize(("change", "message"), [
    ({"values": (1e-3,)}, r"tune\.values=\[0.001\] must be two different rates or more"),
    ({"values": (1e-3, 1e-3)}, "two different rates or more"),
    ({"values": (1e-3, -1.0)}, r"tune\.values=\[0.001,-1\] must be above 0"),
    ({"values": None}, r"tune\.values is missing"),
    ({"low": 1e-3}, r"tune\.low=0.001 needs tune=optuna_lr"),
    ({"seeds": (1, 1)}, r"tune\.seeds=\[1,1\] must be one seed or more, each once"),
    ({"seeds": ()}, "one seed or more"),
    ({"monitor": "eval/kv4/loss"}, r"tune\.monitor=eval/kv4/loss must be a metric of validation"),
    ({"method": None}, r"tune\.values=\[0.001,0.003,0.01\] needs tune=lr"),
    (OPTUNA | {"values": None, "low": 0.5}, r"tune\.low=0.5 must be above 0 and below tune.high=0.1"),
    (OPTUNA | {"values": None, "trials": 1}, r"tune\.trials=1 must be a whole number of at least 2"),
])  # fmt: skip
def test_wrong_options_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        Search(**GRID | change)


def test_a_rate_is_as_good_as_the_mean_of_its_runs_and_as_bad_as_the_worst_where_one_is_lost():
    search = Search(**GRID)
    assert search.score([0.5, 1.0]) == 0.75
    assert search.score([0.1, None]) == search.score([0.1, math.nan]) == math.inf
    assert Search(**GRID | {"monitor": "val/accuracy"}).score([0.5, 1.0]) == -0.75


@pytest.mark.parametrize(("scores", "lr", "edge"), [
    ([(1e-3, 2.0), (3e-3, 1.0), (1e-2, 3.0)], 3e-3, None),
    ([(1e-3, 2.0), (3e-3, 4.0), (1e-2, 1.0)], 1e-2, "highest"),
    ([(1e-2, 2.0), (3e-3, 4.0), (1e-3, 1.0)], 1e-3, "lowest"),
    ([(1e-2, 1.0), (3e-3, 1.0), (1e-3, 2.0)], 3e-3, None),
    ([(1e-3, math.inf), (3e-3, 5.0), (1e-2, math.inf)], 3e-3, None),
])  # fmt: skip
def test_the_best_rate_and_whether_it_is_at_an_edge(scores, lr, edge):
    tuned = Tuned(Search(**GRID), scores, [], 0, 0.0, 0.0)
    assert (tuned.lr, tuned.edge, tuned.record["edge"]) == (lr, edge, edge)
    assert ("may lie beyond" in str(tuned)) == (edge is not None)
    assert [score for _, score in tuned.record["scores"]] == [None if s == math.inf else s for _, s in scores]


def test_optuna_finds_the_valley_with_its_trials_and_repeats_itself():
    search, asked = Search(**OPTUNA), []
    found = search.find(lambda rates: asked.extend(rates) or valley(rates))
    assert len(found) == len(asked) == 12 and min(asked) >= 1e-4 and max(asked) <= 1e-1
    best = min(found, key=lambda pair: pair[1])[0]
    assert abs(math.log10(best) + 2.5) < 0.25
    assert search.find(valley) == found
    # The first half is the same whatever the results: no stack starts at better rates.
    assert [rate for rate, _ in search.find(lambda rates: [math.inf])][:6] == asked[:6]


def test_optuna_that_is_not_installed_is_named(monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name == "optuna":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match=r"pip install 'mixerlab\[tune\]'"):
        Search(**OPTUNA).find(valley)


class Trial:
    """As much of a plan as `complete` looks at."""

    def __init__(self, folder):
        self.folder = folder


def test_trials_of_other_jobs_are_waited_for_and_not_made_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(trials, "_LOOK", 0.01)
    mine, done = [Trial(tmp_path / name) for name in "abc"], []
    taken, seen = threading.Event(), threading.Event()

    def other():
        with lock(tmp_path / "a"):
            taken.set()
            seen.wait(10)
            done.append("a of the other")

    def run(trial):
        done.append(trial.folder.name)
        if trial.folder.name == "c":
            seen.set()

    worker = threading.Thread(target=other)
    worker.start()
    taken.wait(10)
    trials.complete(mine, run, lambda trial: any(name[0] == trial.folder.name for name in done))
    worker.join()
    assert done == ["b", "c", "a of the other"]


def test_other_processes_of_a_trial_train_what_it_is(plan_of):
    plan = plan_of("tune.method=grid", "tune.values=[1e-3,1e-2]", "tune.seeds=[7]", "tune.monitor=val/loss")
    trial = plan.trial(1e-2, 7)
    assert (trial.optimizer.lr, trial.settings.seed, trial.config["optimizer"]["lr"]) == (1e-2, 7, 1e-2)
    # What experiments.ranks tells them.
    assert config.plan(asdict(trial.settings)).key == trial.key == plan_of("seed=7", "optimizer.lr=1e-2").key


def test_a_tuned_run_whose_process_is_killed_is_on_record_as_failed(tmp_path):
    tree = cli.composed("train", ["tune=lr", f"runs={tmp_path}", "mlflow=false"])
    outcome = runs.lost(tree, "the command", "its process ended without a word")
    assert outcome.status == "failed" and read_status(Path(outcome.folder)).reason.endswith("without a word")
    assert list(load(tmp_path).runs["status"]) == ["FAILED"]


def records(folder):
    """folder -> (status, params, last value of every metric), read by hand."""
    found = {}
    for path in (folder / "runs").glob("*/status.json"):
        lines = [json.loads(line) for line in (path.parent / "metrics.jsonl").read_text().splitlines()]
        last = {name: value for line in lines for name, value in line["metrics"].items()}
        params = json.loads((path.parent / "params.json").read_text())
        found[path.parent.name] = json.loads(path.read_text()), params, last
    return found


def test_every_stack_gets_the_rate_that_its_trials_say(command_line, tmp_path):
    grid = ("mlflow=false", "-m", "stack=mha,linear", "tune=lr", "tune.values=[3e-3,1e-1]", "tune.seeds=[100,101]",
            "sweep=fair", "trainer.steps=8")  # fmt: skip
    code, out, _ = command_line(*grid)
    assert code == 0
    found = records(tmp_path)
    made = [entry for entry in found.values() if entry[0]["trial"]]
    results = [entry for entry in found.values() if not entry[0]["trial"]]
    assert (len(made), len(results)) == (2 * 2 * 2, 2)
    for stack in ("mha", "linear"):
        tried: dict[float, list[float]] = {}
        for status, params, last in made:
            if params["stack"] == stack:
                assert params["seed"] in (100, 101) and status["sweeps"] == [] and status["trials"] == ["fair"]
                tried.setdefault(params["lr"], []).append(last["val/loss"])
        assert {rate: len(values) for rate, values in tried.items()} == {3e-3: 2, 1e-1: 2}
        best = min(tried, key=lambda rate: sum(tried[rate]))
        assert [(p["lr"], p["seed"]) for _, p, _ in results if p["stack"] == stack] == [(best, 0)]

    # The cost is that of all four: 8 steps of 4 rows of 16.
    folders = [tmp_path / "runs" / key for key, entry in found.items() if not entry[0]["trial"]]
    choices = [json.loads((folder / "tuning.json").read_text()) for folder in folders]
    assert {choice["tokens"] for choice in choices} == {4 * 8 * 4 * 16}
    assert [choice["sweeps"] for choice in choices] == [["fair"], ["fair"]]
    for choice in choices:
        flops = [found[key][2]["complexity/flops_per_token_train"] * 8 * 4 * 16 for key in choice["runs"]]
        assert choice["flops"] == pytest.approx(sum(flops)) and choice["seconds"] > 0

    # A report has the results alone, and says what they cost.
    reported = load(tmp_path / "runs")
    assert list(reported.runs["seed"]) == [0, 0]
    # Every trial is in the grid's folder, once; the table says which rate it was.
    (folder,) = (tmp_path / "runs" / ".grids").iterdir()
    assert len(outcomes(folder, "trials")) == 8 and "8 of 8 trials made" in out
    assert [outcome.text.count("best of 2") for outcome in outcomes(folder)] == [1, 1]

    # The key is that of the same run with the rate by hand; and nothing is made twice.
    lr = next(params["lr"] for _, params, _ in results if params["stack"] == "mha")
    _, out, _ = command_line("mlflow=false", "stack=mha", f"optimizer.lr={lr}", "trainer.steps=8")
    assert "skipped, finished" in out
    _, out, _ = command_line(*grid)
    assert " FINISHED in " not in out and out.count("skipped, finished") == 2


def test_a_trial_that_is_asked_for_as_a_result_becomes_one(command_line, tmp_path, new_database):
    new_database(tmp_path / "runs")
    command_line("tune=lr", "tune.values=[1e-3,1e-2]", "tune.seeds=[7]", "sweep=first")
    found = records(tmp_path)
    client = MlflowClient(f"sqlite:///{tmp_path}/runs/mlflow.db")
    tags = {key: client.get_run(status["mlflow_run_id"]).data.tags for key, (status, *_) in found.items()}
    made = [key for key, (status, *_) in found.items() if status["trial"]]
    (result,) = set(found) - set(made)
    assert [("sweep" in tags[key], tags[key]["trial_of"]) for key in made] == [(False, "first")] * 2
    assert tags[result]["sweep"] == "first" and "trial_of" not in tags[result] and "best of 2" in tags[result]["tuning"]

    key = next(key for key in made if found[key][1]["lr"] == 1e-3)
    words = shlex.split(found[key][0]["command"])[3:]
    assert not [word for word in words if word.startswith("tune")]
    _, out, _ = command_line(*words, tiny=False)
    assert "skipped, finished" in out and key in out
    status = read_status(tmp_path / "runs" / key)
    assert (status.trial, status.sweep, status.sweeps, status.trials) == (False, "first", ["first"], ["first"])
    tags = client.get_run(status.mlflow_run_id).data.tags
    assert tags["sweep"] == "first" and "trial_of" not in tags
    assert len(load(tmp_path / "runs").runs) == 2


def test_rates_that_diverge_lose_and_where_all_do_the_run_says_so(command_line, tmp_path):
    tune = ("mlflow=false", "trainer.steps=20", "tune=lr", "tune.seeds=[7]")
    code, out, _ = command_line(*tune, "tune.values=[1e30,1e-3,1e31]")
    assert code == 0 and "lr 0.001: best of 3 by val/loss, seed 7, 2 diverged or failed" in out
    code, out, _ = command_line(*tune, "-m", "seed=0,1", "tune.values=[1e30,1e31]")
    assert code == 1
    assert out.count("all 2 trials of tuning came to nothing: ") == 4 and "not finite" in out
    reported = load(tmp_path / "runs").runs
    assert sorted(reported["status"]) == ["FAILED", "FAILED", "FINISHED"]
    # At last there is a rate: what is on record of the failure goes.
    command_line(*tune, "seed=1", "tune.values=[1e30,1e-3]")
    assert sorted(load(tmp_path / "runs").runs["status"]) == ["FAILED", "FINISHED", "FINISHED"]
    assert "0 finished, 0 skipped, 2 failed, 0 diverged" in out


def test_a_trial_that_fails_is_tried_once_a_grid(command_line, tmp_path, monkeypatch):
    real, asked = module.train, []

    def sometimes(plan, *rest):
        asked.append((plan.optimizer.lr, plan.settings.seed))
        if plan.optimizer.lr == 0.1:
            raise RuntimeError("out of luck")
        return real(plan, *rest)

    grid = ("mlflow=false", "-m", "seed=0,1", "tune=lr", "tune.values=[1e-2,0.1]", "tune.seeds=[7]")
    monkeypatch.setattr(module, "train", sometimes)
    assert command_line(*grid)[0] == 0
    assert asked == [(1e-2, 7), (0.1, 7), (1e-2, 0), (1e-2, 1)]
    asked.clear()
    # Records tell whole seconds: what failed in this one could be of the next grid.
    monkeypatch.setattr(trials, "ended_since", lambda status, moment: False)
    command_line(*grid)
    assert asked[0] == (0.1, 7)


def test_a_grid_that_is_killed_in_its_tuning_goes_on_there(command_line, tmp_path, monkeypatch):
    real, made = module.train, []

    def until(plan, *rest):
        if len(made) == 1:
            raise Terminated
        made.append(plan.key)
        return real(plan, *rest)

    grid = ("mlflow=false", "-m", "seed=0,1", "tune=lr", "tune.values=[1e-3,1e-2]", "tune.seeds=[7]")
    monkeypatch.setattr(module, "train", until)
    assert command_line(*grid)[0] == 143
    monkeypatch.setattr(module, "train", lambda plan, *rest: made.append(plan.key) or real(plan, *rest))
    assert command_line(*grid)[0] == 0
    assert len(made) == len(set(made)) == 2 + 2


@pytest.mark.parametrize(("words", "message"), [
    (("seed=0,7",), r"error: tune.seeds=[7] must hold no seed of the results: seed=7 is one"),
    (("stack=mha,linear", "tune.seeds=[0]"), "error: tune.seeds=[0] must hold no seed of the results: seed=0 is one"),
    (("tune.seeds=[-5]",), "error: tune.seeds=-5 must be a whole number of at least 0"),
    (("optimizer.lr=1e-3,1e-2",), "error: optimizer.lr=0.001 is what tune chooses: leave one of them out"),
    (("tune.monitor=val/loss,val/accuracy",), "error: tune.monitor must be the same for the whole grid"),
    (("tune.values=[1]",), "error: tune.values=[1] must be two different rates or more"),
])  # fmt: skip
def test_a_grid_that_cannot_be_tuned_fairly_does_not_start(command_line, tmp_path, words, message):
    code, _, err = command_line("mlflow=false", "-m", "tune=lr", "tune.seeds=[7]", *words)
    assert code == 2 and message in err and len(err.splitlines()) == 1
    assert not list(Path(tmp_path).glob("runs/*/status.json"))


def test_a_seed_of_the_results_cannot_be_one_of_tuning_in_a_run_alone(command_line):
    code, _, err = command_line("mlflow=false", "seed=7", "tune=lr", "tune.seeds=[7]")
    assert code == 2 and "tune.seeds=[7] must hold no seed of the results: seed=7 is one" in err


def test_a_rate_is_not_both_given_and_tuned_in_a_run_alone(command_line):
    code, _, err = command_line("mlflow=false", "tune=lr", "optimizer.lr=1e-3")
    assert code == 2 and err == "error: optimizer.lr is what tune chooses: leave one of them out\n"


def test_a_metric_that_the_task_has_not_is_named(command_line):
    code, _, err = command_line("mlflow=false", "tune=lr", "tune.values=[1e-3,1e-2]", "tune.seeds=[7]",
                                "tune.monitor=val/bits_per_byte")  # fmt: skip
    assert code == 2 and "tune.monitor='val/bits_per_byte' is no metric of this task; it has val/loss" in err
