"""The one interface of all token mixers: Mixer, Packing, Memory, State.

Shape legend of the whole project: B batch, T query time, S key time, D model width, H query heads, G key/value heads,
K query/key head dim, V value head dim, N state dim, C chunk, W window. At every boundary heads come after time:
[B, T, H, K].

Callers use the door (`forward`, `start`, `extend`); authors write `empty` and `mix` behind it, or at first only
`whole`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Packing:
    """Which document each token belongs to.

    The result of a packed call equals extracting each document, running it alone and scattering it back. A document is
    one run of one id; id 0 is padding and may stand anywhere, also inside of a run.

    Args:
        documents: [B, T] int32, ids >= 0.
        check: look at the values (it waits for the device); False where the caller vouches for them.
    Raises:
        ValueError: wrong shape or dtype, a negative id, or an id that returns after another document.
    """

    documents: Tensor
    check: bool = field(default=True, repr=False, compare=False)

    def __post_init__(self) -> None:
        ids = self.documents
        if ids.dim() != 2 or ids.dtype != torch.int32:
            raise ValueError(f"Packing wants documents [B, T] of dtype int32; got {list(ids.shape)} of {ids.dtype}")
        if not self.check or ids.is_meta or not ids.numel():
            return
        if (ids < 0).any():
            raise ValueError(f"Packing wants ids >= 0 (0 is padding); got {int(ids.min())}")
        compact = take(ids, _pads_last(ids))
        starts = (compact > 0) & (compact != torch.cat([torch.zeros_like(compact[:, :1]), compact[:, :-1]], 1))
        first = torch.where(starts, compact, -torch.arange(compact.shape[1], device=ids.device, dtype=ids.dtype))
        ordered = first.sort(1).values
        again = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] > 0)
        if again.any():
            row = int(again.any(1).nonzero()[0, 0])
            raise ValueError(
                f"Packing: document {int(ordered[row, 1:][again[row]][0])} of row {row} returns after another "
                "document; each document is one run of one id"
            )

    @classmethod
    def from_lengths(cls, lengths: Tensor, time: int) -> Packing:
        """One document a row, padded on the right: lengths [B] -> documents [B, time].

        Raises:
            ValueError: a length below 0 or above `time`.
        """
        if not lengths.is_meta and lengths.numel() and not 0 <= int(lengths.min()) <= int(lengths.max()) <= time:
            raise ValueError(f"lengths must be from 0 to time={time}; got {lengths.tolist()}")
        return cls((torch.arange(time, device=lengths.device) < lengths[:, None]).to(torch.int32))

    def compact(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Pads to the end of each row: x [B, T, ...] with zeros there, its documents [B, T], the order to undo it."""
        if x.shape[:2] != self.documents.shape:
            raise ValueError(f"x {list(x.shape)} does not fit packing of documents {list(self.documents.shape)}")
        order = _pads_last(self.documents)
        documents = take(self.documents, order)
        return blank(take(x, order), documents), documents, torch.argsort(order, dim=1)


@dataclass(frozen=True, eq=False)
class Memory:
    """What an attention mixer cross-attends to.

    Args:
        x: [B, S, D]
        packing: its documents; a query sees the tokens of its own document (id 1 where x has no packing). None: every
            query of the row sees all of them.
    """

    x: Tensor
    packing: Packing | None = None

    def compact(self) -> tuple[Tensor, Tensor | None]:
        """x with pads last and its documents [B, S]."""
        return (self.x, None) if self.packing is None else self.packing.compact(self.x)[:2]


# What the door keeps for all parts of a state, once anything was packed: the id of the last real token, the position of
# the next token of that document, and how many real tokens the row holds; each [B] int32.
DOOR = ("document", "position", "filled")


@dataclass
class State:
    """What a mixer remembers: tensors with batch first, and one upper bound of the tokens fed.

    Nested parts use dotted names ("3.mixer.k"). `length` counts slots; rows may hold fewer real tokens.
    """

    tensors: dict[str, Tensor]
    length: int = 0

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def get(self, name: str) -> Tensor | None:
        """The tensor of that name, or None."""
        return self.tensors.get(name)

    def map(self, change: Callable[[Tensor], Tensor]) -> State:
        """The same state with every tensor changed."""
        return State({name: change(t) for name, t in self.tensors.items()}, self.length)

    def clone(self) -> State:
        """An independent copy: `extend` consumes its state, a fork does not."""
        return self.map(Tensor.clone)

    def detach(self) -> State:
        """Cut from the graph, for truncated back-propagation."""
        return self.map(Tensor.detach)

    def reorder(self, rows: Tensor) -> State:
        """Rows chosen by index [B'], as beam search needs."""
        return self.map(lambda t: t.index_select(0, rows.to(t.device)))

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> State:
        """On another device, and floating tensors of another dtype."""
        return self.map(lambda t: t.to(device=device, dtype=dtype if t.is_floating_point() else None))

    def part(self, prefix: str) -> State:
        """The state of one part, with what the door keeps for all of them."""
        start = prefix + "."
        own = {name[len(start) :]: t for name, t in self.tensors.items() if name.startswith(start)}
        return State(own | {name: self.tensors[name] for name in DOOR if name in self.tensors}, self.length)

    @property
    def own(self) -> dict[str, Tensor]:
        """The tensors without the door's books: what `mix` gives back when nothing changed."""
        return {name: t for name, t in self.tensors.items() if name not in DOOR}

    @property
    def packed(self) -> bool:
        """Was anything packed or padded so far?"""
        return "document" in self.tensors

    @property
    def bytes(self) -> int:
        """Bytes of what is remembered of the tokens (floating tensors)."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values() if t.is_floating_point())

    @property
    def bookkeeping_bytes(self) -> int:
        """Bytes of ids and positions."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values() if not t.is_floating_point())

    def opened(self, batch: int, device: torch.device) -> State:
        """With the door's books: what was fed without packing is one document of id 1."""
        if self.packed:
            return self
        whole = torch.full((batch,), self.length, dtype=torch.int32, device=device)
        return State(
            self.tensors | {"document": whole.clamp(max=1), "position": whole, "filled": whole.clone()}, self.length
        )


class Mixer(nn.Module):
    """[B, T, D] -> [B, T, D]: the door, the same for every mixer.

    Authors write `mix` and `empty`, or only `whole`; everything else has a right default.

    Attributes:
        causal: False marks a bidirectional mixer; it has no decode.
        takes_memory: the mixer can cross-attend.
        has_convolution: the mixer has a short convolution of its own, so a block leaves its own out.
        decode: "recompute" marks a mixer that extends by running everything again.
    """

    causal: bool = True
    takes_memory: bool = False
    has_convolution: bool = False

    def forward(self, x: Tensor, packing: Packing | None = None, memory: Memory | None = None) -> Tensor:
        """Mix whole sequences.

        Args:
            x: [B, T, D]
            packing: documents and padding; None: each row is one document.
            memory: makes an attention mixer cross-attend.
        Returns:
            [B, T, D], dtype of x; 0 at pads.
        """
        self._check(x, memory)
        if packing is None:
            return self.mix(x, None, None, memory)[0]
        compact, documents, undo = packing.compact(x)
        y, _ = self.mix(compact, None, documents, memory)
        return take(blank(y, documents), undo)

    def start(self, batch: int, like: Tensor, memory: Memory | None = None) -> State:
        """The state before any token, with the dtype and device of `like`; a memory's keys are kept in it.

        Raises:
            ValueError: the mixer is bidirectional, or cannot cross-attend.
        """
        if not self.causal:
            raise ValueError(f"{type(self).__name__} with causal=False has no decode: every token sees the later ones")
        self._check(None, memory)
        kept = self.empty(batch, like)
        return State(kept if memory is None else kept | self.remember(memory))

    def extend(self, x: Tensor, state: State, packing: Packing | None = None) -> tuple[Tensor, State]:
        """Any further piece of the sequence: decode, chunked prefill and continuation in one.

        For any cut of a sequence, `extend` piece by piece equals `forward` on the whole. Consumes `state` (caches are
        written in place when no gradients are recorded; fork with `clone`), never x.

        Args:
            x: [B, T, D], T >= 0.
            packing: of this piece; None: each row's last document goes on. An id must be the last one of its row or new
                to it: a document that ended cannot go on (not checked over calls: that takes all ids ever seen).
        Returns:
            [B, T, D], and the state after it.
        Raises:
            ValueError: a state of another mixer, batch or kind of numbers.
        """
        self._check(x, None)
        self._check_state(x, state)
        if packing is None and not state.packed:
            y, tensors = self.mix(x, state, None)
            return y, State(tensors, state.length + x.shape[1])
        state = state.opened(x.shape[0], x.device)
        if packing is None:
            documents = state["document"].clamp(min=1)[:, None].expand(x.shape[:2])
            y, tensors = self.mix(x, state, documents)
        else:
            compact, documents, undo = packing.compact(x)
            y, tensors = self.mix(compact, state, documents)
            y = take(blank(y, documents), undo)
        return y, State(tensors | _books(state, documents), state.length + x.shape[1])

    def empty(self, batch: int, like: Tensor) -> dict[str, Tensor]:
        """The tensors of the state before any token, batch first."""
        return {"inputs": like.new_zeros(batch, 0, like.shape[-1])}

    def mix(
        self, x: Tensor, past: State | None, documents: Tensor | None, memory: Memory | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The mixer proper.

        Args:
            x: [B, T, D], compact: documents are contiguous and pads trail.
            past: None: train, keep nothing.
            documents: [B, T] int32, or None where nothing was packed before.
        Returns:
            [B, T, D] (anything at pads), and the tensors of the state after it ({} is right when past is None).
        """
        return _recompute(self, x, past, documents)

    def whole(self, x: Tensor) -> Tensor:
        """One document a row, from its first token: [B, T, D] -> [B, T, D]. Enough for a causal mixer's first try."""
        raise NotImplementedError(f"{type(self).__name__} must define `mix` and `empty`, or `whole`")

    def remember(self, memory: Memory) -> dict[str, Tensor]:
        """What `start` keeps of a memory: tensors under names that begin with "memory."."""
        raise NotImplementedError

    @property
    def decode(self) -> str:
        """How the mixer extends: "state" or "recompute"."""
        return "recompute" if type(self).mix is Mixer.mix else "state"

    def _check(self, x: Tensor | None, memory: Memory | None) -> None:
        if x is not None and x.dim() != 3:
            raise ValueError(f"{type(self).__name__} wants x [B, T, D]; got {list(x.shape)}")
        if memory is not None and not self.takes_memory:
            raise ValueError(f"{type(self).__name__} cannot cross-attend: memory must be None")

    def _check_state(self, x: Tensor, state: State) -> None:
        # Of no rows: names and kinds, at next to no cost. One that has rows is not batch first: the kit says so.
        for name, like in self.empty(0, x).items():
            held = state.get(name)
            if held is None:
                known = ", ".join(state.own) or "nothing"
                raise ValueError(f"{type(self).__name__} needs {name!r} in its state; got a state of {known}")
            if not like.shape[0] and held.shape[0] != x.shape[0]:
                raise ValueError(f"the state {name!r} is of batch {held.shape[0]}; x is of batch {x.shape[0]}")
            if held.is_floating_point() != like.is_floating_point():
                raise ValueError(f"the state {name!r} must be like {like.dtype}; got {held.dtype}")


def take(x: Tensor, index: Tensor) -> Tensor:
    """Gather [B, T, ...] along time by [B, T']."""
    return x.gather(1, index.view(*index.shape, *[1] * (x.dim() - 2)).expand(*index.shape, *x.shape[2:]))


def blank(x: Tensor, documents: Tensor) -> Tensor:
    """x [B, T, ...] with zeros at pads, whatever stood there."""
    return x.masked_fill((documents == 0).view(*documents.shape, *[1] * (x.dim() - 2)), 0)


def positions(documents: Tensor | None, past: State | None, time: int, device: torch.device) -> Tensor:
    """Position of each token in its own document: [1, T] when nothing was packed, else [B, T]; int64."""
    index = torch.arange(time, device=device)
    if documents is None:
        return (index + (past.length if past is not None else 0))[None]
    before = documents.new_zeros(documents.shape[0]) if past is None else past["document"]
    starts = documents != torch.cat([before[:, None], documents[:, :-1]], 1)[:, :time]
    first = torch.where(starts, index, -1).cummax(1).values if time else index.expand(documents.shape)
    going_on = index if past is None else index + past["position"][:, None]
    return torch.where(first < 0, going_on, index - first)


def _pads_last(documents: Tensor) -> Tensor:
    return torch.sort((documents == 0).to(torch.int8), dim=1, stable=True).indices


def _books(state: State, documents: Tensor) -> dict[str, Tensor]:
    """The door's books after a compact piece."""
    count = (documents > 0).sum(1, dtype=torch.int32)
    last = count[:, None].to(torch.int64)
    place = positions(documents, state, documents.shape[1], documents.device).to(torch.int32) + 1
    return {
        "document": take(torch.cat([state["document"][:, None], documents], 1), last)[:, 0],
        "position": take(torch.cat([state["position"][:, None], place], 1), last)[:, 0],
        "filled": state["filled"] + count,
    }


def _recompute(
    mixer: Mixer, x: Tensor, past: State | None, documents: Tensor | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """`mix` for a mixer that has only `whole`: documents alone, over all inputs kept."""
    if not mixer.causal:
        raise ValueError(f"{type(mixer).__name__} has only `whole`, which is causal: causal=False needs its own `mix`")
    if past is None:
        return (mixer.whole(x) if documents is None else _documents_alone(mixer, x, documents)), {}
    if documents is None:
        inputs = torch.cat([past["inputs"][:, : past.length], x], 1)
        return mixer.whole(inputs)[:, past.length :], {"inputs": inputs}
    kept = past.get("documents")
    if kept is None:
        kept = documents.new_ones(x.shape[0], past.length)
    ids, inputs = torch.cat([kept, documents], 1), torch.cat([past["inputs"], x], 1)
    order = _pads_last(ids)
    ids, inputs = take(ids, order), take(inputs, order)
    y = _documents_alone(mixer, inputs, ids)
    slots = past["filled"][:, None].to(torch.int64) + torch.arange(x.shape[1], device=x.device)
    return take(y, slots), {"inputs": inputs, "documents": ids}


def _documents_alone(mixer: Mixer, x: Tensor, documents: Tensor) -> Tensor:
    """Each document of compact rows through `whole`: slow, right, and free for the author."""
    rows = []
    for row, ids in zip(x, documents.tolist(), strict=True):
        pieces = [mixer.whole(row[None, a:b])[0] if ids[a] else torch.zeros_like(row[a:b]) for a, b in _runs(ids)]
        rows.append(torch.cat(pieces) if pieces else row)
    return torch.stack(rows) if rows else x


def _runs(ids: list[int]) -> Iterable[tuple[int, int]]:
    """Start and end of each run of equal ids."""
    edges = [0, *(i for i in range(1, len(ids)) if ids[i] != ids[i - 1]), len(ids)]
    return itertools.pairwise(edges) if ids else ()
