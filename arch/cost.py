"""What a model costs: parameters, FLOPs and state bytes, counted on the meta device and never declared.

Convention: 2 FLOPs a multiply-add; attention by its visible pairs, linear attention by its recurrence, everything else
by its matrix products; elementwise work is not counted; one unpacked sequence, logits of every token; backward = 2 x
forward, no recomputation. State bytes are those of a real state after that many tokens; ids and positions are reported
apart.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import nn

from arch.language_model import LanguageModel
from kernels.flops import FlopCounter
from mixers.base import State


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


def on_meta(model: LanguageModel) -> LanguageModel:
    """The same model without values: no memory is copied."""
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
