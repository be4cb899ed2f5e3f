"""Equal budgets: the value of one whole-number option at which a counted figure meets a target.

Models are built on meta and counted, never run. Of the figure it is assumed only that it crosses the target somewhere:
it may fall, jump or stay, and values may be refused (heads that do not divide a width).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

# How far from the target a match may end.
TOLERANCE = 0.01
# The largest value tried, in steps, and how much larger the next one may be while no bracket is found.
MOST_STEPS = 2**24
MOST_GROWTH = 64
# Refused values passed over in one interval before it counts as empty.
MOST_REFUSED = 64
# The search for a bracket ends after so many values in turn without a change, or a third as many away from the target
# or refused.
PATIENCE = 12
# Values tried on either side of the best one where the figure was seen to rise and to fall.
AROUND = 128


@dataclass(frozen=True)
class Match:
    """The value of the knob and the figure that it gives."""

    value: int
    achieved: float


def solve(
    count: Callable[[int], float], target: float, *, step: int = 1, what: str = "figure", knob: str = "knob"
) -> Match:
    """A multiple of `step` whose figure is within `TOLERANCE`; the nearest one where the figure only rises or falls.

    Args:
        count: the figure at a value of the knob; raises ValueError for a value that is no model.
        what, knob: names for errors.
    Raises:
        ValueError: no value works, or none comes within `TOLERANCE`; says the nearest figures below and above.
    """
    search = _Search(count, target, step)
    ends = search.bracket()
    if ends is not None:
        search.close_in(*ends)
    if not search.found:
        raise ValueError(f"no value of {knob} works: {search.refusal}")
    if not search.met and not search.monotone:
        search.look_around()
    if not search.met:
        raise ValueError(_unreachable(search, what, knob))
    k, achieved = search.best
    return Match(k * step, achieved)


class _Search:
    """Figures at multiples of the step, each counted at most once."""

    def __init__(self, count: Callable[[int], float], target: float, step: int):
        self.count, self.target, self.step = count, target, step
        self.found: dict[int, float] = {}
        self.refused: set[int] = set()
        self.refusal = ""

    @property
    def best(self) -> tuple[int, float]:
        """Steps and figure nearest to the target."""
        return min(self.found.items(), key=lambda item: (abs(item[1] - self.target), item[0]))

    @property
    def met(self) -> bool:
        return abs(self.best[1] - self.target) <= TOLERANCE * self.target

    @property
    def monotone(self) -> bool:
        """Do the figures found so far only rise, or only fall?"""
        figures = [figure for _, figure in sorted(self.found.items())]
        return figures == sorted(figures) or figures == sorted(figures, reverse=True)

    def works(self, k: int) -> bool:
        """Is there a figure at k steps?"""
        if k not in self.found and k not in self.refused:
            try:
                self.found[k] = self.count(k * self.step)
            except ValueError as error:
                self.refused.add(k)
                self.refusal = str(error)
        return k in self.found

    def between(self, low: int, high: int, wish: int) -> int | None:
        """The k nearest to `wish` in low < k < high that works, of at most MOST_REFUSED tried."""
        stride = max(1, (high - low - 1) // MOST_REFUSED)
        evenly = sorted(range(low + stride, high, stride), key=lambda k: abs(k - wish))
        return next((k for k in [wish, *evenly] if self.works(k)), None)

    def bracket(self) -> tuple[int, int] | None:
        """Two values with the target between their figures, from 1 on; None where it is never crossed."""
        k, before, patience = 1, 0, PATIENCE
        while k <= MOST_STEPS and patience > 0:
            here = self.between(before, k + 1, k)
            if here is None:
                # Nothing works yet: go on. Something did: perhaps nothing does any more.
                patience -= 3 * bool(before)
                k *= 2
                continue
            if before and self._crossed(before, here):
                return before, here
            gain = abs(self.found[before] - self.target) - abs(self.found[here] - self.target) if before else 1
            patience = PATIENCE if gain > 0 else patience - (3 if gain < 0 else 1)
            k, before = self._further(before, here), here
        return None

    def close_in(self, low: int, high: int) -> None:
        """Interpolate and halve in turn until nothing that works lies between."""
        halve = False
        while self.found[low] != self.target and high - low > 1:
            share = 0.5 if halve else (self.target - self.found[low]) / (self.found[high] - self.found[low])
            here = self.between(low, high, min(max(low + 1, low + int(share * (high - low))), high - 1))
            if here is None:
                return
            low, high = (low, here) if self._crossed(low, here) else (here, high)
            halve = not halve

    def look_around(self) -> None:
        """Try the neighbours of the best value, outwards, until one meets the target."""
        middle = self.best[0]
        for away in range(1, AROUND + 1):
            for k in (middle - away, middle + away):
                if k >= 1 and self.works(k) and self.met:
                    return

    def _crossed(self, a: int, b: int) -> bool:
        return min(self.found[a], self.found[b]) <= self.target <= max(self.found[a], self.found[b])

    def _further(self, before: int, here: int) -> int:
        """Where the line through the last two figures meets the target, at least doubled."""
        rise = self.found[here] - self.found[before] if before else 0
        met = here + (self.target - self.found[here]) * (here - before) / rise if rise else 0
        return int(min(max(2 * here, met + 1), MOST_GROWTH * here))


def _unreachable(search: _Search, what: str, knob: str) -> str:
    figures = set(search.found.values())
    if len(figures) == 1:
        return f"{knob} does not change {what}: it is {_spell(*figures)}, the target {_spell(search.target)}"
    below = max((figure for figure in figures if figure < search.target), default=None)
    above = min((figure for figure in figures if figure > search.target), default=None)
    target = f"within {TOLERANCE:.0%} of {_spell(search.target)}"
    near = f"nearest below: {_place(search, below, knob)}, above: {_place(search, above, knob)}"
    return f"no {knob} brings {what} {target}; {near}"


def _place(search: _Search, figure: float | None, knob: str) -> str:
    """A figure and the smallest value of the knob that was seen to give it."""
    if figure is None:
        return "nothing"
    steps = min(k for k, found in search.found.items() if found == figure)
    return f"{_spell(figure)} with {knob}={steps * search.step}"


def _spell(figure: float) -> str:
    return f"{figure:,.0f}" if figure == int(figure) else f"{figure:,.2f}"
