"""How time and memory grow with the length: `python -m analysis.scaling runs/bench/TIME`, on records of a benchmark.

An exponent is the slope of a least-squares line through log(value) against log(length). What was measured is held
against what was counted for the same whole model at the same lengths, so both bend alike where projections, which grow
linearly, still outweigh attention. `python -m experiments.bench` calls this at its end.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jinja2
import numpy as np
import pandas as pd
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from analysis import canvas, plots, tables
from analysis.canvas import Style
from analysis.pictures import Picture
from analysis.runs import FINISHED, Records, load, only
from experiments.timing import SHARED_CORES

# A measured exponent further from the counted one is pointed at.
AGREE = 0.3
TEMPLATE = Path(__file__).with_name("scaling.html.j2")
# Bytes of a parameter and of its gradient: both stay in float32.
_PARAMETER_BYTES = 8


@dataclass(frozen=True)
class Quantity:
    """Something that was measured at several lengths.

    Attributes:
        measured: metric that was measured, `<length>` in it for the length; the first one that a record has counts, so
            CPU time stands before the time on the wall: others who use the machine do not stretch it.
        counted: what was counted of it, from a record's row; NaN where nothing was.
    """

    name: str
    measured: tuple[str, ...]
    counted: Callable[[pd.Series], float]


def _tokens(row: pd.Series) -> float:
    return row["length"] * row["batch_size"]


def _decode(row: pd.Series) -> float:
    return row.get(f"complexity/decode_flops_per_token_at_{row['length']}", math.nan) * row["batch_size"]


def _memory(row: pd.Series) -> float:
    """Weights, gradients and the activations kept for the backward."""
    activations = row.get(f"complexity/activation_bytes_at_{row['length']}", math.nan) * row["batch_size"]
    return row["complexity/parameters"] * _PARAMETER_BYTES + activations


QUANTITIES = (
    Quantity(
        "training step",
        ("measured/train_step_cpu_ms", "measured/train_step_ms"),
        lambda row: row["complexity/flops_per_token_train"] * _tokens(row),
    ),
    Quantity(
        "prefill",
        ("measured/prefill_cpu_ms_at_<length>", "measured/prefill_ms_at_<length>"),
        lambda row: row["complexity/flops_per_token_forward"] * _tokens(row),
    ),
    Quantity("decoded token", ("measured/decode_cpu_ms_at_<length>", "measured/decode_ms_at_<length>"), _decode),
    Quantity("peak memory", ("measured/peak_memory_bytes",), _memory),
)


def cells(records: Records) -> Records:
    """The finished cells, those that differ in the length alone under one name in `cell`."""
    finished = records.runs[records.runs["status"] == FINISHED]
    return only(replace(records, params=tuple(name for name in records.params if name != "length")), finished)


def points(records: Records, quantity: Quantity) -> dict[str, pd.DataFrame]:
    """Cell -> [length, measured, counted], by length; cells that were not measured in it are left out."""
    rows = [
        (row["cell"], int(row["length"]), value, quantity.counted(row))
        for _, row in records.runs.iterrows()
        if (value := _measured(row, quantity)) is not None
    ]
    frame = pd.DataFrame(rows, columns=["cell", "length", "measured", "counted"])
    grouped = frame.sort_values("length").groupby("cell")
    return {str(cell): own[["length", "measured", "counted"]] for cell, own in grouped}


def _measured(row: pd.Series, quantity: Quantity) -> float | None:
    values = (row.get(name.replace("<length>", str(row["length"]))) for name in quantity.measured)
    return next((value for value in values if value is not None and value > 0), None)


def exponent(lengths: Sequence[float], values: Sequence[float]) -> float:
    """The slope of log(value) against log(length), by least squares; NaN without two lengths, or where a value is.

    2 for values that grow with the square of the length, 1 linearly, 0 not at all.
    """
    if len(set(lengths)) < 2 or not np.all(np.asarray(values) > 0):
        return math.nan
    return float(np.polyfit(np.log(lengths), np.log(values), 1)[0])


def exponents(records: Records) -> pd.DataFrame:
    """[cell, quantity, lengths, measured, counted]: the fitted exponents of every cell with two lengths or more."""
    rows = [
        (cell, quantity.name, len(own), *(exponent(own["length"], own[values]) for values in ("measured", "counted")))
        for quantity in QUANTITIES
        for cell, own in points(records, quantity).items()
        if own["length"].nunique() > 1
    ]
    found = pd.DataFrame(rows, columns=["cell", "quantity", "lengths", "measured", "counted"])
    return found.sort_values("cell", kind="stable", ignore_index=True)


def rows(found: pd.DataFrame) -> list[list[str]]:
    """The exponents as text, under a header; "!" where measured and counted are more than `AGREE` apart."""
    lines = [["stack", "exponent of", "lengths", "measured", "counted", "difference"]]
    for row in found.itertuples():
        apart = row.measured - row.counted
        given = [tables.NOTHING if math.isnan(v) else f"{v:z.2f}" for v in (row.measured, row.counted)]
        shown = tables.NOTHING if math.isnan(apart) else f"{apart:+.2f}" + (" !" if abs(apart) > AGREE else "")
        lines.append([row.cell, row.quantity, str(row.lengths), *given, shown])
    return lines


def summary(found: pd.DataFrame) -> str:
    """How many exponents are as counted."""
    apart = (found["measured"] - found["counted"]).abs().dropna()
    return f"{(apart <= AGREE).sum()} of {len(apart)} measured exponents are within {AGREE} of the counted ones"


def warnings(records: Records) -> list[str]:
    """What speaks against the times."""
    busy = records.values("measured/shared_cores").max()
    if not busy >= SHARED_CORES:
        return []
    return [
        f"Shared machine: others kept up to {busy:.1f} cores busy. Times on the wall, and tokens a second, hold under "
        "that load alone. On a CPU, growth is fitted to CPU time."
    ]


def build(records: Records, command: str) -> str:
    """The page as one HTML text that loads nothing from outside.

    Args:
        records: those of one benchmark, with two lengths or more of some stack.
    """
    known = cells(records)
    found = exponents(known)
    styles = canvas.styles(known.runs.assign(stack=known.runs["stack"].map(str)))
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        # Plotly's JSON escapes what could end a script element.
        pictures=[{"title": p.title, "json": Markup(p.figure.to_json())} for p in pictures(known, styles)],
        swatches={cell: Markup(canvas.swatch(style)) for cell, style in styles.items()},
        exponents=rows(found), summary=summary(found), warnings=warnings(known), failed=list(_failed(records)),
        environment=tables.environment(records).to_dict("records"), command=command, agree=AGREE,
        plotly=Markup(get_plotlyjs()),
    )


def pictures(records: Records, styles: Mapping[str, Style]) -> list[Picture]:
    """One picture for each quantity that was measured; `records` as of `cells`."""
    known = [(quantity, points(records, quantity)) for quantity in QUANTITIES]
    return [_picture(records, quantity, shown, styles) for quantity, shown in known if shown]


def _picture(
    records: Records, quantity: Quantity, shown: Mapping[str, pd.DataFrame], styles: Mapping[str, Style]
) -> Picture:
    name = next(name for name in quantity.measured if any(name.split("<")[0] in column for column in records.metrics))
    unit = "CPU ms" if "cpu_ms" in name else "ms" if "_ms" in name else "bytes"
    figure = plots.growth(shown, f"{quantity.name} ({unit})", name.replace("<length>", "1"), styles)
    caption = "Measured, with its counted growth dotted through the middle: only the slopes compare."
    return Picture(f"growth-{quantity.name.replace(' ', '-')}", quantity.name.capitalize(), caption, figure)


def _failed(records: Records) -> Iterator[str]:
    for row in records.runs[records.runs["status"] != FINISHED].itertuples():
        yield f"{row.stack} at {row.length}: {row.status}: {str(row.reason).splitlines()[0]}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the result is the exit code: 0, or 2 where there is nothing to fit."""
    parser = argparse.ArgumentParser(
        prog="python -m analysis.scaling", description="Exponents of time and memory against the length, with a page."
    )
    parser.add_argument("folder", type=Path, help="records of one benchmark: runs/bench/TIME")
    parser.add_argument("--html", type=Path, help="the page to write (default: scaling.html in that folder)")
    given = parser.parse_args(arguments)
    page = given.html or given.folder / "scaling.html"
    try:
        print(_write(given.folder, page))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _write(folder: Path, page: Path) -> str:
    """Writes the page and returns what to print."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; python -m experiments.bench makes one in runs/bench")
    records = load(folder)
    found = exponents(cells(records)) if len(records.runs) else pd.DataFrame()
    if found.empty:
        raise ValueError(f"{folder} has no stack with two lengths; python -m experiments.bench -m ... length=512,2048")
    page.parent.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["python", "-m", "analysis.scaling", str(folder), "--html", str(page)])
    page.write_text(build(records, command), encoding="utf-8")
    return f"{tables.text(rows(found))}\n\n{summary(found)}\npicture: {page}"


if __name__ == "__main__":
    sys.exit(main())
