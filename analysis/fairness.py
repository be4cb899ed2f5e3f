"""What the runs of a comparison do not have in common though their names do not say so."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.runs import Records

# Options that are no part of a stack; those that vary within one are in the names of the cells.
_NO_STACK = ("task.", "optimizer.", "trainer.")
_MACHINE = ("processor", "gpus", "device", "device_count", "threads", "backend")


def warnings(records: Records) -> Iterator[str]:
    """Of finished runs: other settings, runs that were continued, speeds of several machines."""
    unequal = list(_unequal(records))
    if unequal:
        yield f"The stacks were not trained and tested alike: {'; '.join(unequal)}."
    continued = [run.run for run in records.runs.itertuples() if run.earlier_keys]
    if continued:
        yield (
            f"Continued under changed options, and so not what one training under these gives: {', '.join(continued)}."
        )
    runs = records.environment.reindex(records.runs["run"])
    several = [name for name in _MACHINE if name in runs and runs[name].dropna().map(str).nunique() > 1]
    if several and "measured/train_tokens_per_second" in records.metrics:
        yield f"Speeds were measured under different conditions ({', '.join(several)}; see the environment)."


def _unequal(records: Records) -> Iterator[str]:
    """ "optimizer.lr is 0.001 or 0.01", of what differs from stack to stack alone."""
    stack = records.runs["stack"].fillna(records.runs["layout"])
    # A rate that was chosen for each stack differs on purpose.
    tuned = records.runs["tuning"].notna().any()
    for name in records.params:
        if (name != "data" and not name.startswith(_NO_STACK)) or (name == "optimizer.lr" and tuned):
            continue
        values = records.runs[name].dropna().map(str)
        if values.nunique() > 1 and (values.groupby(stack).nunique() <= 1).all():
            yield f"{name} is {' or '.join(sorted(values.unique()))}"
