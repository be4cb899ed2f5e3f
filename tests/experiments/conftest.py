from __future__ import annotations

import json
import sqlite3
import sys
from contextlib import closing
from functools import cache
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from experiments import cli, config, train
from experiments.tracking import connect

# A run of a second: 4 steps of 4 rows.
TINY = (
    "model.d_model=8", "model.mlp=none", "task.vocabulary=32", "task.length=16", "task.kv=[2]", "task.test_kv=[2,4]",
    "task.rows_per_suite=8", "trainer.steps=4", "trainer.batch_size=4", "trainer.log_every=2",
    "trainer.validate_every=2", "trainer.threads=1",
)


@cache
def composed(stack: str) -> DictConfig:
    """The config of a tiny run; Hydra takes a quarter of a second for it."""
    return OmegaConf.create(cli.composed("train", [f"stack={stack}", *TINY]))


@pytest.fixture
def plan_of():
    """The plan of a tiny run with some options changed: stack=NAME, a.b=value, +a.new=value, ~a.b."""

    def plan(*overrides):
        changes = [override.lstrip("+").partition("=") for override in overrides]
        tree = composed(next((value for name, _, value in changes if name == "stack"), "mha")).copy()
        for name, _, value in changes:
            if name.startswith("~"):
                *parents, last = name[1:].split(".")
                del (OmegaConf.select(tree, ".".join(parents)) if parents else tree)[last]
            elif name != "stack":
                OmegaConf.update(tree, name, OmegaConf.create(f"value: {value}")._get_node("value"))
        return config.plan(OmegaConf.to_container(tree))

    return plan


@pytest.fixture
def command_line(monkeypatch, tmp_path, capsys):
    """`python -m experiments.train ...` in this process and an empty folder: exit code, what it printed, its errors."""

    def call(*arguments, tiny=True):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["train", *(TINY if tiny else ()), *arguments])
        capsys.readouterr()
        code = train.main()
        return code, *capsys.readouterr()

    return call


@pytest.fixture(scope="session")
def template(tmp_path_factory):
    """A database with our experiment: MLflow takes seconds to make one."""
    database = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    connect(f"sqlite:///{database}")
    return database


@pytest.fixture
def new_database(template):
    """Puts a copy of it into a folder, which is also the one of its artifacts."""

    def copy(folder):
        folder.mkdir(exist_ok=True)
        with closing(sqlite3.connect(template)) as source, closing(sqlite3.connect(folder / "mlflow.db")) as target:
            source.backup(target)
            target.execute("update experiments set artifact_location = ?", [(folder / "artifacts").as_uri()])
            target.commit()
        return folder / "mlflow.db"

    return copy


def events(folder: Path) -> list[dict]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def read_events():
    return events
