"""Mixers from outside: read once, and a broken one harms nobody."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import config
from mixers import plugins, registry

ROOT = Path(__file__).resolve().parents[2]
MIXER = """\
from __future__ import annotations
from mixers.base import Mixer
from mixers.registry import register


@register("{name}")
class Mine(Mixer):
    def __init__(self, {options}):
        super().__init__()

    def whole(self, x):
        return x.cumsum(1)
"""


def mixer(name: str, options: str = "d_model: int, *, power: int = 2") -> str:
    return MIXER.format(name=name, options=options)


@pytest.fixture
def reading(monkeypatch, tmp_path, caplog):
    """Write files, plug them in, read the registry anew: the names that were added, and what was said."""
    registry.names()
    monkeypatch.setattr(registry, "_classes", {n: registry._classes[n] for n in registry._BUILT_IN})
    monkeypatch.setattr(registry, "_plugged", {})
    monkeypatch.setattr(registry, "_left_out", [])
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def read(files=(), packages=()):
        paths = []
        for name, content in dict(files).items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(content)
            paths.append(str(tmp_path / name))
        for name, entries in dict(packages).items():
            install(tmp_path, name, entries)
        monkeypatch.setenv(plugins.VARIABLE, os.pathsep.join(paths))
        monkeypatch.setattr(registry, "_plugins_read", False)
        caplog.clear()
        return [name for name in registry.names() if name not in registry._BUILT_IN], list(registry._left_out)

    yield read
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def install(folder: Path, name: str, entries: dict[str, str]) -> None:
    """What an installed package leaves: its metadata with entry points."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = "".join(f"{entry} = {value}\n" for entry, value in entries.items())
    (info / "entry_points.txt").write_text(f"[mixerlab.mixers]\n{lines}")


def test_a_file_is_a_mixer_with_its_options_and_defaults(reading):
    two = mixer("two", "d_model, *, sizes=(1, 2)")
    assert reading({"one.py": mixer("one"), "folder/two.py": two}) == (["one", "two"], [])
    assert registry.options("one") == {"power": 2} and registry.options("two") == {"sizes": (1, 2)}
    assert type(registry.build("one", 4, power=3)).__name__ == "Mine"
    with pytest.raises(ValueError, match=r"mixer 'one' has no option 'powr' \(did you mean 'power'\?\)"):
        registry.build("one", 4, powr=3)


def test_a_file_is_read_once(reading, tmp_path):
    counting = f"with open({str(tmp_path / 'count')!r}, 'a') as file: file.write('x')\n"
    reading({"one.py": mixer("one") + counting})
    registry.names()
    registry.get("one")
    assert (tmp_path / "count").read_text() == "x"


def test_files_of_one_name_in_two_folders_are_two_plugins(reading):
    assert reading({"a/mine.py": mixer("one"), "b/mine.py": mixer("two")}) == (["one", "two"], [])


def test_entry_points_may_name_a_module_or_a_class(reading, tmp_path):
    (tmp_path / "module_of_one.py").write_text(mixer("one"))
    (tmp_path / "module_of_two.py").write_text(mixer("two"))
    entries = {"first": "module_of_one", "second": "module_of_two:Mine", "again": "module_of_one:Mine"}
    assert reading(packages={"theirs": entries}) == (["one", "two"], [])
    assert registry.get("two").__module__ == "module_of_two"


def test_an_unset_or_empty_variable_is_no_plugin(reading, monkeypatch):
    assert reading() == ([], [])
    monkeypatch.delenv(plugins.VARIABLE)
    assert list(plugins.sources()) == []


BROKEN = {
    "import fails": (mixer("bad") + "import not_there_at_all\n", "ModuleNotFoundError: No module named 'not_there_"),
    "fails behind the mixer": (mixer("bad") + "1 / 0\n", "ZeroDivisionError"),
    "no Python": ("def (", "SyntaxError"),
    "leaves the program": ("import sys\nsys.exit(3)\n", "SystemExit: 3"),
    "no mixer": ("x = 1\n", "it registers no mixer"),
    "taken name": (mixer("mha"), r"ValueError: mixer name 'mha' is taken by mixers.mha.MultiHeadAttention"),
    "taken by another plug-in": (mixer("fine"), "ValueError: mixer name 'fine' is taken by mixerlab_plugin_fine_"),
    "reserved name": (mixer("mlp"), "must be an identifier and none of mlp"),
    "no class": ('from mixers.registry import register\nregister("bad")(int)\n', "no subclass of"),
    "option without default": (mixer("bad", "d_model: int, *, power: int"), "option 'power' needs a default"),
    "swallows options": (mixer("bad", "d_model: int, **options"), "takes *options: the signature is the config"),
    "default that YAML cannot say": (mixer("bad", "d_model: int, *, f=print"), "option f=<built-in function print>"),
    "no width": (mixer("bad", "*, power: int = 2"), "its constructor needs d_model"),
    "unknown type": (mixer("bad", "d_model: int, *, power: No = 2"), "types of its options cannot be read: name 'No"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_plugin_is_named_and_harms_no_other(reading, caplog, what):
    content, reason = BROKEN[what]
    names, said = reading({"fine.py": mixer("fine"), "broken.py": content, "last.py": mixer("last")})
    assert names == ["fine", "last"]
    (line,) = said
    assert "broken.py" in line and "is left out" in line and reason in line
    assert [record.getMessage() for record in caplog.records if record.name == "mixers.registry"] == [line]
    with pytest.raises(ValueError, match=r"unknown mixer 'bad'.*: mha.*fine, last; .*broken\.py.*is left out"):
        registry.get("bad")
    assert registry.get("mha").__module__ == "mixers.mha"
    # It is not tried again.
    assert registry._left_out == said


def test_a_missing_file_and_a_missing_package_are_named(reading, tmp_path, monkeypatch):
    _, said = reading({"fine.py": mixer("fine")}, {"theirs": {"lost": "nowhere_to_be_found", "no_class": "json:Mine"}})
    assert [line.partition(":")[0] for line in said] == [
        "plug-in lost = nowhere_to_be_found of theirs 1.0 is left out", "plug-in no_class = json"
    ]
    assert "AttributeError" in said[1]
    monkeypatch.setenv(plugins.VARIABLE, os.pathsep.join(f"{tmp_path}/{name}" for name in ("nothing.py", "notes.txt")))
    monkeypatch.setattr(registry, "_plugins_read", False)
    registry._left_out.clear()
    registry.names()
    assert "nothing.py is left out: FileNotFoundError" in registry._left_out[2]
    assert "notes.txt is left out: ImportError: it must be a Python file" in registry._left_out[3]


def test_a_good_module_that_a_broken_one_imports_stays(reading, tmp_path):
    (tmp_path / "good_part.py").write_text(mixer("good"))
    (tmp_path / "bad_part.py").write_text("import good_part\n" + mixer("bad") + "1 / 0\n")
    names, said = reading(packages={"theirs": {"a": "bad_part", "b": "good_part"}})
    assert names == ["good"] and len(said) == 1


def test_a_plugin_with_the_name_of_a_preset_leaves_the_preset_alone(reading):
    reading({"gemma3.py": mixer("gemma3"), "fine.py": mixer("fine")})
    config.register()
    assert "gemma3" not in registry.names() and "fine" in registry.names()
    assert config.preset_layout("gemma3") == "5*window + gqa"
    (line,) = registry._left_out
    assert "gemma3.py is left out: conf/stack/gemma3.yaml has its name" in line


def test_it_is_a_stack_in_grids_and_in_worker_processes(tmp_path):
    """A broken plug-in beside it; workers are started anew, as by joblib, and know the variable alone."""
    (tmp_path / "mine.py").write_text(mixer("mine"))
    (tmp_path / "broken.py").write_text("1 / 0\n")
    variable = os.pathsep.join(str(tmp_path / name) for name in ("broken.py", "mine.py"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), plugins.VARIABLE: variable}

    def call(*words):
        return subprocess.run([sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True)

    tiny = (
        "model.d_model=8", "model.mlp=none", "task.vocabulary=32", "task.length=16", "task.kv=[2]", "task.test_kv=[2]",
        "task.rows_per_suite=8", "trainer.steps=1", "trainer.batch_size=2", "trainer.threads=1", "mlflow=false",
    )
    grid = call("-m", "experiments.train", "-m", "stack=mine,gqa", "model.mixers.mine.power=2,3", *tiny)
    assert grid.returncode == 0, grid.stdout + grid.stderr
    # The unused option of gqa's runs does not count: two of its four cells are one run.
    assert "finished" in grid.stdout and grid.stderr.count("broken.py is left out: ZeroDivisionError") == 1
    assert len(list((tmp_path / "runs").glob("*/params.json"))) == 3
    wrong = call("-m", "experiments.train", "stack=mine", "model.mixers.mine.powr=2", *tiny)
    assert wrong.returncode == 2 and "did you mean 'model.mixers.mine.power'?" in wrong.stderr
    (tmp_path / "work.py").write_text(
        "import multiprocessing as m\nfrom concurrent.futures import ProcessPoolExecutor as P\n"
        "from experiments import cli, config\n"
        "def key(seed): return config.plan(cli.composed('train', ['stack=mine', f'seed={seed}'])).label\n"
        "if __name__ == '__main__':\n    with P(2, m.get_context('spawn')) as pool: print(*pool.map(key, range(2)))\n"
    )
    assert call("work.py").stdout.strip() == "mine mine"
