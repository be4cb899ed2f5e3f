"""Properties of numbers and options: gradients, randomness, precision, compilation, cost, definitions."""

from __future__ import annotations

import copy
import io
import math
import typing
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kernels.flops import FlopCounter
from mixers.base import Mixer, Packing
from mixers.conformance.subject import (
    LONG,
    TINY,
    Broken,
    NotApplicable,
    Subject,
    Trials,
    documents,
    gap,
    piecewise,
    same,
    spelled,
)


def gradients(subject: Subject) -> Trials:
    """Gradients to the input and every parameter equal finite differences; those through a state equal forward's."""

    def trial(mixer: Mixer, time: int, how: str) -> float:
        x = subject.input(2, time).requires_grad_()
        weight = subject.input(2, time, seed=1)
        ids = torch.sort(torch.arange(2 * time).view(2, time) % 3, 1).values.int()

        def loss() -> Tensor:
            if how == "extended":
                return (piecewise(mixer, x, (0, time // 2, time))[0] * weight).sum()
            return (mixer(x, Packing(ids) if how == "packed" else None) * weight).sum()

        tensors = [x, *mixer.parameters()]
        grads = torch.autograd.grad(loss(), tensors, allow_unused=True, materialize_grads=True)
        return max(_slope_error(loss, *pair) for pair in zip(tensors, grads, strict=True))

    mixers = list(subject.each())
    for time in (1, 7, 70):
        for label, mixer in mixers if time == 7 else mixers[:1]:
            for how in ("whole", "packed", "extended"):
                if mixer.causal or how != "extended":
                    yield f"T={time} {how}{label}", partial(trial, mixer, time, how)


def _slope_error(loss: Callable[[], Tensor], tensor: Tensor, grad: Tensor, step: float = 1e-6) -> float:
    """The gradient along a random direction against a central difference."""
    direction = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0), dtype=tensor.dtype)
    values = []
    with torch.no_grad():
        for shift in (step, -2 * step):
            tensor.add_(direction, alpha=shift)
            values.append(loss().item())
        tensor.add_(direction, alpha=step)
    slope = (values[0] - values[1]) / (2 * step)
    return abs(slope - (grad * direction).sum().item()) / max(1, abs(slope))


def parameters(subject: Subject) -> Trials:
    """Every parameter gets a gradient, the declared exempt ones aside."""

    def trial(mixer: Mixer) -> float:
        mixer(subject.input(2, LONG)).square().sum().backward()
        known = dict(mixer.named_parameters())
        unknown = set(subject.declared.exempt) - set(known)
        if unknown:
            raise Broken(f"exempt names no parameter: {', '.join(sorted(unknown))}")
        without = [
            name
            for name, p in known.items()
            if p.requires_grad
            and p.numel()
            and name not in subject.declared.exempt
            and (p.grad is None or not p.grad.any())
        ]
        if without:
            raise Broken(f"no gradient: {', '.join(without)}")
        return 0.0

    if not any(True for _ in subject.build().parameters()):
        raise NotApplicable("it has no parameters")
    for label, mixer in subject.each():
        yield f"T={LONG}{label}", partial(trial, mixer)


def dropout(subject: Subject) -> Trials:
    """Nothing is random in eval mode, with a dropout option on too; in training mode it then is."""

    def trial(changes: dict[str, Any]) -> float:
        mixer, x = subject.build(**changes), subject.input(2, 17)
        with torch.no_grad():
            same(mixer(x), mixer(x), "two passes in eval mode")
            if mixer.causal:
                same(piecewise(mixer, x, (0, 9, 17))[0], piecewise(mixer, x, (0, 9, 17))[0], "two decodes in eval mode")
            mixer.train()
            if changes and torch.equal(mixer(x), mixer(x)):
                raise Broken("two passes in training mode are equal")
        return 0.0

    yield "T=17", partial(trial, {})
    if "dropout" in subject.names:
        yield "T=17 dropout=0.5", partial(trial, {"dropout": 0.5})


def determinism(subject: Subject) -> Trials:
    """A seed fixes weights, outputs and gradients bit by bit, and no call leaves anything behind in the mixer.

    The second time, activations are computed again in the backward pass (`torch.utils.checkpoint`).
    """

    def trial(changes: dict[str, Any], train: bool) -> float:
        results = []
        for again in (False, True):
            mixer, x = subject.build(**changes).train(train), subject.input(2, 17).requires_grad_()
            torch.manual_seed(1)
            y = checkpoint(mixer, x, use_reentrant=False) if again else mixer(x)
            grads = torch.autograd.grad(y.square().sum(), [x, *mixer.parameters()], allow_unused=True)
            results.append([*mixer.state_dict().values(), y, *(g for g in grads if g is not None)])
        for first, second in zip(*results, strict=True):
            same(first, second, "two builds and passes from one seed")
        if mixer.causal and not train:
            with torch.no_grad():
                piecewise(mixer, subject.input(3, 9, seed=1), (0, 4, 9))
                same(mixer(x), y, "a pass after a decode")
        return 0.0

    for changes in subject.settings:
        for train in (False, True):
            yield f"T=17 {'train' if train else 'eval'}{spelled(changes)}", partial(trial, changes, train)


def low_precision(subject: Subject) -> Trials:
    """bf16 and fp16, by autocast and in the weights: finite, near float64, and parameters keep their dtype."""

    def trial(mixer: Mixer, dtype: torch.dtype, autocast: bool, time: int, size: float) -> float:
        wide = subject.input(2, time) * size
        with torch.no_grad():
            expected = mixer(wide)
        narrow = copy.deepcopy(mixer).to(torch.float32 if autocast else dtype)
        kept = {name: p.dtype for name, p in narrow.named_parameters()}
        x = wide.to(torch.float32 if autocast else dtype).requires_grad_()
        with torch.autocast("cpu", dtype=dtype, enabled=autocast):
            y = narrow(x)
            outputs = [y]
            if mixer.causal:
                with torch.no_grad():
                    outputs.append(piecewise(narrow, x, (0, time // 2, time - 1, time))[0])
        y.float().square().mean().backward()
        bad = [
            name
            for name, p in [("x", x), *narrow.named_parameters()]
            if not (p.grad is None or p.grad.isfinite().all())
        ]
        if bad or not all(out.isfinite().all() for out in outputs):
            raise Broken(f"not finite: {', '.join(bad) if bad else 'the output'}")
        if kept != {name: p.dtype for name, p in narrow.named_parameters()}:
            raise Broken("a parameter changed its dtype")
        if size > 1:
            return 0.0  # rounded scores of that size may well choose another token
        scale = expected.abs().max().clamp(min=1e-6)
        return max(gap(out / scale, expected / scale) for out in outputs)

    mixers = list(subject.each(**subject.declared.smooth))
    for time, size in ((2, 1.0), (65, 1.0), (65, 8.0), (1025, 1.0)):
        for label, mixer in mixers if time < 1025 else mixers[:1]:
            for dtype in (torch.bfloat16, torch.float16):
                for autocast in (True, False):
                    how = "autocast" if autocast else "weights"
                    name = f"T={time} |x|={size:g} {how} {dtype}{label}"
                    yield name, partial(trial, mixer, dtype, autocast, time, size)


def state_dict(subject: Subject) -> Trials:
    """A saved mixer, loaded into another one by weights only, gives the same bits; so does a deep copy."""

    def trial(changes: dict[str, Any]) -> float:
        mixer, other = subject.build(**changes), subject.build(seed=1, **changes)
        x, file = subject.input(2, 17), io.BytesIO()
        torch.save(mixer.state_dict(), file)
        file.seek(0)
        other.load_state_dict(torch.load(file, weights_only=True))
        with torch.no_grad():
            same(other(x), mixer(x), "the loaded mixer")
            return same(copy.deepcopy(mixer)(x), mixer(x), "the copied mixer")

    for changes in subject.settings:
        yield f"T=17{spelled(changes)}", partial(trial, changes)


def compiled(subject: Subject) -> Trials:
    """`torch.compile(fullgraph=True, backend="aot_eager")` equals eager in outputs and gradients."""

    def trial(time: int, ids: Tensor | None) -> float:
        mixer = subject.build()
        if ids is not None and mixer.decode == "recompute":
            return 0.0  # documents one by one: it looks at values, and says so
        torch._dynamo.reset()
        run = torch.compile(mixer, fullgraph=True, backend="aot_eager", dynamic=False)
        packing = None if ids is None else Packing(ids)
        results = []
        for function in (run, mixer):
            x = subject.input(2, time).requires_grad_()
            y = function(x, packing)
            results.append((y, torch.autograd.grad(y.square().sum(), x)[0]))
        torch._dynamo.reset()
        return max(gap(got, expected) for got, expected in zip(*results, strict=True))

    yield "T=17", partial(trial, 17, None)
    yield "T=63 packed", partial(trial, 63, documents(((1,) * 20 + (0,) * 3 + (2,) * 40,) * 2))


def _counted(mixer: Mixer, call: Callable[[], Any]) -> FlopCounter:
    with torch.no_grad(), FlopCounter() as count:
        call()
    return count


def flops(subject: Subject) -> Trials:
    """Counted FLOPs, forward and of one more token, are those of the definition; on meta as on live tensors."""
    reference = subject.declared.reference
    if reference is None:
        raise NotApplicable("no definition is declared (`reference`), whose products could be counted")

    def truth(mixer: Mixer, time: int) -> int:
        return _counted(mixer, lambda: reference(mixer, subject.input(1, time))).total

    def trial(changes: dict[str, Any], time: int) -> float:
        mixer, x = subject.build(**changes), subject.input(1, time)
        ghost = subject.build(**changes).to("meta")
        live = _counted(mixer, lambda: mixer(x))
        if live.dense:
            return 0.0  # tagged as counted densely, masked pairs and all: no truth to hold it against
        counts = {"forward": (live.total, truth(mixer, time))}
        if not changes:
            counts["forward on meta"] = (_counted(ghost, lambda: ghost(x.to("meta"))).total, counts["forward"][1])
        if mixer.causal and mixer.decode == "state":
            with torch.no_grad():
                _, state = piecewise(mixer, x, (0, time))
            step = _counted(mixer, lambda: mixer.extend(x[:, :1], state)).total
            counts["one more token"] = (step, truth(mixer, time + 1) - truth(mixer, time))
        for what, (got, expected) in counts.items():
            if got != expected:
                raise Broken(f"{what}: {got} FLOPs counted, {expected} by the definition")
        return 0.0

    for time in (1, 2, 4, 17):
        for changes in subject.settings:
            yield f"T={time}{spelled(changes)}", partial(trial, changes, time)


def growth(subject: Subject) -> Trials:
    """The counted FLOPs grow with the claimed exponent of the length."""
    claimed = subject.declared.growth
    if claimed is None:
        raise NotApplicable("no exponent is claimed (`growth`)")

    def trial() -> float:
        mixer = subject.build(torch.float32).to("meta")
        points = []
        for time in (2048, 4096, 8192, 16384):
            x = torch.empty(1, time, subject.declared.d_model, device="meta")
            points.append((math.log(time), math.log(max(1, _counted(mixer, partial(mixer, x)).total))))
        middle = [sum(values) / len(points) for values in zip(*points, strict=True)]
        slope = sum((a - middle[0]) * (b - middle[1]) for a, b in points) / sum((a - middle[0]) ** 2 for a, _ in points)
        return abs(slope - claimed)

    yield "T=2048 to 16384", trial


def options(subject: Subject) -> Trials:
    """Every constructor option changes parameters or outputs."""
    alternatives = subject.declared.alternatives
    if not subject.names:
        raise NotApplicable("its constructor has no options")
    if not alternatives:
        raise NotApplicable("no other values are declared (`alternatives`)")
    hints = typing.get_type_hints(subject.cls.__init__)
    free = [
        n
        for n in subject.names
        if not (typing.get_origin(hints.get(n)) is typing.Literal and len(hints[n].__args__) == 1)
    ]

    def trial(name: str) -> float:
        if name not in alternatives:
            raise Broken(f"no other value of {name} is declared")
        before, after = subject.build(), subject.build(**{name: alternatives[name]})
        if [(n, p.shape) for n, p in before.named_parameters()] != [(n, p.shape) for n, p in after.named_parameters()]:
            return 0.0
        for train in (False, True):
            for time in (17, LONG):
                outputs = []
                for mixer in (before, after):
                    torch.manual_seed(0)
                    outputs.append(mixer.train(train)(subject.input(2, time)))
                if gap(*outputs) > TINY:
                    return 0.0
        raise Broken(f"{name}={alternatives[name]} gives the same parameters and outputs")

    for name in free:
        yield name, partial(trial, name)


def definition(subject: Subject) -> Trials:
    """Outputs equal the declared float64 definition, in every setting."""
    reference = subject.declared.reference
    if reference is None:
        raise NotApplicable("no definition is declared (`reference`)")

    def trial(mixer: Mixer, time: int) -> float:
        x = subject.input(2, time)
        with torch.no_grad():
            return gap(mixer(x), reference(mixer, x))

    for time in (0, 1, 2, 17, 70):
        for label, mixer in subject.each():
            yield f"T={time}{label}", partial(trial, mixer, time)
