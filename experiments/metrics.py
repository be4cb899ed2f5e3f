"""The metrics by name: one table of units, directions and titles, for tracking, reports and plots alike."""

from __future__ import annotations

import math
import posixpath
import re
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from mixers.options import nearest


@dataclass(frozen=True)
class Metric:
    """What a name means.

    Attributes:
        pattern: the name; `<length>` in it stands for a number of tokens, `<suite>` for a suite of the task,
            `<scaling>` for one that RoPE has in this evaluation alone.
        unit: of the value; "" for a share between 0 and 1.
        better: the direction of better values; None where more is neither good nor bad.
        title: for people, as in the middle of a sentence; placeholders as in the pattern.
    """

    pattern: str
    unit: str
    better: Literal["lower", "higher"] | None
    title: str

    def of(self, name: str) -> Metric | None:
        """This metric, the placeholders of its title filled in from `name`; None where `name` is not one of these."""
        found = _expression(self.pattern).fullmatch(name)
        if found is None:
            return None
        title = self.title
        for placeholder, value in found.groupdict().items():
            title = title.replace(f"<{placeholder}>", value)
        return replace(self, title=title)


# What a placeholder may stand for. A suite's name starts with no dot: MLflow would take ".." for a path.
_PLACEHOLDERS = {"length": "[1-9][0-9]*", "suite": "[A-Za-z0-9_-][A-Za-z0-9_.-]*", "scaling": "[A-Za-z0-9_-]+"}

METRICS = (
    Metric("train/loss", "nats a token", "lower", "training loss"),
    Metric("val/loss", "nats a token", "lower", "validation loss"),
    Metric("val/accuracy", "", "higher", "validation accuracy"),
    Metric("val/sequence_accuracy", "", "higher", "validation accuracy of whole answers"),
    Metric("val/bits_per_byte", "bits a byte", "lower", "validation bits per byte"),
    Metric("eval/<suite>/loss", "nats a token", "lower", "test loss on <suite>"),
    Metric("eval/<suite>/accuracy", "", "higher", "test accuracy on <suite>"),
    Metric("eval/<suite>/sequence_accuracy", "", "higher", "test accuracy of whole answers on <suite>"),
    Metric("eval/<suite>/bits_per_byte", "bits a byte", "lower", "test bits per byte on <suite>"),
    Metric("eval/<suite>/loss_at_<length>", "nats a token", "lower", "test loss on <suite> after <length> tokens"),
    Metric("eval/<suite>/<scaling>/loss", "nats a token", "lower", "test loss on <suite> under <scaling>"),
    Metric("eval/<suite>/<scaling>/accuracy", "", "higher", "test accuracy on <suite> under <scaling>"),
    Metric("eval/<suite>/<scaling>/sequence_accuracy", "", "higher",
           "test accuracy of whole answers on <suite> under <scaling>"),
    Metric("eval/<suite>/<scaling>/bits_per_byte", "bits a byte", "lower",
           "test bits per byte on <suite> under <scaling>"),
    Metric("eval/<suite>/<scaling>/loss_at_<length>", "nats a token", "lower",
           "test loss on <suite> under <scaling> after <length> tokens"),
    Metric("complexity/parameters", "parameters", "lower", "parameters"),
    Metric("complexity/parameters_active", "parameters", "lower", "parameters that one token reads"),
    Metric("complexity/parameters_without_embeddings", "parameters", "lower", "parameters without embeddings"),
    Metric("complexity/flops_per_token_forward", "FLOPs", "lower", "forward FLOPs a token"),
    Metric("complexity/flops_per_token_train", "FLOPs", "lower", "training FLOPs a token"),
    Metric("complexity/state_bytes_at_<length>", "bytes", "lower", "state after <length> tokens"),
    Metric("complexity/bf16_state_bytes_at_<length>", "bytes", "lower", "bfloat16 state after <length> tokens"),
    Metric("complexity/prefill_flops_at_<length>", "FLOPs", "lower", "FLOPs of a prompt of <length>"),
    Metric("complexity/decode_flops_per_token_at_<length>", "FLOPs", "lower", "decoding FLOPs a token after <length>"),
    Metric("complexity/decode_attention_bytes_at_<length>", "bytes", "lower",
           "attention traffic of a token after <length>"),
    Metric("complexity/activation_bytes_at_<length>", "bytes", "lower", "activations of a training row of <length>"),
    Metric("complexity/attention_bytes_at_<length>", "bytes", "lower", "least memory traffic of attention at <length>"),
    Metric("complexity/score_bytes_at_<length>", "bytes", "lower", "score matrices at <length>, never written"),
    Metric("measured/train_tokens_per_second", "tokens/s", "higher", "training tokens a second"),
    Metric("measured/peak_memory_bytes", "bytes", "lower", "peak memory"),
    Metric("measured/train_step_ms", "ms", "lower", "time of a training step"),
    Metric("measured/train_step_cpu_ms", "ms", "lower", "CPU time of a training step"),
    Metric("measured/train_step_spread", "", "lower", "spread of the times of a training step"),
    Metric("measured/train_flops_per_second", "FLOP/s", "higher", "FLOPs a second in a training step"),
    Metric("measured/prefill_ms_at_<length>", "ms", "lower", "time to read a prompt of <length>"),
    Metric("measured/prefill_cpu_ms_at_<length>", "ms", "lower", "CPU time to read a prompt of <length>"),
    Metric("measured/prefill_spread_at_<length>", "", "lower", "spread of the times to read a prompt of <length>"),
    Metric("measured/decode_cpu_ms_at_<length>", "ms", "lower", "CPU time to decode a token after <length>"),
    Metric("measured/decode_spread_at_<length>", "", "lower", "spread of the times to decode a token after <length>"),
    Metric("measured/peak_flops_per_second", "FLOP/s", "higher", "FLOPs a second of the fastest matrix product"),
    Metric("measured/shared_cores", "cores", "lower", "CPU cores that others kept busy"),
    Metric("measured/decode_ms_at_<length>", "ms", "lower", "time to decode a token after <length>"),
)

_PREFIXES = ("", "k", "M", "G", "T", "P", "E")


@cache
def metric(name: str) -> Metric:
    """What is known of a metric, the title filled in: `eval/kv16/accuracy` is "test accuracy on kv16".

    Raises:
        ValueError: the table has no such name; the message gives the nearest.
    """
    for entry in METRICS:
        found = entry.of(name)
        if found is not None:
            return found
    known = [entry.pattern for entry in METRICS]
    # Compared as a pattern, so that a wrong eval/kv16/acuracy does not come out nearest to val/accuracy.
    shape = re.sub("_at_.*", "_at_<length>", re.sub("/.+/", "/<suite>/", name))
    raise ValueError(f"metric {name!r} is unknown{nearest(shape, known)}; known are {', '.join(known)}")


def direction(name: str) -> Literal["lower", "higher"]:
    """Which values of a metric are better.

    Raises:
        ValueError: the name is unknown, or no direction is better.
    """
    better = metric(name).better
    if better is None:
        raise ValueError(f"metric {name!r} is neither better when lower nor when higher")
    return better


def format_value(name: str, value: float) -> str:
    """A value for people: 1.23 M parameters, 4.1 kB, an accuracy of 0.993. Thousands are 1000, of bytes too.

    Raises:
        ValueError: the name is unknown.
    """
    unit = metric(name).unit
    if unit in ("", "nats a token", "bits a byte"):
        return f"{value:.3f}"
    if unit == "ms":
        return f"{value:.3g} ms" if value < 1000 else f"{value:,.0f} ms"
    return _scaled(value, "B" if unit == "bytes" else "")


def legal(name: str) -> bool:
    """Does MLflow take this name of a metric or param? ASCII letters, digits, `_ - . : /`, space; no odd path."""
    plain = posixpath.normpath(name) == name and name != "." and not name.startswith(("..", "/"))
    return plain and len(name) <= 250 and re.fullmatch(r"[A-Za-z0-9_\-.:/ ]+", name) is not None


def _scaled(value: float, symbol: str) -> str:
    """Three significant digits and a prefix: 1.23 M; 999,999 is 1 M, not 1e+03 k."""
    if not math.isfinite(value):
        return f"{value}"
    for step in range(len(_PREFIXES)):
        shown = f"{value / 1000**step:.3g}"
        if abs(float(shown)) < 1000:
            break
    return f"{shown} {_PREFIXES[step]}{symbol}".rstrip()


@cache
def _expression(pattern: str) -> re.Pattern[str]:
    """The names that a pattern stands for."""
    parts = re.split(r"<(\w+)>", pattern)
    return re.compile("".join(f"(?P<{p}>{_PLACEHOLDERS[p]})" if i % 2 else re.escape(p) for i, p in enumerate(parts)))
