"""What a model costs, counted on the meta device and never declared; `CONVENTION` says how."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor, nn

from arch.activations import saved_bytes
from arch.block import Block
from arch.language_model import LanguageModel
from arch.layout import Layer
from kernels.flops import FlopCounter, Formula
from mixers.base import State
from mixers.options import nearest

CONVENTION = """\
FLOPs: 2 a multiply-add; attention by its visible pairs, linear attention by its recurrence, a convolution by its taps
inside of the row, all else by its matrix products; elementwise work is not counted. One unpacked sequence, logits of
every token. Training: 3 times forward (backward is 2, nothing is computed again). State: the tensors that generation
carries along for one sequence, in the dtype of the model or in bfloat16, where recurrent states stay at least float32;
ids and positions apart. Activations: what autograd keeps of one sequence until the backward, parameters aside, with the
portable implementations. Attention traffic: q, k and v read once, the output written once."""

M = TypeVar("M", bound=nn.Module)

# By the names that runs log behind "complexity/" -> the attribute of `Cost`.
FIGURES = {
    "parameters": "parameters",
    "parameters_active": "parameters_active",
    "parameters_without_embeddings": "parameters_without_embeddings",
    "flops_per_token_forward": "flops_per_token_forward",
    "flops_per_token_train": "flops_per_token_train",
    "prefill_flops_at_<length>": "prefill_flops",
    "decode_flops_per_token_at_<length>": "decode_flops_per_token",
    "state_bytes_at_<length>": "state_bytes",
    "bf16_state_bytes_at_<length>": "bf16_state_bytes",
    "activation_bytes_at_<length>": "activation_bytes",
    "attention_bytes_at_<length>": "attention_bytes",
    "score_bytes_at_<length>": "score_bytes",
}


class Cost:
    """The figures of one model, live or on meta, at one length; each is counted when it is first asked for.

    `measure` makes it. What needs a state is None for a bidirectional model.
    """

    def __init__(self, model: LanguageModel, length: int):
        self.length = length
        self._model = on_meta(model).eval()

    @property
    def parameters(self) -> int:
        """Shared ones once."""
        return parameters(self._model)

    @property
    def parameters_active(self) -> int:
        """Those that the forward of one token reads: all but the rows of embedding tables that it does not look up.

        A tied table is read whole by the head. This is how gpt-oss counts (arXiv:2508.10925, table 1).
        """
        tables = [m for m in self._model.modules() if isinstance(m, nn.Embedding)]
        return self.parameters - sum(_unread(table) for table in tables if table.weight is not self._model.head.weight)

    @property
    def parameters_without_embeddings(self) -> int:
        """Without token and position embeddings and the head."""
        return self.parameters - _embeddings(self._model)

    @property
    def flops_per_token_forward(self) -> float:
        """Mean over the tokens of a sequence of `length`."""
        return self._forward.total / self.length

    @property
    def flops_per_token_train(self) -> float:
        """Forward and backward."""
        return 3 * self.flops_per_token_forward

    @property
    def prefill_flops(self) -> int | None:
        """Of all `length` tokens of a prompt together, into an empty state."""
        return self._after[0].total if self._model.causal else None

    @cached_property
    def decode_flops_per_token(self) -> int | None:
        """Of the token after `length` others; with `decode` "recompute" it is no real decode figure."""
        if not self._model.causal:
            return None
        # Counted before the step's counter is on.
        state = self._after[1].clone()
        with torch.no_grad(), FlopCounter() as step:
            self._model.extend(_tokens(1), state)
        return step.total

    @property
    def state_bytes(self) -> int | None:
        """Of one sequence after `length` tokens, in the dtype of the model."""
        return self._after[1].bytes if self._model.causal else None

    @cached_property
    def bf16_state_bytes(self) -> int | None:
        """Of the same in bfloat16; recurrent states stay at least float32."""
        return _prefill(on_meta(self._model).bfloat16(), self.length)[1].bytes if self._model.causal else None

    @property
    def bookkeeping_bytes(self) -> int | None:
        """Ids and positions beside the state."""
        return self._after[1].bookkeeping_bytes if self._model.causal else None

    @cached_property
    def activation_bytes(self) -> int:
        """What autograd keeps of a training step on one sequence, see `arch.activations`."""
        return sum(saved_bytes(self._model, self.length))

    @property
    def attention_bytes(self) -> int:
        """What attention moves to and from device memory at least, in a forward pass of one sequence."""
        return self._forward.attention_bytes

    @property
    def score_bytes(self) -> int:
        """The score matrices that this pass would write without a fused kernel."""
        return self._forward.score_bytes

    @property
    def decode(self) -> str:
        """ "state", or "recompute" where some mixer extends by running everything again."""
        return self._model.stack.decode

    @property
    def dense_counted(self) -> bool:
        """Was some attention outside of our ops counted with all its masked pairs?"""
        return self._forward.dense

    def figure(self, name: str) -> float | None:
        """A figure by its name in `FIGURES`; None where the model has none.

        Raises:
            ValueError: no such name; says the nearest.
        """
        pattern = re.sub(r"_at_\d+$", "_at_<length>", name)
        if pattern not in FIGURES:
            raise ValueError(f"figure {name!r} is unknown{nearest(pattern, FIGURES)}; known are {', '.join(FIGURES)}")
        if pattern.startswith("decode_flops") and self.decode == "recompute":
            return None
        value: float | None = getattr(self, FIGURES[pattern])
        return value

    def metrics(self) -> dict[str, float]:
        """All but the activations, which take longer, by the names that runs log; what does not exist is left out."""
        names = [name.replace("<length>", str(self.length)) for name in FIGURES if not name.startswith("activation")]
        found = {f"complexity/{name}": self.figure(name) for name in names}
        return {name: value for name, value in found.items() if value is not None}

    @cached_property
    def _forward(self) -> FlopCounter:
        with torch.no_grad(), FlopCounter() as counter:
            self._model(_tokens(self.length))
        return counter

    @cached_property
    def _after(self) -> tuple[FlopCounter, State]:
        return _prefill(self._model, self.length)


def measure(model: LanguageModel, length: int) -> Cost:
    """Count a model, live or on meta, at sequences of `length` tokens; its weights are not touched.

    Raises:
        ValueError: length below 1. The figures raise one for a custom operator without a FLOP formula.
    """
    if length < 1:
        raise ValueError(f"length={length} must be at least 1")
    return Cost(model, length)


@dataclass(frozen=True)
class Part:
    """What one part of a model adds to its cost, counted as in `Cost`.

    Attributes:
        name: "embedding", a layer as its layout spells it ("window|linear@a"), or "head" (with the norm before it).
        parameters: those that no part before it has: 0 where a layer shares its weights with an earlier one.
        calls: how often each (op, formula) was met in the forward pass of a sequence.
    """

    name: str
    parameters: int
    flops_per_token_forward: float = 0.0
    prefill_flops: int | None = None
    decode_flops_per_token: int | None = None
    state_bytes: int | None = None
    bf16_state_bytes: int | None = None
    activation_bytes: int | None = None
    attention_bytes: int = 0
    score_bytes: int = 0
    dense_counted: bool = False
    calls: tuple[tuple[tuple[str, Formula], int], ...] = ()

    @property
    def flops_per_token_train(self) -> float:
        """Forward and backward."""
        return 3 * self.flops_per_token_forward


def parts(model: LanguageModel, length: int, *, activations: bool = False) -> tuple[Part, ...]:
    """The embedding, every layer in order, the head: each column adds up to what `measure` says of the whole.

    Equal layers are counted once, so the time does not grow with the depth.

    Args:
        activations: count those too; else they are None.
    Raises:
        ValueError: as `measure`.
    """
    if length < 1:
        raise ValueError(f"length={length} must be at least 1")
    x = torch.empty(1, length, model.embedding.embedding_dim, dtype=model.embedding.weight.dtype, device="meta")
    seen: set[int] = set()
    nothing = 0 if model.causal else None
    rows = _new(seen, model.embedding, model.stack.position)
    found = [Part("embedding", rows, 0.0, nothing, nothing, nothing, nothing)]
    counted: dict[Layer, Part] = {}
    for layer, block in zip(model.stack.layers, model.stack.blocks, strict=True):
        if layer not in counted:
            counted[layer] = _layer(str(layer), block, x, model.causal)
        found.append(replace(counted[layer], parameters=_new(seen, block)))
    found.append(replace(_head(model, x), parameters=_new(seen, model.stack.norm, model.head)))
    if not activations:
        return tuple(found)
    kept = saved_bytes(model, length)
    return tuple(replace(part, activation_bytes=n) for part, n in zip(found, kept, strict=True))


def _layer(name: str, block: Block, x: Tensor, causal: bool) -> Part:
    """One layer on [1, T, D], without its parameters."""
    block = on_meta(block).eval()
    with torch.no_grad(), FlopCounter() as counter:
        block(x)
    part = _part(name, counter, x.shape[1])
    if not causal:
        return part
    with torch.no_grad(), FlopCounter() as prompt:
        state = block.extend(x, block.start(1, x))[1]
    with torch.no_grad(), FlopCounter():
        narrow = on_meta(block).bfloat16().extend(x.bfloat16(), block.start(1, x.bfloat16()))[1]
    part = replace(part, prefill_flops=prompt.total, state_bytes=state.bytes, bf16_state_bytes=narrow.bytes)
    with torch.no_grad(), FlopCounter() as step:
        # `state` is consumed.
        block.extend(x[:, :1], state)
    return replace(part, decode_flops_per_token=step.total)


def _head(model: LanguageModel, x: Tensor) -> Part:
    """The head on [1, T, D], without its parameters."""
    head = on_meta(model.head)
    with torch.no_grad(), FlopCounter() as counter:
        head(x)
    part = _part("head", counter, x.shape[1])
    if not model.causal:
        return part
    with torch.no_grad(), FlopCounter() as step:
        head(x[:, :1])
    return replace(
        part, prefill_flops=counter.total, decode_flops_per_token=step.total, state_bytes=0, bf16_state_bytes=0
    )


def _part(name: str, counter: FlopCounter, length: int) -> Part:
    return Part(
        name,
        parameters=0,
        flops_per_token_forward=counter.total / length,
        attention_bytes=counter.attention_bytes,
        score_bytes=counter.score_bytes,
        dense_counted=counter.dense,
        calls=tuple(counter.calls.items()),
    )


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


def parameters(model: nn.Module) -> int:
    """Number of parameters, shared ones once."""
    return sum(p.numel() for p in model.parameters())


def _embeddings(model: LanguageModel) -> int:
    """Token and position embeddings and the head, shared ones once."""
    tables = {id(p): p.numel() for p in (model.embedding.weight, model.head.weight)}
    position = model.stack.position.table
    return sum(tables.values()) + (0 if position is None else position.weight.numel())


def _unread(table: nn.Embedding) -> int:
    """The entries that one token does not look up."""
    return (table.num_embeddings - 1) * table.embedding_dim


def _tokens(length: int) -> Tensor:
    return torch.empty(1, length, dtype=torch.int64, device="meta")


def _prefill(model: LanguageModel, length: int) -> tuple[FlopCounter, State]:
    """The work of a prompt of that length, and the state after it."""
    with torch.no_grad(), FlopCounter() as counter:
        _, state = model.prefill(_tokens(length))
    return counter, state
