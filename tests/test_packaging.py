"""What is installed is what is declared, and what is declared is what is used."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import hatchling.build
import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("analysis", "arch", "conf", "experiments", "kernels", "mixers")
PYPROJECT = (ROOT / "pyproject.toml").read_text()
PROJECT = tomllib.loads(PYPROJECT)["project"]
EXTRAS = PROJECT["optional-dependencies"]
# What may be loaded where there is nothing but a GPU and torch.
BARE = ("kernels", "mixers", "arch")
# Without triton, which torch's FLOP counter loads where it is installed.
HEAVY = ("hydra", "lightning", "mlflow", "omegaconf", "pandas", "plotly", "scipy")


def normal(name: str) -> str:
    """A distribution's name as the package index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(*lists: list[str]) -> dict[str, Requirement]:
    """Distribution -> requirement."""
    requirements = [Requirement(line) for lines in lists for line in lines]
    return {normal(r.name): r for r in requirements}


RUNTIME = declared(PROJECT["dependencies"])
OPTIONAL = declared(*(lines for extra, lines in EXTRAS.items() if extra != "dev"))
DEVELOPMENT = declared(EXTRAS["dev"])


def reason(requirement: Requirement) -> str:
    """The comment behind a requirement's line in pyproject.toml."""
    found = re.search(rf'^ *"{re.escape(requirement.name)}(?![\w-])[^"]*", *# *(.*)$', PYPROJECT, re.MULTILINE)
    return found.group(1) if found else ""


def pins(name: str) -> dict[str, Version]:
    """Distribution -> version of a constraints file."""
    lines = [line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")]
    return {normal(line.split("==")[0]): Version(line.split("==")[1]) for line in lines}


def imports(tree: ast.AST, lazy: bool) -> Iterator[str]:
    """Top-level names that a module imports; `lazy` adds those inside functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").split(".")[0]
        elif lazy or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from imports(node, lazy)


@cache
def providers() -> dict[str, frozenset[str]]:
    """Imported name -> the installed distributions that hold it."""
    return {name: frozenset(map(normal, found)) for name, found in importlib.metadata.packages_distributions().items()}


def third_party(*folders: str, lazy: bool = True) -> dict[str, frozenset[str]]:
    """Imported name -> the distributions that may provide it, over all files below the folders.

    A module triton_* counts as lazy: its importers import it inside of functions (a test below).
    """
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    files = [path for path in files if lazy or not path.name.startswith("triton_")]
    names = {name for path in files for name in imports(ast.parse(path.read_text()), lazy)}
    names -= {*PACKAGES, "tests", *sys.stdlib_module_names}
    # What is not installed, such as an extra, is taken to be named after its import.
    return {name: providers().get(name, frozenset([normal(name)])) for name in sorted(names)}


def undeclared(used: dict[str, frozenset[str]], *allowed: dict[str, Requirement]) -> list[str]:
    """Imported names that no allowed distribution provides."""
    known = {name for group in allowed for name in group}
    return [name for name, found in used.items() if not found & known]


@pytest.mark.parametrize("package", PACKAGES)
def test_package_is_ours_and_not_its_namesake_on_the_index(package):
    assert Path(importlib.import_module(package).__file__).parent == ROOT / package


def test_installed_packages_are_ours_from_any_folder(tmp_path):
    try:
        importlib.metadata.distribution("mixerlab")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("mixerlab is not installed here; `make test` installs it")
    code = f"for name in {PACKAGES}: print(__import__(name).__file__)"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    printed = subprocess.check_output([sys.executable, "-c", code], cwd=tmp_path, env=environment, text=True)
    assert [Path(line).parent for line in printed.split("\n")[:-1]] == [ROOT / package for package in PACKAGES]


def test_importing_kernels_runs_no_import():
    # transformers probes for a package of this name by importing it.
    assert not list(imports(ast.parse((ROOT / "kernels" / "__init__.py").read_text()), lazy=True))


def test_no_test_folder_is_a_package():
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_module_level_imports_are_runtime_dependencies():
    assert undeclared(third_party(*PACKAGES, lazy=False), RUNTIME) == []


def test_lazy_imports_are_dependencies_or_in_an_extra():
    assert undeclared(third_party(*PACKAGES), RUNTIME, OPTIONAL) == []


def test_imports_of_tests_are_in_the_dev_extra():
    assert undeclared(third_party("tests"), RUNTIME, DEVELOPMENT) == []


def test_bare_packages_import_torch_and_einops_alone():
    assert undeclared(third_party(*BARE), declared(["torch", "einops"])) == ["mamba_ssm", "numpy", "triton"]
    for path in (path for folder in BARE for path in (ROOT / folder).rglob("*.py")):
        if not path.name.startswith("triton_"):
            assert not {"numpy", "triton"} & set(imports(ast.parse(path.read_text()), lazy=True)), path


@pytest.mark.parametrize("group", ["runtime", "optional", "development"])
def test_every_requirement_has_a_reason_and_is_imported_or_says_why_not(group):
    requirements = {"runtime": RUNTIME, "optional": OPTIONAL, "development": DEVELOPMENT}[group]
    sources = (*PACKAGES, "tests") if group == "development" else PACKAGES
    used = {name for found in third_party(*sources).values() for name in found}
    for name, requirement in requirements.items():
        assert reason(requirement), f"{requirement} has no reason behind it in pyproject.toml"
        assert (name not in used) == reason(requirement).startswith("not imported"), requirement


def test_bare_packages_load_nothing_heavy():
    code = f"""
import importlib, pkgutil, sys
for name in {BARE}:
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, name + "."):
        if not module.name.endswith("__main__") and not module.name.split(".")[-1].startswith("triton_"):
            importlib.import_module(module.name)
print(*sorted(set(sys.modules) & set({HEAVY})))
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.check_output([sys.executable, "-c", code], env=environment, text=True).strip() == ""


def test_wheel_holds_every_file_of_our_packages_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    wheel = zipfile.ZipFile(tmp_path / hatchling.build.build_wheel(str(tmp_path)))
    inside = {name for name in wheel.namelist() if ".dist-info/" not in name}
    ours = [path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file()]
    assert inside == {path.relative_to(ROOT).as_posix() for path in ours if path.suffix != ".pyc"}
    assert "conf/train.yaml" in inside
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel.namelist())


def test_constraints_pin_every_requirement_within_its_range():
    pinned = pins("constraints.txt")
    for name, requirement in {**RUNTIME, **DEVELOPMENT}.items():
        if name == "triton":
            # A GPU build of torch brings its own.
            assert name not in pinned
            continue
        assert pinned[name] in requirement.specifier, f"{requirement} and constraints.txt disagree"


def test_constraints_name_public_versions_and_no_place():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert [line for line in lines if not re.fullmatch(r"#.*|[\w.-]+==[\w.!]+", line)] == []


def test_floor_constraints_are_the_floors_of_pyproject():
    floors = {
        name: Version(spec.version)
        for name, requirement in RUNTIME.items()
        for spec in requirement.specifier
        if spec.operator == ">="
    }
    assert pins("constraints-floor.txt") == floors
