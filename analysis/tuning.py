"""What the choice of learning rates says about a comparison: what it cost, and where it was not fair or not enough."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from analysis.runs import Records
from experiments.metrics import format_value


def choices(records: Records) -> dict[str, list[dict[str, Any] | None]]:
    """cell -> the different choices of its runs; None for runs at a learning rate that was given."""
    found: dict[str, list[dict[str, Any] | None]] = {}
    for row in records.runs.itertuples():
        known = found.setdefault(row.cell, [])
        choice = row.tuning if isinstance(row.tuning, dict) else None
        if choice not in known:
            known.append(choice)
    return found


def told(records: Records) -> Iterator[str]:
    """How the learning rates were chosen and what that took, in one sentence; none where none was."""
    known = [(cell, choice) for cell, every in choices(records).items() for choice in every if choice]
    if not known:
        return
    how = " and ".join(dict.fromkeys(f"{c['monitor']} on seeds {_listed(c['seeds'])}" for _, c in known))
    rates = ", ".join(dict.fromkeys(f"{cell} {c['lr']:g} (of {len(c['scores'])})" for cell, c in known))
    # Cells may share trials: the runs are counted once.
    costs = {tuple(sorted(c["runs"])): c for _, c in known}.values()
    runs = len({run for c in costs for run in c["runs"]})
    tokens, flops, seconds = (sum(c[name] for c in costs) for name in ("tokens", "flops", "seconds"))
    yield (f"Learning rates were chosen by {how}, which are in no mean here: {rates}. That took {runs} more runs: "
           f"{tokens:,} training tokens, {format_value('complexity/flops_per_token_train', flops)}FLOPs, "
           f"{seconds:,.0f} s.")  # fmt: skip


def warnings(records: Records) -> Iterator[str]:
    """What makes the choice unfair, or unfinished."""
    found = choices(records)
    tuned = {cell: [choice for choice in every if choice] for cell, every in found.items()}
    for cell, every in tuned.items():
        for edge, lr in dict.fromkeys((c["edge"], c["lr"]) for c in every if c["edge"]):
            yield f"The learning rate of {cell}, {lr:g}, is the {edge} that was tried: a better one may lie beyond."
    given = [cell for cell, every in found.items() if None in every]
    if given and any(tuned.values()):
        with_one = [cell for cell, every in tuned.items() if every]
        yield f"Learning rates were tuned for {', '.join(with_one)}; they were given for {', '.join(given)}."
    sizes = {len(c["scores"]) for every in tuned.values() for c in every}
    if len(sizes) > 1:
        yield f"The cells were tuned with different numbers of trials: {', '.join(map(str, sorted(sizes)))}."


def _listed(seeds: list[int]) -> str:
    return ", ".join(map(str, seeds))
