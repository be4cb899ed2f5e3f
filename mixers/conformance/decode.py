"""Properties of `extend` and of the state it carries."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from mixers.base import Mixer, Packing, State
from mixers.conformance.forward import PACKINGS
from mixers.conformance.subject import LONG, Broken, Subject, Trials, documents, gap, piecewise, same, spelled

CUTS = (
    (0, 1, 2, 5),
    (0, 5, 13),
    (0, 12, 13),
    (0, 7, 10, 13),
    (0, 0, 4, 4, 12, 13),
    tuple(range(14)),
    (0, 100, LONG),
    (0, 1, 63, 64, 65, 128, LONG),
)


def cuts_of_extend(subject: Subject) -> Trials:
    """`extend` over any cut equals `forward` on the whole, with gradients recorded and without."""

    def trial(mixer: Mixer, cuts: tuple[int, ...], grad: bool) -> float:
        x = subject.input(2, cuts[-1])
        with torch.set_grad_enabled(grad):
            y, state = piecewise(mixer, x, cuts)
            if state.length != cuts[-1]:
                raise Broken(f"state.length is {state.length} after {cuts[-1]} tokens")
            return gap(y, mixer(x))

    mixers = list(subject.causal())
    for cuts in CUTS:
        for label, mixer in mixers:
            for grad in (True, False):
                name = "" if grad else " no_grad"
                yield f"T={cuts[-1]} cut at {list(cuts[1:-1])}{name}{label}", partial(trial, mixer, cuts, grad)


class _Recomputed(Mixer):
    """The base class's default over another mixer's forward: what every `mix` of one's own must equal."""

    def __init__(self, mixer: Mixer):
        super().__init__()
        self.mixer = mixer

    def whole(self, x: Tensor) -> Tensor:
        """One document a row."""
        return self.mixer(x)


def recomputation(subject: Subject) -> Trials:
    """`extend` over packed pieces, packed from the first token on or later, equals the recomputing default."""

    def trial(mixer: Mixer, ids: Tensor, cuts: tuple[int, ...], late: bool) -> float:
        ids = ids.clone()
        if late:  # what was fed without packing is one document of id 1
            ids[:, : cuts[1]] = 1
        x = subject.input(*ids.shape)
        outputs: list[Tensor] = []
        with torch.no_grad():
            for each in (mixer, _Recomputed(mixer)):
                state, pieces = each.start(len(x), x), []
                for a, b in pairwise(cuts):
                    packing = None if late and not a else Packing(ids[:, a:b])
                    y, state = each.extend(x[:, a:b], state, packing)
                    pieces.append(y)
                outputs.append(torch.cat(pieces, 1))
            if type(mixer).whole is not Mixer.whole and type(mixer).mix is not Mixer.mix:
                outputs = [*outputs, mixer.whole(x), mixer(x)]
        return max(gap(got, expected) for got, expected in zip(outputs[::2], outputs[1::2], strict=True))

    mixers = list(subject.causal())
    for rows in PACKINGS[1:]:
        ids = documents(rows)
        time = ids.shape[1]
        for label, mixer in mixers if time < LONG else mixers[:1]:
            for cuts in ((0, time // 2, time), (0, 1, 2, time - 1, time)):
                for late in (False, True):
                    if late and not (ids[:, cuts[1] :] > 1).any():
                        continue
                    name = " packed late" if late else ""
                    yield f"T={time} cut at {list(cuts[1:-1])}{name}{label}", partial(trial, mixer, ids, cuts, late)


def decode_after_padding(subject: Subject) -> Trials:
    """Rows padded left, right or in the middle go on, token by token or at once, as their real tokens alone do."""

    def trial(mixer: Mixer, time: int, steps: int, side: str, at_once: bool) -> float:
        ids = torch.zeros(3, time, dtype=torch.int32)
        for row, n in enumerate((time - 2, 1, time)):
            where = {"left": range(time - n, time), "right": range(n), "middle": [*range(n - 1), time - 1]}[side]
            ids[row, list(where)] = 1
        x = subject.input(3, time + steps)
        with torch.no_grad():
            _, state = mixer.extend(x[:, :time], mixer.start(3, x), Packing(ids))
            pieces = []
            for piece in [x[:, time:]] if at_once else x[:, time:].split(1, 1):
                y, state = mixer.extend(piece, state)
                pieces.append(y)
            alone_rows = [torch.cat([x[i, :time][ids[i] > 0], x[i, time:]])[None] for i in range(3)]
            expected = torch.cat([mixer(row)[:, -steps:] for row in alone_rows])
        return gap(torch.cat(pieces, 1), expected)

    mixers = list(subject.causal())
    for time, steps in ((3, 1), (7, 4), (70, 3)):
        for side in ("left", "right", "middle"):
            for at_once in (True, False):
                for label, mixer in mixers if time == 7 else mixers[:1]:
                    name = f"{time} slots padded {side}, then {steps} {'at once' if at_once else 'one by one'}{label}"
                    yield name, partial(trial, mixer, time, steps, side, at_once)


def fork(subject: Subject) -> Trials:
    """A clone and its state go on independently, and a fork leaves the inputs alone."""

    def trial(mixer: Mixer, time: int, ragged: bool) -> float:
        sequences = [subject.input(2, time + 4), subject.input(2, time + 4, seed=1)]
        sequences[1][:, : time + 1] = sequences[0][:, : time + 1]
        kept = [x.clone() for x in sequences]
        packing = Packing(torch.ones(2, time, dtype=torch.int32)) if ragged else None
        with torch.no_grad():
            _, state = mixer.extend(sequences[0][:, :time], mixer.start(2, sequences[0]), packing)
            # One more token, so that a cache that grows has room to be written in place.
            _, state = mixer.extend(sequences[0][:, time : time + 1], state)
            states = [state, state.clone()]
            outputs: list[list[Tensor]] = [[], []]
            for t in range(time + 1, time + 4):
                for i, x in enumerate(sequences):
                    y, states[i] = mixer.extend(x[:, t : t + 1], states[i])
                    outputs[i].append(y)
            worst = max(gap(torch.cat(y, 1), mixer(x)[:, time + 1 :]) for y, x in zip(outputs, kept, strict=True))
        return max(worst, *(same(x, before, "x after the call") for x, before in zip(sequences, kept, strict=True)))

    mixers = list(subject.causal())
    for time in (1, 5, 21):
        for label, mixer in mixers:
            for ragged in (False, True):
                yield f"T={time}{' packed' if ragged else ''}{label}", partial(trial, mixer, time, ragged)


def state_rows(subject: Subject) -> Trials:
    """Every tensor of a state has the batch first, so rows can be reordered, dropped and repeated."""

    def trial(mixer: Mixer, time: int, ragged: bool) -> float:
        x, rows = subject.input(3, time + 4), torch.tensor([2, 0, 0, 1, 2])
        packing = Packing(torch.ones(3, time, dtype=torch.int32)) if ragged else None
        with torch.no_grad():
            _, state = mixer.extend(x[:, :time], mixer.start(3, x), packing)
            for name, tensor in state.tensors.items():
                if tensor.shape[:1] != (3,):
                    raise Broken(f"state {name!r} has shape {list(tensor.shape)} for 3 rows: batch comes first")
            y, _ = mixer.extend(x[rows, time:], state.reorder(rows))
            return gap(y, mixer(x)[rows, time:])

    mixers = list(subject.causal())
    for time in (0, 1, 9, 70):
        for label, mixer in mixers:
            for ragged in (False, True):
                yield f"B=3 T={time}{' packed' if ragged else ''}{label}", partial(trial, mixer, time, ragged)


def state_moves(subject: Subject) -> Trials:
    """A state goes on in another dtype, and on another device (meta)."""

    def trial(changes: dict[str, Any], time: int, ragged: bool) -> float:
        mixer, x = subject.build(**changes), subject.input(2, time + 2)
        packing = Packing(torch.ones(2, time, dtype=torch.int32)) if ragged else None
        with torch.no_grad():
            _, state = mixer.extend(x[:, :time], mixer.start(2, x), packing)
            expected, _ = mixer.extend(x[:, time:], state.clone())
            y, after = mixer.float().extend(x[:, time:].float(), state.clone().to(dtype=torch.float32))
            strange = {t.dtype for t in after.tensors.values() if t.is_floating_point()} - {torch.float32}
            if strange:
                raise Broken(f"a state of float32 goes on as {strange}")
            if not changes and (mixer.decode != "recompute" or not ragged):
                ghost, _ = mixer.to("meta").extend(
                    x[:, time:].to("meta", torch.float32), state.to("meta", torch.float32)
                )
                if ghost.device.type != "meta":
                    raise Broken(f"a state on meta gives an output on {ghost.device}")
        return gap(y, expected)

    list(subject.causal())
    for time in (0, 1, 9, 70):
        for changes in subject.settings if time == 9 else subject.settings[:1]:
            for ragged in (False, True):
                if subject.build(**changes).causal:
                    name = f"T={time}{' packed' if ragged else ''}{spelled(changes)}"
                    yield name, partial(trial, changes, time, ragged)


def state_bytes(subject: Subject) -> Trials:
    """Bytes counted on meta are those of live tensors, no larger storage hangs on them, and most of them are read."""

    def trial(changes: dict[str, Any], time: int) -> float:
        states = []
        for device in ("cpu", "meta"):
            with torch.device(device):
                mixer = subject.build(torch.float32, **changes)
            x = subject.input(1, time + 3, torch.float32).to(device)
            with torch.no_grad():
                _, filled = piecewise(mixer, x[:, :time], (0, time))
                _, later = mixer.extend(x[:, time:], filled.clone())
            states.append((filled, later))
        (live, later), ghosts = states[0], states[1]
        counted = [state.bytes + state.bookkeeping_bytes for state in ghosts]
        real = [sum(t.numel() * t.element_size() for t in s.tensors.values()) for s in (live, later)]
        if counted != real:
            raise Broken(f"{counted[0]} and 3 tokens later {counted[1]} bytes on meta, live {real[0]} and {real[1]}")
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in live.tensors.values()}
        if sum(held.values()) > 2 * live.bytes + 64:
            raise Broken(f"a state of {live.bytes} bytes keeps {sum(held.values())} alive")
        return 0.0

    def reading(mixer: Mixer, time: int) -> float:
        x = subject.input(1, time + 3)
        with torch.no_grad():
            _, state = piecewise(mixer, x[:, :time], (0, time))
        floats = {name: t.clone().requires_grad_() for name, t in state.tensors.items() if t.is_floating_point()}
        if not floats:
            return 0.0
        y, _ = mixer.extend(x[:, time:], State({**state.tensors, **floats}, state.length))
        grads = torch.autograd.grad(y.square().sum(), list(floats.values()), allow_unused=True)
        read = sum(int((g != 0).sum()) for g in grads if g is not None)
        size = sum(t.numel() for t in floats.values())
        # Caches may double when they grow, so half of the entries can be room to grow; more is padding.
        if read < subject.declared.reads * size:
            raise Broken(f"the next tokens read {read} of {size} entries: the state is padded")
        return 0.0

    list(subject.causal())
    for time in (0, 1, 8, 21, 127):
        for changes in subject.settings if time == 21 else subject.settings[:1]:
            if subject.build(**changes).causal:
                yield f"T={time}{spelled(changes)}", partial(trial, changes, time)
    for label, mixer in subject.causal():
        if mixer.decode != "recompute":
            yield f"T=127{label}", partial(reading, mixer, 127)
