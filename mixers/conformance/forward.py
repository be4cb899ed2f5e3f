"""Properties of `forward`: shapes, causality, packing and padding, order."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from mixers.base import Mixer, Packing
from mixers.conformance.subject import (
    LONG,
    Broken,
    NotApplicable,
    Subject,
    Trials,
    alone,
    documents,
    gap,
    piecewise,
    same,
    spelled,
)

LENGTHS = (0, 1, 2, 17, 63, 127, 1025)
# Pads on the left, on the right, inside of a run, at row ends; documents of one token; a row of pads.
PACKINGS = (
    ((0, 1),),
    ((1, 1, 0, 0), (0, 0, 1, 1)),
    ((1, 2, 2, 0, 2, 3, 3, 3, 0), (0, 0, 5, 0, 5, 2, 2, 2, 2), (0,) * 9),
    ((1,) * 40 + (0,) * 30 + (2,) * 80, (0,) * 5 + (1,) * 59 + (2,) * 2 + (3,) * 84),
)


def shape_and_dtype(subject: Subject) -> Trials:
    """[B, T, D] of x's dtype, for one row and several."""

    def trial(rows: int, dtype: torch.dtype) -> float:
        x = subject.input(rows, 5, dtype)
        y = subject.build(dtype)(x)
        if not isinstance(y, Tensor) or y.shape != x.shape or y.dtype != dtype:
            got = f"{list(y.shape)} of {y.dtype}" if isinstance(y, Tensor) else type(y).__name__
            raise Broken(f"forward gives {got} for x {list(x.shape)} of {dtype}")
        return 0.0 if y.isfinite().all() else math.inf

    for rows in (1, 3):
        for dtype in (torch.float32, torch.float64):
            yield f"B={rows} T=5 {dtype}", partial(trial, rows, dtype)


def lengths(subject: Subject) -> Trials:
    """Any length gives what a longer, round one gives for its first tokens."""
    whole = subject.input(1, 1088)

    @cache
    def of_whole(mixer: Mixer) -> Tensor:
        return mixer(whole)

    def trial(mixer: Mixer, time: int) -> float:
        with torch.no_grad():
            y = mixer(whole[:, :time])
            if mixer.causal:
                return gap(y, of_whole(mixer)[:, :time])
            # Where later tokens count, they are pads.
            packing = Packing.from_lengths(torch.tensor([time]), time + -time % 64)
            return gap(y, mixer(whole[:, : packing.documents.shape[1]], packing)[:, :time])

    mixers = list(subject.each())
    for time in LENGTHS:
        for label, mixer in mixers:
            yield f"T={time}{label}", partial(trial, mixer, time)


def batch_rows(subject: Subject) -> Trials:
    """A row's output is that of the row alone, and its gradient reaches no other row."""

    def trial(mixer: Mixer, time: int) -> float:
        x = subject.input(3, time).requires_grad_()
        y = mixer(x)
        grad = torch.autograd.grad(y[1].square().sum(), x)[0]
        leak = grad[[0, 2]].abs().max().item()
        return leak or max(gap(y[i : i + 1], mixer(x[i : i + 1])) for i in range(3))

    for time in (1, 2, 17, LONG):
        for label, mixer in subject.each():
            yield f"B=3 T={time}{label}", partial(trial, mixer, time)


def strides(subject: Subject) -> Trials:
    """Transposed, strided, sliced and expanded inputs give what their contiguous copies give; none is changed."""
    wide = subject.input(3, 17)
    views = {
        "B=1 expanded to 3": lambda: wide[:1].expand(3, -1, -1),
        "T=1 expanded to 17": lambda: wide[:, :1].expand(-1, 17, -1),
        "transposed [T, B, D]": lambda: wide.transpose(0, 1).contiguous().transpose(0, 1),
        "transposed [B, D, T]": lambda: wide.transpose(1, 2).contiguous().transpose(1, 2),
        "[..., ::2]": lambda: wide.repeat_interleave(2, -1)[..., ::2],
        "slice of [B, T, 3 D]": lambda: torch.cat([wide] * 3, -1)[..., wide.shape[-1] : 2 * wide.shape[-1]],
    }

    def trial(mixer: Mixer, view: Callable[[], Tensor]) -> float:
        x = view()
        kept = x.contiguous().clone()
        with torch.no_grad():
            worst = gap(mixer(x), mixer(kept.clone()))
            if mixer.causal:
                worst = max(worst, gap(piecewise(mixer, x, (0, 5, 17))[0], mixer(kept.clone())))
        return max(worst, same(x, kept, "x after the call"))

    for name, view in views.items():
        for label, mixer in subject.each():
            yield f"{name}{label}", partial(trial, mixer, view)


def meta(subject: Subject) -> Trials:
    """Everything runs on the meta device and gives the right shapes."""

    def trial(changes: dict[str, Any], time: int) -> float:
        with torch.device("meta"):
            mixer = subject.build(**changes)
        x = subject.input(2, time).to("meta")
        outputs = [mixer(x)]
        if mixer.decode != "recompute":  # the recomputing default looks at the documents' values
            outputs.append(mixer(x, Packing(torch.ones(2, time, dtype=torch.int32, device="meta"))))
        if mixer.causal:
            outputs.append(piecewise(mixer, x, (0, time // 2, time))[0])
        for y in outputs:
            if y.shape != x.shape or y.device.type != "meta":
                raise Broken(f"{list(y.shape)} on {y.device} instead of {list(x.shape)} on meta")
        return 0.0

    for time in (0, 1, 17):
        # Operations on meta are Python: every setting at one length is enough.
        for changes in subject.settings if time == 17 else subject.settings[:1]:
            yield f"T={time}{spelled(changes)}", partial(trial, changes, time)


def causality_of_gradients(subject: Subject) -> Trials:
    """The gradient of every earlier output to a later input is exactly zero."""

    def trial(mixer: Mixer, time: int, cut: int, ids: Tensor | None) -> float:
        x = subject.input(2, time).requires_grad_()
        y = mixer(x, None if ids is None else Packing(ids))
        grad = torch.autograd.grad((y[:, :cut] * subject.input(2, cut, seed=1)).sum(), x)[0]
        return grad[:, cut:].abs().max().item()

    yield from _before_and_after(subject, trial)


def causality_of_values(subject: Subject) -> Trials:
    """Later inputs that change by 1e3 leave every earlier output within 1e-12."""

    def trial(mixer: Mixer, time: int, cut: int, ids: Tensor | None) -> float:
        x, packing = subject.input(2, time), None if ids is None else Packing(ids)
        changed = x.clone()
        changed[:, cut:] += 1e3 * subject.input(2, time - cut, seed=1)
        with torch.no_grad():
            return gap(mixer(changed, packing)[:, :cut], mixer(x, packing)[:, :cut])

    yield from _before_and_after(subject, trial)


def _before_and_after(subject: Subject, trial: Callable[..., float]) -> Trials:
    mixers = list(subject.causal())
    for time, cuts in ((2, [1]), (17, range(1, 17)), (LONG, (1, 16, 32, 48, 63, 64, 65, 96, 127, 128, 129, LONG - 1))):
        packed = documents(((1,) * (time // 2) + (2,) * (time - time // 2),) * 2)
        for cut in cuts:
            for label, mixer in mixers if time < LONG else mixers[:1]:
                for name, ids in (("", None), (" packed", packed)):
                    yield f"T={time} later from {cut}{name}{label}", partial(trial, mixer, time, cut, ids)


def packed_documents(subject: Subject) -> Trials:
    """A packed call equals each document extracted, run alone and scattered back."""

    def trial(mixer: Mixer, ids: Tensor) -> float:
        x = subject.input(*ids.shape)
        with torch.no_grad():
            return gap(mixer(x, Packing(ids)), alone(mixer, x, ids))

    for rows in PACKINGS:
        for label, mixer in subject.each():
            yield f"documents {_short(rows)}{label}", partial(trial, mixer, documents(rows))


def pads(subject: Subject) -> Trials:
    """Whatever stands at pads changes nothing; their output and gradient are 0."""

    def trial(mixer: Mixer, ids: Tensor, content: float) -> float:
        empty = ids == 0
        clean = subject.input(*ids.shape)
        dirty = clean.masked_fill(empty[..., None], content).requires_grad_()
        y = mixer(dirty, Packing(ids))
        grad = torch.autograd.grad(y.square().sum(), dirty)[0]
        if y[empty].any() or grad[empty].any():
            raise Broken("output or gradient at pads is not 0")
        wanted = clean.clone().requires_grad_()
        truth = torch.autograd.grad(alone(mixer, wanted, ids).square().sum(), wanted)[0]
        return max(gap(y, alone(mixer, clean, ids)), gap(grad, truth))

    mixers = list(subject.each())
    for rows in PACKINGS[:3]:
        for batch in {1, len(rows)}:
            for content in (3.0, math.inf, math.nan):
                for label, mixer in mixers if math.isnan(content) else mixers[:1]:
                    name = f"B={batch} documents {_short(rows[:batch])} pads hold {content}{label}"
                    yield name, partial(trial, mixer, documents(rows[:batch]), content)


def _short(rows: tuple[tuple[int, ...], ...]) -> str:
    return " ".join("".join(map(str, row)) for row in rows) if len(rows[0]) < 10 else f"[{len(rows)}, {len(rows[0])}]"


def bidirectional(subject: Subject) -> Trials:
    """The form that is not causal sees its whole row, and refuses to decode with a ValueError."""

    def trial(mixer: Mixer) -> float:
        x = subject.input(2, 3).requires_grad_()
        grad = torch.autograd.grad(mixer(x)[0, 0].square().sum(), x)[0]
        if not all(grad[0, t].any() for t in range(3)):
            raise Broken("the first token does not see the later ones")
        try:
            mixer.start(1, x)
        except ValueError:
            return grad[1].abs().max().item()
        raise Broken("start gives a state: there is no decode")

    mixers = list(subject.each(causal=False))
    if not mixers:
        raise NotApplicable("it has no form with causal=False")
    for label, mixer in mixers:
        yield f"T=3{label}", partial(trial, mixer)


def permutation(subject: Subject) -> Trials:
    """Bidirectional and without positions, permuted tokens give the permuted outputs."""
    if subject.declared.unordered is None:
        raise NotApplicable("no options are declared under which it ignores order (`unordered`)")
    mixer = subject.build(**subject.declared.unordered)

    def trial(time: int) -> float:
        x, order = subject.input(2, time), torch.randperm(time, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            return gap(mixer(x[:, order]), mixer(x)[:, order])

    for time in (2, 17, 63):
        yield f"T={time}{spelled(dict(subject.declared.unordered))}", partial(trial, time)
