"""Is a mixer right? `python -m mixers.check [NAME | module:Class ...]` checks registered mixers, or any other class.

In tests of one's own:

    from mixers.check import cases
    @pytest.mark.parametrize("case", cases(MyMixer), ids=str)
    def test_my_mixer(case): case.run()

The properties are listed in `mixers/conformance/properties.py`. What a mixer may declare, so that more of them apply,
is `Conformance` in `mixers/conformance/definitions.py`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from unittest import SkipTest

import torch

from mixers import registry
from mixers.base import Mixer
from mixers.conformance.properties import PROPERTIES
from mixers.conformance.subject import Broken, NotApplicable, Property, Subject, said

PASS, FAIL, NOT = "pass", "FAIL", "does not apply"


@dataclass(frozen=True)
class Result:
    """One cell of the table.

    Attributes:
        verdict: "pass", "FAIL" or "does not apply".
        deviation: the largest one met; infinite where something could not be compared.
        where: the smallest failing input.
        why: what is wrong in words, or why the property does not apply.
    """

    verdict: str
    deviation: float = 0.0
    where: str = ""
    why: str = ""

    def __str__(self) -> str:
        if self.verdict == NOT:
            return f"{NOT}, because {self.why}"
        if self.verdict == PASS:
            return f"{PASS}, largest deviation {self.deviation:.1e}"
        parts = [f"smallest failing input {self.where}" if self.where else "", self.why]
        if self.deviation < float("inf"):
            parts.append(f"largest deviation {self.deviation:.1e}")
        return f"{FAIL}: " + "; ".join(part for part in parts if part)


@dataclass(frozen=True)
class Case:
    """One property of one mixer, for pytest: `run` it."""

    label: str
    cls: Any
    property: Property

    def __str__(self) -> str:
        return f"{self.label}-{self.property.name}".replace(" ", "_")

    def run(self) -> None:
        """Raises AssertionError on a fail, and unittest.SkipTest (pytest skips) where the property does not apply."""
        result = examine(self.cls, self.property)
        if result.verdict == NOT:
            raise SkipTest(result.why)
        if result.verdict == FAIL:
            raise AssertionError(f"{self.label}: {self.property.name}: {result}\n{self.property.trials.__doc__}")


def cases(*mixers: str | type[Mixer]) -> list[Case]:
    """Every property of every given mixer (class, or registered name); of all registered ones when none is given."""
    return [
        Case(mixer if isinstance(mixer, str) else mixer.__name__, find(mixer), each)
        for mixer in mixers or registry.names()
        for each in PROPERTIES
    ]


def examine(cls: Any, wanted: Property) -> Result:
    """Run all trials of a property. The random state of the process stays as it was."""
    worst, first = 0.0, None
    with torch.random.fork_rng(devices=[]):
        try:
            for where, trial in wanted.trials(Subject(cls)):
                deviation, why = _attempt(trial)
                # Written so that NaN fails.
                if not deviation <= wanted.tolerance and first is None:
                    first = (where, why)
                worst = max(worst, deviation if deviation == deviation else float("inf"))
        except NotApplicable as reason:
            return Result(NOT, why=str(reason))
        except Broken as broken:
            return Result(FAIL, float("inf"), why=str(broken))
        except Exception as error:
            return Result(FAIL, float("inf"), why=said(error))
    return Result(PASS, worst) if first is None else Result(FAIL, worst, *first)


def _attempt(trial: Any) -> tuple[float, str]:
    try:
        return trial(), ""
    except Broken as broken:
        return float("inf"), str(broken)
    except Exception as error:
        return float("inf"), said(error)


def find(mixer: str | type[Mixer]) -> Any:
    """A class by registered name or `module:Class`; a class is given back.

    Raises:
        Broken: there is none.
    """
    if not isinstance(mixer, str):
        return mixer
    try:
        module, _, name = mixer.partition(":")
        return getattr(import_module(module), name) if name else registry.get(mixer)
    except Exception as error:
        raise Broken(str(error) or said(error)) from error


def unusable(cls: Any) -> str:
    """Why nothing can be checked: no mixer, not to be built, or no right output at all; else nothing."""
    first = examine(cls, PROPERTIES[0])
    return "" if first.verdict == PASS else "; ".join(part for part in (first.where, first.why) if part)


def check(mixer: str | type[Mixer]) -> dict[str, Result]:
    """Property -> result of one mixer, each printed when it is known."""
    label = mixer if isinstance(mixer, str) else mixer.__name__
    results: dict[str, Result] = {}
    start = time.perf_counter()
    try:
        cls = find(mixer)
        broken = unusable(cls)
    except Broken as error:
        broken = str(error)
    if broken:
        results = {each.name: Result(NOT, why="nothing else can be checked") for each in PROPERTIES}
        results[PROPERTIES[0].name] = Result(FAIL, float("inf"), why=broken)
        print(f"{label:<10} {FAIL}: {broken}", flush=True)
        return results
    for each in PROPERTIES:
        results[each.name] = examine(cls, each)
        print(f"{label:<10} {each.name:<23} {results[each.name]}", flush=True)
    print(f"{label:<10} {_counts(results)} in {time.perf_counter() - start:.1f} s\n", flush=True)
    return results


def table(checked: dict[str, dict[str, Result]]) -> str:
    """Properties down, mixers across; "-" does not apply."""
    signs = {PASS: "pass", FAIL: "FAIL", NOT: "-"}
    width = {label: max(len(label), 4) for label in checked}
    lines = [" " * 23 + " ".join(f"{label:>{width[label]}}" for label in checked)]
    for each in PROPERTIES:
        cells = (f"{signs[results[each.name].verdict]:>{width[label]}}" for label, results in checked.items())
        lines.append(f"{each.name:<23}" + " ".join(cells))
    return "\n".join(lines)


def _counts(results: dict[str, Result]) -> str:
    verdicts = [result.verdict for result in results.values()]
    return ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in (PASS, FAIL, NOT))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 1 when anything fails."""
    parser = argparse.ArgumentParser(
        prog="python -m mixers.check", description="Check mixers for the properties that every mixer must have."
    )
    parser.add_argument("mixers", nargs="*", metavar="NAME | module:Class", help="default: every registered mixer")
    chosen = parser.parse_args(arguments).mixers or registry.names()
    checked = {mixer: check(mixer) for mixer in chosen}
    print(table({mixer.rpartition(":")[2]: results for mixer, results in checked.items()}))
    return int(any(result.verdict == FAIL for results in checked.values() for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
