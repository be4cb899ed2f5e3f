"""The grammar of stacks: one string says the mixers of every layer, in order.

    layout  = pattern clause*
    pattern = item ("+" item)*                           one period, cycled to n_layers and cut there
    item    = [COUNT "*"] (layer | "(" pattern ")")
    layer   = NAME ("|" NAME)* ["@" SHARE]               parallel branches; all layers @a are one set of weights
    clause  = "with" layer ("at" | "before") INDEX+      layers put between those of the period

    3*mamba2 + gqa                         attention after every third Mamba-2
    gqa|mamba2                             both on the same input, in every layer
    mamba2 + mlp with gqa at 7 18          gqa is layers 7 and 18 of the finished stack, the period fills the rest
    mamba2 with gqa@a before 6 12          indices of the period alone: gqa comes before its layers 6 and 12

NAME and SHARE are [A-Za-z_][A-Za-z0-9_.-]*, indices count from 0, white space is free. `mlp` is a layer of its own and
no branch: where it occurs the other layers have no MLP, so that `gqa|mlp` would silently change all of them. The parser
knows no mixers: names are checked against `known`, the registered ones and the aliases of a config. What attends to an
encoder's output has a name too, an alias with `cross: true`: `mha + cross + mlp`, see `arch.encoder_decoder`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from mixers.options import nearest

MLP = "mlp"
# A slip of the finger (10000000*gqa, a thousand parentheses) must not eat the memory or Python's stack.
MOST_LAYERS = 10_000
MOST_NESTED = 50
# `describe` looks for repeated blocks of at most this many layers; published periods have about ten.
LONGEST_BLOCK = 100

_KEYWORDS = ("with", "at", "before")
_TOKEN = re.compile(r"(?s)\s*(?:(?P<name>[A-Za-z_][A-Za-z0-9_.-]*)|(?P<number>-?[0-9]+)|(?P<end>\Z)|(?P<sign>.))")
_HINTS = {
    "*": " (a count comes first: 3*gqa)",
    "|": " (parallel branches are plain names, a share name comes after the last: gqa|mamba2@a)",
    "@": " (a share name belongs to one layer: gqa@a)",
    **dict.fromkeys((MLP, *_KEYWORDS), " (a reserved word; inserted layers are said so: mamba2 + mlp with gqa at 7)"),
}


class LayoutError(ValueError):
    """A layout that cannot be read or filled: what is wrong, the layout, and a caret under the fault."""


@dataclass(frozen=True)
class Layer:
    """One layer: its parallel branches, ("mlp",) for an MLP alone, and the name under which it shares its weights."""

    mixers: tuple[str, ...]
    share: str | None = None

    def __str__(self) -> str:
        return "|".join(self.mixers) + (f"@{self.share}" if self.share else "")


def layers(text: str, n_layers: int | None = None, known: Collection[str] | None = None) -> tuple[Layer, ...]:
    """The layers that a layout stands for.

    Args:
        text: the layout, in the grammar above.
        n_layers: length of the finished stack, inserted layers included. None: whole periods, as few as give two
            layers; with inserted layers the shortest stack that has room for all of them and for one whole period.
        known: the names that a layer may use besides `mlp`; None: any.
    Raises:
        LayoutError: a fault in the text, an unknown name, an index outside the stack, or an n_layers at which some
            layer named in the text would not appear.
    """
    if not isinstance(text, str):
        raise LayoutError(f"layout={text!r} must be a string such as '3*linear + gqa'")
    if n_layers is not None and (type(n_layers) is not int or not 1 <= n_layers <= MOST_LAYERS):
        raise LayoutError(f"n_layers={n_layers!r} must be a whole number from 1 to {MOST_LAYERS:,} (layout: {text})")
    parser = _Parser(text, known)
    period, inserts = parser.layout()
    if n_layers is None:
        n_layers = max(2, _shortest(len(period), inserts))
        parser.limit(n_layers, start=0)
    _check_room(parser, period, inserts, n_layers)
    return tuple(_fill(period, inserts, n_layers))


def describe(stack: Sequence[Layer]) -> str:
    """A short layout of a stack of at least one layer: `2*(3*mamba2 + gqa)`.

    `layers` reads the same stack back, given its length or, from two layers on, without it.
    """
    parts, start = [], 0
    while start < len(stack):
        size, count = _longest_repeat(stack, start)
        block = str(stack[start]) if size == 1 else f"({describe(stack[start : start + size])})"
        parts.append(block if count == 1 else f"{count}*{block}")
        start += size * count
    return " + ".join(parts)


def _longest_repeat(stack: Sequence[Layer], start: int) -> tuple[int, int]:
    """(size, count) of the block whose repeats from `start` reach furthest, the smallest of equals; (1, 1) if none."""
    best, left = (1, 1), len(stack) - start
    for size in range(1, min(left // 2, LONGEST_BLOCK) + 1):
        count = _repeats(stack, start, size)
        if count > 1 and size * count > best[0] * best[1]:
            best = (size, count)
        if size * count == left:
            break
    return best


def _repeats(stack: Sequence[Layer], start: int, size: int) -> int:
    count, block = 1, stack[start : start + size]
    while stack[start + count * size : start + (count + 1) * size] == block:
        count += 1
    return count


@dataclass(frozen=True)
class _Insert:
    layer: Layer
    place: str  # "at": an index of the finished stack; "before": an index of the period's layers
    index: int
    start: int  # of the index in the text


def _shortest(needed: int, inserts: list[_Insert]) -> int:
    """Length of the shortest stack that holds every insert and `needed` layers of the period."""
    filled = max([needed, *(insert.index + 1 for insert in inserts if insert.place == "before")])
    return max([len(inserts) + filled, *(insert.index + 1 for insert in inserts if insert.place == "at")])


def _check_room(parser: _Parser, period: list[Layer], inserts: list[_Insert], n_layers: int) -> None:
    """Every index lies inside, and every layer of the period appears."""
    first = {layer: index for index, layer in reversed(list(enumerate(period)))}
    last = max(first, key=first.__getitem__)
    filled, needed = n_layers - len(inserts), first[last] + 1
    advice = f"n_layers={n_layers}; at least {_shortest(needed, inserts)} layers are needed"
    for insert in inserts:
        what = f"index {insert.index} is outside the"
        if insert.place == "at" and insert.index >= n_layers:
            parser.fail(f"{what} stack of {advice}", insert.start)
        if insert.place == "before" and insert.index >= filled:
            parser.fail(f"{what} {max(filled, 0)} layers of the period at {advice}", insert.start)
    if filled < needed:
        parser.fail(f"'{last}' does not appear at {advice}", parser.starts[last])


def _fill(period: list[Layer], inserts: list[_Insert], n_layers: int) -> Iterator[Layer]:
    """The finished stack: `before` layers go into the cycled period, `at` layers into the result."""
    rest = _cycle(period, {insert.index: insert.layer for insert in inserts if insert.place == "before"})
    fixed = {insert.index: insert.layer for insert in inserts if insert.place == "at"}
    for index in range(n_layers):
        yield fixed[index] if index in fixed else next(rest)


def _cycle(period: list[Layer], before: dict[int, Layer]) -> Iterator[Layer]:
    """The period over and over, with its inserted layers."""
    for index in itertools.count():
        if index in before:
            yield before[index]
        yield period[index % len(period)]


class _Token(NamedTuple):
    kind: str  # name, number, sign or end
    text: str
    start: int


def _tokens(text: str) -> Iterator[_Token]:
    for match in _TOKEN.finditer(text):
        kind = str(match.lastgroup)
        yield _Token(kind, match[kind], match.start(kind))


class _Parser:
    """Recursive descent, one method a rule: it takes the tokens of its rule and leaves the next in `token`."""

    def __init__(self, text: str, known: Collection[str] | None):
        self.text, self.known = text, known
        self.tokens = _tokens(text)
        self.token = next(self.tokens)
        self.nested = 0
        self.starts: dict[Layer, int] = {}  # where each layer is first named in the text
        self.shared: dict[str, Layer] = {}
        self.placed: set[tuple[str, int]] = set()

    def layout(self) -> tuple[list[Layer], list[_Insert]]:
        period = self.pattern()
        inserts: list[_Insert] = []
        while self.accept("with"):
            self.clause(inserts)
        if self.token.kind != "end":
            self.expected("an index, 'with' or the end" if inserts else "'+', 'with' or the end")
        return period, inserts

    def pattern(self) -> list[Layer]:
        start, period = self.token.start, self.item()
        while self.accept("+"):
            period += self.item()
            self.limit(len(period), start)
        return period

    def item(self) -> list[Layer]:
        start, count = self.token.start, 1
        if self.token.kind == "number":
            count = self.number("a repeat", least=1)
            self.take("*", "'*' after the count")
        block = self.group() if self.token.text == "(" else [self.layer()]
        self.limit(count * len(block), start)
        return block * count

    def group(self) -> list[Layer]:
        self.nested += 1
        if self.nested > MOST_NESTED:
            self.fail(f"more than {MOST_NESTED} parentheses inside each other", self.token.start)
        self.take("(", "'('")
        block = self.pattern()
        self.take(")", "'+' or ')'")
        self.nested -= 1
        return block

    def layer(self) -> Layer:
        start, mixers = self.token.start, [self.mixer()]
        while self.accept("|"):
            mixers.append(self.mixer())
        if MLP in mixers and len(mixers) > 1:
            self.fail("mlp is a layer of its own, it cannot be a parallel branch", start)
        layer = Layer(tuple(mixers), self.name("a share name") if self.accept("@") else None)
        self.starts.setdefault(layer, start)
        if layer.share and (other := self.shared.setdefault(layer.share, layer)) != layer:
            self.fail(f"'{layer}' cannot share the weights of '{other}': they hold different mixers", start)
        return layer

    def mixer(self) -> str:
        start = self.token.start
        if self.accept(MLP):
            return MLP
        name = self.name("a mixer")
        if self.known is not None and name not in self.known:
            known = ", ".join(sorted(self.known))
            self.fail(f"unknown mixer '{name}'{nearest(name, self.known)}; known are {known}", start)
        return name

    def name(self, what: str) -> str:
        if self.token.kind != "name" or self.token.text in (MLP, *_KEYWORDS):
            self.expected(what)
        return self.advance().text

    def clause(self, inserts: list[_Insert]) -> None:
        layer, place = self.layer(), self.token.text
        if place not in ("at", "before"):
            self.expected("'at' or 'before'")
        self.advance()
        if self.token.kind != "number":
            self.expected(f"an index after '{place}'")
        while self.token.kind == "number":
            start, index = self.token.start, self.number("an index", least=0)
            if (place, index) in self.placed:
                self.fail(f"'{place} {index}' is said twice", start)
            self.placed.add((place, index))
            inserts.append(_Insert(layer, place, index, start))

    def number(self, what: str, least: int) -> int:
        token = self.advance()
        # Python refuses to read integers of thousands of digits.
        digits = token.text[:12]
        if not least <= int(digits) <= MOST_LAYERS:
            self.fail(f"{what} must be a whole number from {least} to {MOST_LAYERS:,}, got {digits}", token.start)
        return int(digits)

    def limit(self, size: int, start: int) -> None:
        if size > MOST_LAYERS:
            self.fail(f"{size:,} layers are more than the {MOST_LAYERS:,} possible", start)

    def accept(self, text: str) -> bool:
        """Takes the token if it is this one."""
        return self.token.text == text and bool(self.advance())

    def take(self, text: str, what: str) -> None:
        if not self.accept(text):
            self.expected(what)

    def advance(self) -> _Token:
        token, self.token = self.token, next(self.tokens, self.token)
        return token

    def expected(self, what: str) -> NoReturn:
        if self.token.text == ",":
            self.fail("a comma has no place in a layout: '+' joins layers, spaces separate indices", self.token.start)
        end = "the end" if self.text.strip() else "an empty layout"
        found = end if self.token.kind == "end" else repr(self.token.text)
        self.fail(f"expected {what}, found {found}{_HINTS.get(self.token.text, '')}", self.token.start)

    def fail(self, message: str, start: int) -> NoReturn:
        """Shows the layout, or of a long one the part around the fault, on one line with the caret below."""
        line, first = re.sub(r"\s", " ", self.text), max(0, start - 70)
        head, tail = "... " if first else "", " ..." if start + 40 < len(line) else ""
        shown = f"{head}{line[first : start + 40]}{tail}"
        raise LayoutError(f"layout: {message}\n  {shown}\n  {' ' * (start - first + len(head))}^")
