"""Statistics over seeds: means with t intervals, paired differences, what can be told apart.

Everything here is a pure function of numbers or dataframes. A cell is one configuration, its runs differ in the seed
alone; runs of two cells with the same seed are pairs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pandas as pd
from scipy import special

LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """mean +- half; half is NaN where n < 2, and mean too where n is 0."""

    mean: float
    half: float
    n: int


def interval(values: Sequence[float] | pd.Series, level: float = LEVEL) -> Interval:
    """The mean of `values` and the half width of its t interval at `level`. NaN values are left out and not counted.

    Equal values have a half width of 0.
    """
    known = np.asarray(values, dtype=float)
    known = known[np.isfinite(known)]
    n = len(known)
    if n == 0:
        return Interval(math.nan, math.nan, 0)
    return Interval(float(known.mean()), float(_half(known, level)), n)


def _half(values: np.ndarray, level: float) -> np.ndarray:
    """Half width of the t interval along dimension 0 of [n, ...]; NaN where n is 1."""
    n = len(values)
    if n < 2:
        return np.full(values.shape[1:], math.nan)
    # Rounding would give equal values a spread of 1e-17.
    spread = np.where(np.ptp(values, axis=0) == 0, 0.0, values.std(axis=0, ddof=1))
    return special.stdtrit(n - 1, (1 + level) / 2) * spread / math.sqrt(n)


def paired(differences: np.ndarray, resolution: float = 0.0, level: float = LEVEL) -> pd.DataFrame:
    """Two-sided paired t tests, one a column.

    Args:
        differences: [seed, pair] of two cells' values; NaN where one of the two lacks the seed.
        resolution: the least standard deviation believed, in units of the values. Two or three seeds can agree by
            chance to the last digit, most of all near a bound such as accuracy 1: that would make a difference certain.
    Returns:
        [mean, half, n, p], one row a pair: the mean difference, half its t interval, how many seeds, and p. Below two
        seeds half and p are NaN; where nothing spreads, p is 1 for equal cells and 0 for others.
    """
    known = np.ma.masked_invalid(differences)
    n = known.count(axis=0)
    mean = np.ma.filled(known.mean(axis=0), math.nan)
    # Rounding would give equal values a spread of 1e-17.
    equal = (n > 1) & (np.ma.filled(np.ma.ptp(known, axis=0), math.nan) == 0)
    spread = np.where(equal, 0.0, np.ma.filled(known.std(axis=0, ddof=1), math.nan))
    error = np.maximum(spread, resolution) / np.sqrt(n)
    with np.errstate(divide="ignore", invalid="ignore"):
        p = 2 * special.stdtr(n - 1, -np.abs(mean) / error)
    p[(error == 0) & (mean == 0)] = 1.0
    return pd.DataFrame({"mean": mean, "half": special.stdtrit(n - 1, (1 + level) / 2) * error, "n": n, "p": p})


def holm(p: Sequence[float] | np.ndarray) -> np.ndarray:
    """Holm's adjusted p values; NaN (not tested) stays NaN and does not count.

    Source: Holm 1979, A simple sequentially rejective multiple test procedure.
    """
    p = np.asarray(p, dtype=float)
    adjusted = np.full(len(p), math.nan)
    order = [i for i in np.argsort(p) if not math.isnan(p[i])]
    if order:
        adjusted[order] = np.minimum(1, np.maximum.accumulate(p[order] * np.arange(len(order), 0, -1)))
    return adjusted


def compare(values: pd.DataFrame, *, resolution: float = 0.0, families: int = 1, level: float = LEVEL) -> pd.DataFrame:
    """Every pair of cells, tested as one family.

    Args:
        values: [cell, seed, value], one row a run; a cell has a seed once.
        families: how many such families share what may be claimed by mistake: p is corrected for all of them.
    Returns:
        [left, right, mean, half, n, p, adjusted, apart], one row a pair: the mean is left - right; `apart` is true
        where the adjusted p is below 1 - level. Where it is false, nothing may be said about which is better. The
        intervals are each one's own, not adjusted.
    """
    pairs = list(combinations(values["cell"].unique(), 2))
    if not pairs:
        return pd.DataFrame(columns=_COMPARISON)
    cells = values.pivot(index="seed", columns="cell", values="value")
    left, right = (list(side) for side in zip(*pairs, strict=True))
    found = paired(cells[left].to_numpy(dtype=float) - cells[right].to_numpy(dtype=float), resolution, level)
    adjusted = np.minimum(1, families * holm(found["p"].to_numpy()))
    return found.assign(left=left, right=right, adjusted=adjusted, apart=adjusted < 1 - level)[_COMPARISON]


_COMPARISON = ["left", "right", "mean", "half", "n", "p", "adjusted", "apart"]


def not_apart(comparison: pd.DataFrame) -> dict[str, list[str]]:
    """cell -> the cells it cannot be told apart from, in the order of the comparison."""
    same: dict[str, list[str]] = {}
    for row in comparison.itertuples():
        for cell, other in ((row.left, row.right), (row.right, row.left)):
            same.setdefault(cell, [])
            if not row.apart:
                same[cell].append(other)
    return same


def band(curves: pd.DataFrame, points: int = 200, level: float = LEVEL) -> pd.DataFrame:
    """The mean curve of the runs of a cell, with its t interval, as far as every one of them reaches.

    Args:
        curves: [run, tokens, value] of one metric. Runs that logged at different tokens are interpolated linearly.
        points: at most so many tokens are kept, evenly from first to last.
    Returns:
        [tokens, mean, half], sorted by tokens; half is NaN for one run. Empty where the runs have no range in common.
    """
    runs = [run[["tokens", "value"]].to_numpy(dtype=float) for _, run in curves.groupby("run", sort=False)]
    runs = [run[run[:, 0].argsort(kind="stable")].T for run in runs]
    if not runs:
        return pd.DataFrame(columns=["tokens", "mean", "half"], dtype=float)
    start, end = max(tokens[0] for tokens, _ in runs), min(tokens[-1] for tokens, _ in runs)
    tokens = np.unique(np.concatenate([tokens for tokens, _ in runs]))
    tokens = tokens[(start <= tokens) & (tokens <= end)]
    tokens = tokens[np.unique(np.linspace(0, len(tokens) - 1, min(points, len(tokens))).round().astype(int))]
    values = np.array([np.interp(tokens, *run) for run in runs])
    return pd.DataFrame({"tokens": tokens, "mean": values.mean(axis=0), "half": _half(values, level)})


def gain(curve: pd.DataFrame, last: float) -> float:
    """By how much the mean of a `band` rose over the `last` share of its tokens; NaN for fewer than two points."""
    if len(curve) < 2:
        return math.nan
    end = curve["tokens"].iloc[-1]
    return float(curve["mean"].iloc[-1] - np.interp((1 - last) * end, curve["tokens"], curve["mean"]))
