"""What a model costs: parameters, FLOPs and state bytes, counted on the meta device and never declared.

Convention: 2 FLOPs a multiply-add; attention by its visible pairs, linear attention by its recurrence, everything else
by its matrix products; elementwise work is not counted; one unpacked sequence, logits of every token; backward = 2 x
forward, no recomputation. State bytes are those of a real state after that many tokens; ids and positions are reported
apart.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from arch.block import Block
from arch.language_model import LanguageModel
from arch.layout import Layer
from kernels.flops import FlopCounter
from mixers.base import State

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class Cost:
    """Counts of one model at one length.

    Attributes:
        parameters: shared ones once; parameters_without_embeddings: without token and position embeddings and the head.
        flops_per_token_forward, flops_per_token_train: mean over the tokens of a sequence of `length`.
        state_bytes, bookkeeping_bytes: of one sequence after `length` tokens; None for a bidirectional model.
        decode_flops_per_token: of the token after `length` others; None for a bidirectional model.
        decode: "state", or "recompute" where some mixer extends by running everything again: no real decode figure.
        dense_counted: some attention outside of our ops was counted with all its masked pairs.
    """

    length: int
    parameters: int
    parameters_without_embeddings: int
    flops_per_token_forward: float
    state_bytes: int | None
    bookkeeping_bytes: int | None
    decode_flops_per_token: int | None
    decode: str
    dense_counted: bool

    @property
    def flops_per_token_train(self) -> float:
        """Forward and backward."""
        return 3 * self.flops_per_token_forward

    def metrics(self) -> dict[str, float]:
        """By the names that runs log; what does not exist is left out."""
        named = {
            "parameters": self.parameters,
            "parameters_without_embeddings": self.parameters_without_embeddings,
            "flops_per_token_forward": self.flops_per_token_forward,
            "flops_per_token_train": self.flops_per_token_train,
            f"state_bytes_at_{self.length}": self.state_bytes,
            f"decode_flops_per_token_at_{self.length}": None
            if self.decode == "recompute"
            else self.decode_flops_per_token,
        }
        return {f"complexity/{name}": value for name, value in named.items() if value is not None}


def measure(model: LanguageModel, length: int) -> Cost:
    """Count a model, live or on meta, at sequences of `length` tokens; its weights are not touched.

    Raises:
        ValueError: length below 1, or a custom operator without a FLOP formula.
    """
    if length < 1:
        raise ValueError(f"length={length} must be at least 1")
    model = on_meta(model).eval()
    tokens = torch.empty(1, length, dtype=torch.int64, device="meta")
    with torch.no_grad(), FlopCounter() as forward:
        model(tokens)
    state, decode = _after(model, length) if model.causal else (None, None)
    return Cost(
        length=length,
        parameters=parameters(model),
        parameters_without_embeddings=parameters(model) - _embeddings(model),
        flops_per_token_forward=forward.total / length,
        state_bytes=None if state is None else state.bytes,
        bookkeeping_bytes=None if state is None else state.bookkeeping_bytes,
        decode_flops_per_token=decode,
        decode=model.stack.decode,
        dense_counted=forward.dense,
    )


@dataclass(frozen=True)
class Part:
    """What one part of a model adds to its cost, counted as in `Cost`.

    Attributes:
        name: "embedding", a layer as its layout spells it ("window|linear@a"), or "head" (with the norm before it).
        parameters: those that no part before it has: 0 where a layer shares its weights with an earlier one.
        flops_per_token_forward: mean over the tokens of a sequence.
        state_bytes: of one sequence; None where the model is bidirectional.
        dense_counted: as in `Cost`.
    """

    name: str
    parameters: int
    flops_per_token_forward: float
    state_bytes: int | None
    dense_counted: bool = False


def parts(model: LanguageModel, length: int) -> tuple[Part, ...]:
    """The embedding, every layer in order, the head: each column adds up to what `measure` says of the whole.

    Equal layers are counted once, so the time does not grow with the depth.

    Raises:
        ValueError: as `measure`.
    """
    if length < 1:
        raise ValueError(f"length={length} must be at least 1")
    x = torch.empty(1, length, model.embedding.embedding_dim, dtype=model.embedding.weight.dtype, device="meta")
    seen: set[int] = set()
    stateless = 0 if model.causal else None
    found = [Part("embedding", _new(seen, model.embedding, model.stack.position), 0.0, stateless)]
    counted: dict[Layer, Part] = {}
    for layer, block in zip(model.stack.layers, model.stack.blocks, strict=True):
        if layer not in counted:
            counted[layer] = _layer(str(layer), block, x, model.causal)
        found.append(replace(counted[layer], parameters=_new(seen, block)))
    head = on_meta(model.head)
    with torch.no_grad(), FlopCounter() as counter:
        head(x)
    found.append(Part("head", _new(seen, model.stack.norm, model.head), counter.total / length, stateless))
    return tuple(found)


def _layer(name: str, block: Block, x: Tensor, causal: bool) -> Part:
    """One layer on [1, T, D], without its parameters."""
    block = on_meta(block).eval()
    with torch.no_grad(), FlopCounter() as counter:
        block(x)
    state = None
    if causal:
        with torch.no_grad(), FlopCounter():
            state = block.extend(x, block.start(1, x))[1].bytes
    return Part(name, 0, counter.total / x.shape[1], state, counter.dense)


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


def _after(model: LanguageModel, length: int) -> tuple[State, int]:
    """The state after a prompt of that length, and the FLOPs of one more token."""
    tokens = torch.empty(1, length, dtype=torch.int64, device="meta")
    with torch.no_grad(), FlopCounter():
        _, state = model.prefill(tokens)
    with torch.no_grad(), FlopCounter() as step:
        model.extend(tokens[:, :1], state.clone())
    return state, step.total
