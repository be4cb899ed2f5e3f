"""Measured tables in docs/kernels_gpu.md, between two marks each, rewritten in place by what measures them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs" / "kernels_gpu.md"


def rewrite(name: str, lines: Sequence[str], page: Path = DOCS) -> None:
    """Put `lines` between the two marks called `name`.

    Raises:
        ValueError: the page has no two such marks.
    """
    mark = f"<!-- {name} -->"
    parts = page.read_text().split(mark)
    if len(parts) != 3:
        raise ValueError(f"{page} must hold the mark {mark} twice; it holds it {len(parts) - 1} times")
    page.write_text(f"{parts[0]}{mark}\n{chr(10).join(lines)}\n{mark}{parts[2]}")
