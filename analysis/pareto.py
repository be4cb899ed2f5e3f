"""Which cells another one beats at no more cost."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum
from typing import Literal


class Standing(Enum):
    """The place of a cell by the Pareto front of quality and cost; the values are for people."""

    FRONT = "on the front: no cell is as cheap and better"
    BEHIND = "behind the front, but it cannot be told apart from what is there"
    DOMINATED = "dominated: a cell that costs no more is better, and told apart"


def standings(
    points: Mapping[str, tuple[float, float]],
    better: Literal["lower", "higher"],
    same: Mapping[str, Collection[str]],
) -> dict[str, Standing]:
    """Every cell's place.

    Args:
        points: cell -> (cost, mean quality).
        same: cell -> the cells whose quality cannot be told apart from its own. A cell is dominated only by others:
            that says no more than the tests behind `same` do.
    """
    sign = 1 if better == "higher" else -1
    gains = {cell: (-cost, sign * quality) for cell, (cost, quality) in points.items()}
    found = {}
    for cell, own in gains.items():
        beaten_by = [o for o, gain in gains.items() if gain != own and gain[0] >= own[0] and gain[1] >= own[1]]
        surely = [other for other in beaten_by if gains[other][1] > own[1] and other not in same.get(cell, ())]
        found[cell] = Standing.DOMINATED if surely else Standing.BEHIND if beaten_by else Standing.FRONT
    return found
