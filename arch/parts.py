"""The parts of a model, each counted on the meta device when a figure is first asked for; see `arch.cost`."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from arch.block import Block
from arch.encoder_decoder import EncoderDecoder
from arch.language_model import LanguageModel
from arch.layout import Layer
from kernels.flops import FlopCounter, Formula
from mixers.base import Memory, Packing, State

M = TypeVar("M", bound=nn.Module)

# The parts that are no layer.
ENDS = ("encoder embedding", "encoder norm", "embedding", "head")


class Kind:
    """What the parts of one kind do to a row x [1, T, D]; each figure is counted when it is first asked for.

    Of a module without a state; `Layers` are those with one.
    """

    def __init__(self, module: nn.Module, x: Tensor):
        self.module, self.x = on_meta(module).eval(), x

    @cached_property
    def forward(self) -> FlopCounter:
        """A whole row."""
        return _counted(self.module, self.x)[0]

    @cached_property
    def prefill(self) -> tuple[FlopCounter, State]:
        """A row into an empty state."""
        return self.forward, State({})

    @cached_property
    def decode(self) -> FlopCounter:
        """The token after a row."""
        return _counted(self.module, self.x[:, :1])[0]

    @cached_property
    def bf16_state_bytes(self) -> int:
        """Of the state after a row in bfloat16."""
        return 0

    @cached_property
    def bookkeeping_bytes(self) -> int:
        """Of the ids and positions in the state after a packed row, without those that the door keeps for all parts."""
        return 0


class Encoded(Kind):
    """What an encoder does, once for a source: it has no state, and no part in the tokens behind a prompt."""

    @cached_property
    def decode(self) -> FlopCounter:
        """See `Kind`."""
        return FlopCounter()


class Layers(Kind):
    """Equal layers of a stack.

    Args:
        memory: [1, S, D], what the layers attend to; they compute its keys and values in prefill, not in decode.
    """

    module: Block

    def __init__(self, module: Block, x: Tensor, memory: Tensor | None = None):
        super().__init__(module, x)
        self.memory = memory

    @cached_property
    def forward(self) -> FlopCounter:
        """See `Kind`."""
        return _counted(self.module, self.x, None, self._memory())[0]

    @cached_property
    def prefill(self) -> tuple[FlopCounter, State]:
        """See `Kind`."""
        counter, (_, state) = _counted(self._extend)
        return counter, state

    @cached_property
    def decode(self) -> FlopCounter:
        """See `Kind`."""
        # A state is consumed.
        return _counted(self.module.extend, self.x[:, :1], self.prefill[1].clone())[0]

    @cached_property
    def bf16_state_bytes(self) -> int:
        """See `Kind`."""
        memory = None if self.memory is None else self.memory.bfloat16()
        return Layers(copy.deepcopy(self.module).bfloat16(), self.x.bfloat16(), memory).prefill[1].bytes

    @cached_property
    def bookkeeping_bytes(self) -> int:
        """See `Kind`."""
        _, (_, state) = _counted(self._extend, True)
        return State(state.own).bookkeeping_bytes

    def _extend(self, packed: bool = False) -> tuple[Tensor, State]:
        """A row into an empty state that holds the memory."""
        start = self.module.start(1, self.x, self._memory(packed))
        return self.module.extend(self.x, start, _one_document(self.x) if packed else None)

    def _memory(self, packed: bool = False) -> Memory | None:
        return None if self.memory is None else Memory(self.memory, _one_document(self.memory) if packed else None)


def _one_document(x: Tensor) -> Packing:
    return Packing(torch.ones(x.shape[:2], dtype=torch.int32, device="meta"), check=False)


def _counted(call: Callable, *arguments: Any) -> tuple[FlopCounter, Any]:
    """The work of a call, and its result."""
    with torch.no_grad(), FlopCounter() as counter:
        result = call(*arguments)
    return counter, result


@dataclass(frozen=True)
class Part:
    """What one part of a model adds to its cost; what needs a state is None in a bidirectional model.

    Attributes:
        name: "embedding", a layer as its layout spells it ("window|linear@a"), or "head" (with the norm before it); of
            an encoder the same with "encoder " in front, and "norm" for "head".
        parameters: those that no part before it has: 0 where a layer shares its weights with an earlier one.
    """

    name: str
    parameters: int
    kind: Kind
    causal: bool

    @property
    def length(self) -> int:
        """Tokens of a row, T."""
        return self.kind.x.shape[1]

    @property
    def flops_per_token_forward(self) -> float:
        """Mean over the tokens of a row."""
        return self.kind.forward.total / self.length

    @property
    def flops_per_token_train(self) -> float:
        """Forward and backward."""
        return 3 * self.flops_per_token_forward

    @property
    def prefill_flops(self) -> int | None:
        """Of all T tokens of a prompt together."""
        return self.kind.prefill[0].total if self.causal else None

    @property
    def decode_flops_per_token(self) -> int | None:
        """Of the token after T others."""
        return self.kind.decode.total if self.causal else None

    @property
    def decode_attention_bytes(self) -> int | None:
        """What attention of the token after T others reads and writes at least: of its cache, what it sees."""
        return self.kind.decode.attention_bytes if self.causal else None

    @property
    def state_bytes(self) -> int | None:
        """Of one sequence after T tokens, in the dtype of the model."""
        return self.kind.prefill[1].bytes if self.causal else None

    @property
    def bf16_state_bytes(self) -> int | None:
        """Of the same in bfloat16; recurrent states stay at least float32."""
        return self.kind.bf16_state_bytes if self.causal else None

    @property
    def attention_bytes(self) -> int:
        """What attention moves to and from device memory at least, in the forward pass of a row."""
        return self.kind.forward.attention_bytes

    @property
    def score_bytes(self) -> int:
        """The score matrices that this pass would write without a fused kernel."""
        return self.kind.forward.score_bytes

    @property
    def dense_counted(self) -> bool:
        """Was some attention outside of our ops counted with all its masked pairs?"""
        return self.kind.forward.dense

    @property
    def calls(self) -> Counter[tuple[str, Formula]]:
        """How often each (op, formula) is met in the forward pass of a row."""
        return self.kind.forward.calls


def parts(model: LanguageModel, length: int) -> Iterator[Part]:
    """An encoder's parts, the embedding, every layer in order, the head, at rows of `length` tokens, sources too.

    Equal layers share their counts.
    """
    weight = model.embedding.weight
    x = torch.empty(1, length, weight.shape[1], dtype=weight.dtype, device="meta")
    seen: set[int] = set()
    if isinstance(model, EncoderDecoder):
        yield from _encoder(model, x, seen)
    yield Part("embedding", _new(seen, model.embedding, model.stack.position), Kind(nn.Identity(), x), model.causal)
    kinds: dict[Layer, Kind] = {}
    for layer, block in zip(model.stack.layers, model.stack.blocks, strict=True):
        if layer not in kinds:
            kinds[layer] = Layers(block, x, x if block.takes_memory else None)
        yield Part(str(layer), _new(seen, block), kinds[layer], model.causal)
    yield Part("head", _new(seen, model.stack.norm, model.head), Kind(model.head, x), model.causal)


def _encoder(model: EncoderDecoder, x: Tensor, seen: set[int]) -> Iterator[Part]:
    stack, nothing = model.encoder, Encoded(nn.Identity(), x)
    yield Part("encoder embedding", _new(seen, model.source_embedding, stack.position), nothing, model.causal)
    kinds: dict[Layer, Kind] = {}
    for layer, block in zip(stack.layers, stack.blocks, strict=True):
        if layer not in kinds:
            kinds[layer] = Encoded(block, x)
        yield Part(f"encoder {layer}", _new(seen, block), kinds[layer], model.causal)
    yield Part("encoder norm", _new(seen, stack.norm), nothing, model.causal)


def _new(seen: set[int], *modules: nn.Module) -> int:
    """Number of parameters that are not in `seen` yet; they are added to it."""
    fresh = {id(p): p.numel() for module in modules for p in module.parameters() if id(p) not in seen}
    seen.update(fresh)
    return sum(fresh.values())


def on_meta(model: M) -> M:
    """The same module without values: no memory is copied."""
    tensors = [*model.parameters(), *model.buffers()]
    memo = {
        id(t): (nn.Parameter(t.to("meta"), t.requires_grad) if isinstance(t, nn.Parameter) else t.to("meta"))
        for t in tensors
    }
    return copy.deepcopy(model, memo)
