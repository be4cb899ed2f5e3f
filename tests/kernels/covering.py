"""Rows of options in which every pair of values of two options stands together at least once."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

Choice = tuple[str, int]


def covering(options: dict[str, list]) -> list[dict[str, Any]]:
    """Greedy and deterministic: each row starts from a missing pair and adds what covers most of the others."""
    missing = {
        frozenset([(a, i), (b, j)])
        for a, b in combinations(options, 2)
        for i, j in product(range(len(options[a])), range(len(options[b])))
    }
    rows = []
    while missing:
        row = dict(min(sorted(pair) for pair in missing))
        for name in (name for name in options if name not in row):
            row[name] = max(
                range(len(options[name])),
                key=lambda i: sum(frozenset([(name, i), chosen]) in missing for chosen in row.items()),
            )
        missing -= {frozenset(pair) for pair in combinations(row.items(), 2)}
        rows.append({name: options[name][row[name]] for name in options})
    return rows
