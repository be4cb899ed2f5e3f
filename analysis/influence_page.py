"""What was found about the influence in one model, as text for a terminal and as one page that loads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from analysis import canvas, influence_plots, tables
from analysis.influence_map import MODEL, MOST, Map, ahead, beyond, context, farthest, profile, shares

TEMPLATE = Path(__file__).with_name("influence.html.j2")
# Of the table: title, unit.
COLUMNS = (
    ("part", ""),
    ("own", "share of its own token"),
    (f"{MOST:.0%} within", "effective context"),
    ("weights", f"hold {MOST:.0%} within"),
    ("window", "tokens"),
    ("beyond", "share outside of the window"),
    ("farthest", "tokens away"),
    ("ahead", "largest share after a query"),
)


@dataclass(frozen=True)
class About:
    """What was looked at.

    Attributes:
        stack, run, where: of which model, which row.
        shown: [T] its tokens as text.
        text: those are pieces of a text, and not words.
        directions: of the output, see `analysis.influence_map`.
        window: a distance for all parts; None: each its own.
        command: what makes the page again.
    """

    stack: str
    run: str
    where: str
    shown: Sequence[str]
    text: bool
    directions: int
    window: int | None
    command: str


def table(maps: Sequence[Map], about: About) -> list[list[str]]:
    """One row a part, under `COLUMNS`."""
    return [[title for title, _ in COLUMNS], *(_row(one, about.window or one.window) for one in maps)]


def _row(one: Map, window: int | None) -> list[str]:
    far, near = farthest(one.values, one.queries), profile(one.values, one.queries)
    weights = None if one.weights is None else context(profile(one.weights, one.queries))
    return [
        one.name,
        _percent(float(near[0])),
        _tokens(context(near)),
        _tokens(weights),
        tables.NOTHING if window is None else str(window),
        tables.NOTHING if window is None else _percent(beyond(near, window)),
        tables.NOTHING if far is None else str(far),
        _percent(ahead(one.values, one.queries)),
    ]


def findings(maps: Sequence[Map], about: About) -> list[str]:
    """The sentences that the page begins with."""
    whole = next(one for one in maps if one.name == MODEL)
    near, far = profile(whole.values, whole.queries), farthest(whole.values, whole.queries)
    if far is None:
        return ["No token has any influence on any prediction."]
    later = max(ahead(one.values, one.queries) for one in maps)
    said = (
        f"{MOST:.0%} of what moves a prediction of the whole model lies within the nearest {_tokens(context(near))} "
        f"(its own token: {_percent(float(near[0]))}); the farthest token with any influence is {far} away, of at most "
        f"{max(max(query, len(about.shown) - 1 - query if later else 0) for query in whole.queries)}."
    )
    causal = "Tokens after a query have exactly no influence on it, in any part."
    both = f"Some parts read both sides: up to {_percent(later)} of a query's influence lies after it."
    return [said, both if later else causal]


def text(maps: Sequence[Map], about: About) -> str:
    """For a terminal."""
    head = f"{about.stack}: {about.where}, {len(about.shown)} tokens, {len(maps[0].queries)} queries"
    return "\n".join([head, "", tables.text(table(maps, about)), "", *findings(maps, about)])


def build(maps: Sequence[Map], about: About) -> str:
    """The page."""
    names = [one.name for one in maps]
    styles = canvas.styles(pd.DataFrame({"cell": names, "stack": names}))
    profiles = {one.name: profile(one.values, one.queries) for one in maps}
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        about=about,
        queries=len(maps[0].queries),
        findings=findings(maps, about),
        columns=COLUMNS,
        table=table(maps, about),
        swatches={name: Markup(canvas.swatch(styles[name])) for name in names},
        strip=_strip(maps[0], about.shown),
        last=maps[0].queries[-1],
        held=Markup(influence_plots.held(profiles, styles).to_json()),
        parts=[_part(one, about.shown) for one in maps],
        plotly=Markup(get_plotlyjs()),
        most=f"{MOST:.0%}",
    )


def _part(one: Map, shown: Sequence[str]) -> dict[str, Any]:
    """A part's pictures as JSON; Plotly's escapes what could end a script element."""
    weights = None if one.weights is None else influence_plots.heat_map(one.weights, one.queries, shown)
    return {
        "name": one.name,
        "whole": one.name == MODEL,
        "influence": Markup(influence_plots.heat_map(one.values, one.queries, shown).to_json()),
        "weights": None if weights is None else Markup(weights.to_json()),
    }


def _strip(one: Map, shown: Sequence[str]) -> list[tuple[str, float, str]]:
    """(token, opacity, share) of every token, for the last query; opacities as the maps' colours, by the logarithm."""
    last = shares(one.values)[-1].nan_to_num(0)
    strengths = (1 + last.clamp(min=influence_plots.LEAST).log10() / influence_plots.DECADES).tolist()
    return [
        (token.replace("\n", "⏎\n"), round(strength, 3), f"{share:.2%}")
        for token, strength, share in zip(shown, strengths, last.tolist(), strict=True)
    ]


def _tokens(count: int | None) -> str:
    return tables.NOTHING if count is None else f"{count} token{'s' * (count != 1)}"


def _percent(share: float) -> str:
    """0 is exactly 0."""
    if share != share:
        return tables.NOTHING
    return "0" if share == 0 else "<0.1%" if share < 0.0005 else f"{share:.1%}"
