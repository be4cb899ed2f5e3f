"""What can be said of the runs of one task: which cells are better, how surely, at what cost, and what is missing.

Nothing here knows how it is shown: `report` writes it as HTML and as text for a terminal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property

import pandas as pd

from analysis import extrapolation, fairness, tables, tuning
from analysis.pareto import Standing, standings
from analysis.runs import Records, counted, only
from analysis.statistics import band, compare, gain, not_apart
from experiments.metrics import direction, metric

# Of an accuracy, or of a loss in nats: a difference is not believed to repeat better than this from seed to seed.
RESOLUTION = 0.001
# A cell behind the best by more than MARGIN (of a loss: that share of it) still learns where its validation came nearer
# to the best's end by more than CATCH_UP of what is left, over the LAST share of the tokens: a curve that creeps along
# its limit does not. Half: a learning rate mostly decays to 0, so that over the last fifth every curve is flat.
LAST, MARGIN, CATCH_UP = 0.5, 0.01, 0.1
CURVES = ("val/accuracy", "val/loss")
# More than this are counted instead of listed.
MOST_SENTENCES, MOST_GROUPS = 6, 8


def by_task(records: Records) -> list[Comparison]:
    """One comparison a task. Runs of unknown task (broken records) go to the first: they are listed somewhere."""
    records = extrapolation.apart(records)
    runs = records.runs
    known = sorted(runs["task"].dropna().unique(), key=str)
    if len(known) < 2:
        return [Comparison(records, str(known[0]) if known else "an unknown task")]
    task = runs["task"].fillna(known[0])
    return [Comparison(only(records, runs[task == name]), str(name), len(known)) for name in known]


class Comparison:
    """The cells of one task. A cell is a configuration without its seed."""

    def __init__(self, records: Records, task: str, tasks: int = 1) -> None:
        """`tasks`: of the whole report, in which a difference is claimed by mistake no more often than LEVEL allows."""
        self.task = task
        self.records = records
        self.tasks = tasks
        self.counted = counted(records)
        # The first decides; empty where no finished run says how good it is.
        self.quality = tables.quality(self.counted)
        self.costs = tables.costs(self.counted)
        self.reads = tables.reads(self.counted)
        # cell -> metric -> Interval, best cell first
        self.summary = tables.summary(self.counted, [*self.quality, *self.costs])
        self.cells = list(self.summary.index)
        self.sizes = self.counted.runs["cell"].value_counts().to_dict()

    @cached_property
    def pairs(self) -> pd.DataFrame:
        """Every pair of cells on the deciding metric; the tests of all tasks are corrected together.

        The only source of claims that one cell is better than another: see `statistics.compare`.
        """
        if not self.quality:
            return compare(pd.DataFrame(columns=["cell", "seed", "value"]))
        runs = self.counted.runs
        # A run whose seed is not recorded has no pair.
        seed = runs["seed"].where(runs["seed"].notna(), "run " + runs["run"]).map(str)
        values = pd.DataFrame({"cell": runs["cell"], "seed": seed, "value": self.counted.values(self.quality[0])})
        best_first = values["cell"].map({cell: i for i, cell in enumerate(self.cells)}).sort_values(kind="stable").index
        return compare(values.loc[best_first], resolution=RESOLUTION, families=self.tasks)

    @property
    def to_best(self) -> pd.DataFrame:
        """[cell, mean, half, n, p, adjusted, apart]: every other cell minus the best, best first."""
        if not self.cells or not len(self.pairs):
            return pd.DataFrame(columns=["cell", *self.pairs.columns.drop(["left", "right"])])
        found = self.pairs[(self.pairs["left"] == self.cells[0]) & (self.pairs["n"] > 0)]
        return found.assign(mean=-found["mean"]).rename(columns={"right": "cell"}).drop(columns="left")

    @cached_property
    def same(self) -> dict[str, list[str]]:
        """cell -> the cells it cannot be told apart from, best first."""
        return {cell: [] for cell in self.cells} | not_apart(self.pairs)

    def front(self, cost: str) -> dict[str, Standing]:
        """cell -> its place by the Pareto front of the deciding quality and a cost, where both are known."""
        if not self.quality:
            return {}
        points = {cell: tuple(self.summary.at[cell, name] for name in (cost, self.quality[0])) for cell in self.cells}
        known = {cell: (c.mean, q.mean) for cell, (c, q) in points.items() if c.n and q.n and c.mean > 0}
        return standings(known, direction(self.quality[0]), self._open)

    @property
    def _open(self) -> dict[str, list[str]]:
        """`same`, and pairs that are told apart over common seeds, but not the way round of the means over all."""
        found = {cell: list(others) for cell, others in self.same.items()}
        sign = 1 if direction(self.quality[0]) == "higher" else -1
        for row in self.pairs.itertuples():
            # The left one is the better by its mean.
            if row.apart and sign * row.mean < 0:
                found[row.left].append(row.right)
                found[row.right].append(row.left)
        return found

    @cached_property
    def groups(self) -> dict[str, str]:
        """cell -> what `group_note` explains: letters; where that would be too many, only who is not below the best."""
        known = [cell for cell in self.cells if self.quality and self.summary.at[cell, self.quality[0]].n]
        letters = tables.groups(self.same, known)
        if len(set("".join(letters.values()))) > MOST_GROUPS:
            letters = {cell: "top" for cell in known if cell in (known[0], *self.same[known[0]])}
        return dict.fromkeys(self.cells, tables.NOTHING) | letters

    @property
    def group_note(self) -> str:
        """How to read `groups`."""
        if "top" in self.groups.values():
            return "Cells in the group “top” cannot be told apart from the best: their order says nothing."
        return "Cells that share a letter under Group cannot be told apart: their order says nothing."

    @cached_property
    def curves(self) -> dict[str, dict[str, pd.DataFrame]]:
        """metric -> cell -> its mean curve over tokens; the training loss only where there is no validation."""
        points = self.counted.curves
        points = points.assign(cell=points["run"].map(self.counted.runs.set_index("run")["cell"]))
        logged = [name for name in CURVES if name in set(points["metric"])] or ["train/loss"]
        found = {name: points[points["metric"] == name] for name in logged}
        return {
            name: {cell: band(own) for cell, own in rows.groupby("cell")} for name, rows in found.items() if len(rows)
        }

    @cached_property
    def learning(self) -> dict[str, str]:
        """cell -> what it still gained, for the cells behind the best that were still learning at this budget."""
        name = next((name for name in ("val/loss", "val/accuracy") if name in self.curves), None)
        if name is None or not self.quality:
            return {}
        behind = [cell for cell in self.cells if cell in self.curves[name] and self._behind(cell)]
        best = self.curves[name].get(self.cells[0])
        goal = math.nan if best is None or not len(best) else best["mean"].iloc[-1]
        said = {cell: _gained(name, self.curves[name][cell], goal) for cell in behind}
        return {cell: text for cell, text in said.items() if text}

    def _behind(self, cell: str) -> bool:
        name = self.quality[0]
        best, own = (self.summary.at[which, name].mean for which in (self.cells[0], cell))
        return abs(best - own) > MARGIN * (1 if name.endswith("accuracy") else abs(best))

    @property
    def budget(self) -> str:
        """ "300 steps, 614,400 training tokens" """
        runs = self.counted.runs if len(self.counted.runs) else self.records.runs
        return f"{_span(runs['last_step'])} steps, {_span(runs['last_tokens'])} training tokens"

    @property
    def seeds(self) -> list[str]:
        return sorted(set(self.records.runs["seed"].dropna().map(str)), key=lambda seed: (len(seed), seed))

    @property
    def findings(self) -> list[str]:
        """The result, in sentences."""
        if not self.cells:
            return ["No run is finished, so there is nothing to compare yet."]
        if not self.quality:
            return [
                "No finished run has an accuracy or a loss on validation or test data: there is nothing to compare."
            ]
        learning = [f"{cell} was still learning at this budget: {text}." for cell, text in self.learning.items()]
        if len(learning) > MOST_SENTENCES:
            learning = [f"{len(learning)} cells were still learning at this budget: {_listed(list(self.learning))}."]
        return [*self._ranking(), *self._elsewhere(), *learning, *tuning.told(self.counted)]

    def _ranking(self) -> Iterable[str]:
        name, best = self.quality[0], self.cells[0]
        about, found = metric(name), self.summary.at[best, name]
        extreme = "lowest" if about.better == "lower" else "highest"
        title = _capital(about.title) + tables.spelled(name, self.counted.metrics)
        yield f"{title}: {best} has the {extreme} mean, {tables.show(name, found)} (n = {found.n})."
        others = [cell for cell in self.cells[1:] if self.summary.at[cell, name].n]
        same = [cell for cell in others if cell in self.same[best]]
        apart = [cell for cell in others if cell not in same]
        if same:
            yield f"It cannot be told apart from {_listed(same)}: their order says nothing."
        if apart:
            yield f"It is told apart from {_listed(apart)}."
        alike = [f"{a} and {b}" for i, a in enumerate(apart) for b in apart[i + 1 :] if b in self.same[a]]
        if 0 < len(alike) <= MOST_SENTENCES:
            yield f"Among the rest, these cannot be told apart: {'; '.join(alike)}."
        elif alike:
            yield f"Among the rest, {len(alike)} pairs cannot be told apart."

    def _elsewhere(self) -> Iterable[str]:
        """Who leads in the last of the test suites, the hardest or longest, where that is another cell."""
        name = self.quality[-1]
        means = {cell: self.summary.at[cell, name].mean for cell in self.cells if self.summary.at[cell, name].n}
        if not means:
            return
        lead = (max if direction(name) == "higher" else min)(means, key=means.__getitem__)
        # Such as one cell under several RoPE scalings: a tie has no leader.
        if means[lead] != means.get(self.cells[0]):
            found = tables.show(name, self.summary.at[lead, name])
            yield f"{_capital(metric(name).title)}: there {lead} has the best mean, {found}; that is not tested."

    @property
    def warnings(self) -> list[str]:
        """What makes the comparison less than fair."""
        found, runs = [], self.counted.runs
        every, known = (set(table["stack"].fillna(table["layout"]).dropna()) for table in (self.records.runs, runs))
        if known and every - known:
            found.append(f"Nothing is known of {_listed(sorted(map(str, every - known)))}: no such run finished.")
        if runs["last_tokens"].nunique() > 1:
            found.append(f"The runs had different budgets: {_span(runs['last_tokens'])} training tokens.")
        commits = self.records.environment.reindex(runs["run"]).get("commit", pd.Series(dtype=object)).nunique()
        if commits > 1:
            found.append(
                f"The runs were made by {commits} different versions of the code (commits; see the environment)."
            )
        if max(self.sizes.values(), default=0) == 1:
            found.append("One seed a cell: there is no interval, and no two means can be told apart.")
        elif len(set(self.sizes.values())) > 1:
            found.append("The cells have different numbers of seeds; two are compared over the seeds that both have.")
        found += self._lacking()
        if self.cells and not self.costs:
            found.append("No finished run recorded what it costs (complexity/...).")
        return [*found, *fairness.warnings(self.counted), *tuning.warnings(self.counted)]

    def _lacking(self) -> Iterable[str]:
        """What was not recorded by how many runs, one sentence a number of runs."""
        lacking: dict[int, list[str]] = {}
        for name in [*self.quality, *self.costs]:
            lacking.setdefault(int(self.counted.values(name).isna().sum()), []).append(metric(name).title)
        for count, titles in lacking.items():
            if count:
                yield f"Not recorded by {count} of {len(self.counted.runs)} finished runs: {_listed(titles)}."


def _gained(name: str, curve: pd.DataFrame, goal: float) -> str | None:
    """How a validation curve came nearer to `goal` over the last of its tokens, in words; None where hardly."""
    change = gain(curve, LAST)
    end = curve["mean"].iloc[-1] if len(curve) else math.nan
    rising = name == "val/accuracy"
    if not (change if rising else -change) > CATCH_UP * abs(goal - end):
        return None
    verb = "rose" if rising else "fell"
    return f"{metric(name).title} {verb} from {end - change:.3g} to {end:.3g} over the last {LAST:.0%} of its tokens"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _span(values: pd.Series) -> str:
    """ "300", or "150 to 300" where runs differ."""
    known = values.dropna()
    if known.empty:
        return "an unknown number of"
    low, high = f"{known.min():,.0f}", f"{known.max():,.0f}"
    return low if low == high else f"{low} to {high}"


def _listed(names: Sequence[str], most: int = 8) -> str:
    """ "a, b and c"; a long list is cut."""
    names = list(names) if len(names) <= most else [*names[: most - 1], f"{len(names) - most + 1} others"]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
