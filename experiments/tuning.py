"""A learning rate for every stack, chosen fairly: the config node `tune`.

A cell of a grid is tried at the same number of rates as every other, on validation and on seeds that no report sees,
and is then trained at the best of them. A rate's score is the mean over the tuning seeds of what validation said last;
where one of its runs diverged or failed it is the worst there is. Every trial is a run like any other, with its record
under its key: whatever was tried is not tried again, whichever job asks for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

from experiments.metrics import direction
from experiments.tasks.base import at_least

# The share of Optuna's trials that lie anywhere in the range, the same for every stack, before it looks at results.
_BLIND = 0.5


@dataclass(frozen=True)
class Search:
    """The config node `tune`, whose YAML says what each option is.

    Raises:
        ValueError: an option out of range, missing, or of the other method.
    """

    method: Literal["grid", "optuna"] | None = None
    values: tuple[float, ...] | None = None
    low: float | None = None
    high: float | None = None
    trials: int | None = None
    seeds: tuple[int, ...] | None = None
    monitor: str | None = None

    def __post_init__(self) -> None:
        own = {None: (), "grid": ("values",), "optuna": ("low", "high", "trials")}[self.method]
        needed = (*own, "seeds", "monitor") if self.method else ()
        for name in ("values", "low", "high", "trials", "seeds", "monitor"):
            given = getattr(self, name)
            if given is not None and name not in needed:
                both = "tune=lr or tune=optuna_lr"
                how = {"values": "tune=lr", "seeds": both, "monitor": both}.get(name, "tune=optuna_lr")
                raise ValueError(f"tune.{name}={_spell(given)} needs {how}")
            if given is None and name in needed:
                raise ValueError(f"tune.{name} is missing")
        if self.method:
            self._check()

    def _check(self) -> None:
        if self.method == "grid":
            _check("values", self.values, len(set(self.values)) == len(self.values) > 1, "two different rates or more")
            _check("values", self.values, min(self.values) > 0, "above 0")
        else:
            at_least("tune.trials", self.trials, 2)
            _check("low", self.low, 0 < self.low < self.high, f"above 0 and below tune.high={self.high:g}")
        _check("seeds", self.seeds, 0 < len(set(self.seeds)) == len(self.seeds), "one seed or more, each once")
        for seed in self.seeds:
            at_least("tune.seeds", seed, 0)
        _check("monitor", self.monitor, self.monitor.startswith("val/"), "a metric of validation, such as val/loss")
        direction(self.monitor)

    @property
    def runs(self) -> int:
        """Of a cell; the number is the same for all."""
        rates = {None: 0, "grid": len(self.values or ()), "optuna": self.trials or 0}[self.method]
        return rates * len(self.seeds or ())

    def refuse(self, seed: int) -> None:
        """A seed of the report must not be one of tuning.

        Raises:
            ValueError: it is.
        """
        if self.method and seed in self.seeds:
            raise ValueError(f"tune.seeds={_spell(self.seeds)} must hold no seed of the results: seed={seed} is one")

    def score(self, results: Sequence[float | None]) -> float:
        """Of a rate, by what its runs came to (None: nothing). Lower is better; inf where a run came to nothing."""
        if any(value is None or not math.isfinite(value) for value in results):
            return math.inf
        return fmean(results) if direction(self.monitor) == "lower" else -fmean(results)

    def find(self, measure: Callable[[Sequence[float]], Sequence[float]]) -> list[tuple[float, float]]:
        """Try rates.

        Args:
            measure: the scores of some rates.
        Returns:
            (rate, score), in the order of the trials.
        Raises:
            ValueError: Optuna is asked for, and not installed.
        """
        if self.method == "grid":
            return list(zip(self.values, measure(self.values), strict=True))
        return self._optuna(measure)

    def _optuna(self, measure: Callable[[Sequence[float]], Sequence[float]]) -> list[tuple[float, float]]:
        try:
            import optuna
        except ImportError:
            raise ValueError("tune=optuna_lr needs Optuna: pip install 'mixerlab[tune]'") from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        # Seeded: a job that comes later asks for the same rates again, and finds their records.
        sampler = optuna.samplers.TPESampler(seed=0, n_startup_trials=max(2, round(_BLIND * self.trials)))
        study, found = optuna.create_study(sampler=sampler), []
        for _ in range(self.trials):
            trial = study.ask()
            # Three digits, which a person can type.
            rate = float(f"{trial.suggest_float('lr', self.low, self.high, log=True):.3g}")
            (score,) = measure([rate])
            study.tell(trial, score)
            found.append((rate, score))
        return found


@dataclass(frozen=True)
class Tuned:
    """A rate that was chosen.

    Attributes:
        scores: (rate, score) of every trial.
        keys: of the trials' runs.
        tokens, flops, seconds: of all of them together, as far as they are recorded.
    """

    search: Search
    scores: Sequence[tuple[float, float]]
    keys: Sequence[str]
    tokens: int
    flops: float
    seconds: float

    @property
    def lr(self) -> float:
        """The best; of equal ones the lowest."""
        return min(self.scores, key=lambda pair: (pair[1], pair[0]))[0]

    @property
    def edge(self) -> str | None:
        """`lowest` or `highest`, where the best is that of all rates tried: beyond it may be a better one."""
        rates = [rate for rate, _ in self.scores]
        return {min(rates): "lowest", max(rates): "highest"}.get(self.lr)

    @property
    def record(self) -> dict[str, Any]:
        """tuning.json. Scores are as the metric is, null where a run came to nothing."""
        sign = 1 if direction(self.search.monitor) == "lower" else -1
        scores = [[rate, sign * score if math.isfinite(score) else None] for rate, score in self.scores]
        return {"lr": self.lr, "edge": self.edge, "method": self.search.method, "monitor": self.search.monitor,
                "seeds": list(self.search.seeds), "scores": scores, "runs": list(self.keys), "tokens": self.tokens,
                "flops": self.flops, "seconds": round(self.seconds, 3), "text": str(self)}  # fmt: skip

    @property
    def brief(self) -> str:
        """For a table: lr 0.003, best of 4."""
        return f"lr {self.lr:g}, best of {len(self.scores)}{f' and the {self.edge} of them' if self.edge else ''}"

    def __str__(self) -> str:
        """The choice in one line."""
        seeds, lost = self.search.seeds, sum(math.isinf(score) for _, score in self.scores)
        parts = [f"lr {self.lr:g}: best of {len(self.scores)} by {self.search.monitor}",
                 f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"]  # fmt: skip
        parts += [f"{lost} diverged or failed"] if lost else []
        parts += [f"the {self.edge} that was tried, a better one may lie beyond"] if self.edge else []
        return ", ".join(parts)


def _check(option: str, value: Any, good: bool, expected: str) -> None:
    if not good:
        raise ValueError(f"tune.{option}={_spell(value)} must be {expected}")


def _spell(value: Any) -> str:
    return f"[{','.join(f'{v:g}' for v in value)}]" if isinstance(value, tuple) else f"{value}"
