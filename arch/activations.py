"""Activation memory: the bytes that autograd keeps between the forward and the backward of a training step.

Nothing is declared and nothing is allocated: the forward runs on fake tensors, which take the same code paths as live
ones, and every storage that autograd saves is counted once. So it is what the portable implementations keep; a fused
kernel on a GPU may keep less.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import cross_entropy

from arch.encoder_decoder import EncoderDecoder
from arch.language_model import LanguageModel
from arch.layout import Layer
from arch.stack import Stack
from kernels import backend
from mixers.base import Memory

M = TypeVar("M", bound=nn.Module)


def saved_bytes(model: LanguageModel, length: int) -> tuple[int | None, ...]:
    """Bytes a part, for one sequence of `length` in the dtype of the model, in the order of `arch.parts.parts`.

    The head has the last norm and the cross-entropy of every token with it. Parameters are not counted; what a part
    reads counts as its own. Equal layers are run once. None for a layer that cannot run without values.
    """
    # The caller may build on meta by default, where attention takes another path than on the CPU.
    with torch.device("cpu"), FakeTensorMode(), backend.using("portable"):
        ghost = _fake(model)
        tokens = torch.empty(1, length, dtype=torch.int64)
        x = ghost.embedding(tokens).detach().requires_grad_()

        def head() -> Tensor:
            return cross_entropy(ghost.logits(ghost.stack.norm(x)).flatten(0, 1), tokens.flatten())

        decoder = (*_read(ghost, ghost.stack, ghost.embedding, tokens, x), kept(ghost, head))
        if not isinstance(ghost, EncoderDecoder):
            return decoder
        encoder = _read(ghost, ghost.encoder, ghost.source_embedding, tokens, x)
        # What the norm gives is the memory, kept once for all the layers that attend to it.
        return (*encoder, kept(ghost, partial(ghost.encoder.norm, x)) + x.untyped_storage().nbytes(), *decoder)


def _read(model: LanguageModel, stack: Stack, table: nn.Embedding, tokens: Tensor, x: Tensor) -> Iterator[int | None]:
    """What autograd keeps of an embedding and of every layer behind it; equal layers are run once."""
    yield kept(model, lambda: stack.position(model.dropout(table(tokens)), None, None))
    memory = torch.empty_like(x).requires_grad_()
    counted: dict[Layer, int | None] = {}
    for layer, block in zip(stack.layers, stack.blocks, strict=True):
        if layer not in counted:
            attended = Memory(memory) if block.takes_memory else None
            counted[layer] = _layer(model, partial(block, x, None, attended), memory)
        yield counted[layer]


def _layer(model: LanguageModel, forward: Callable[[], object], memory: Tensor) -> int | None:
    """What autograd keeps of a layer. Whatever a mixer does that needs values ends in an error of another kind."""
    try:
        return kept(model, forward, memory)
    except Exception:
        return None


def kept(module: nn.Module, forward: Callable[[], object], *others: Tensor) -> int:
    """Bytes of the distinct storages that autograd saves in `forward`; not the module's own tensors, nor `others`."""
    own = {_storage(t) for t in [*module.parameters(), *module.buffers(), *others]}
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if _storage(tensor) not in own:
            saved[_storage(tensor)] = tensor
        return tensor

    with torch.enable_grad(), saved_tensors_hooks(keep, lambda tensor: tensor):
        forward()
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def _storage(tensor: Tensor) -> int:
    """What two views of one memory have in common, on any device."""
    return tensor.untyped_storage()._cdata


def _fake(model: M) -> M:
    """A copy on the CPU without values, in training mode."""
    memo: dict[int, Tensor] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        empty = torch.empty(tensor.shape, dtype=tensor.dtype)
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(model, memo).train()
