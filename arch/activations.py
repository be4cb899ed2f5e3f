"""Activation memory: the bytes that autograd keeps between the forward and the backward of a training step.

Nothing is declared and nothing is allocated: the forward runs on fake tensors, which take the same code paths as live
ones, and every storage that autograd saves is counted once. So it is what the portable implementations keep; a fused
kernel on a GPU may keep less.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import cross_entropy

from arch.language_model import LanguageModel
from arch.layout import Layer
from kernels import backend

M = TypeVar("M", bound=nn.Module)


def saved_bytes(model: LanguageModel, length: int) -> tuple[int, ...]:
    """Bytes a part, for one sequence of `length` in the dtype of the model: the embedding, every layer, the head.

    The head has the last norm and the cross-entropy of every token with it. Parameters are not counted; what a part
    reads counts as its own. Equal layers are run once.
    """
    # The caller may build on meta by default, where attention takes another path than on the CPU.
    with torch.device("cpu"), FakeTensorMode(), backend.using("portable"):
        ghost = _fake(model)
        tokens = torch.empty(1, length, dtype=torch.int64)
        x = ghost.embedding(tokens).detach().requires_grad_()

        def embedding() -> Tensor:
            return ghost.stack.position(ghost.dropout(ghost.embedding(tokens)), None, None)

        def head() -> Tensor:
            return cross_entropy(ghost.logits(ghost.stack.norm(x)).flatten(0, 1), tokens.flatten())

        counted: dict[Layer, int] = {}
        for layer, block in zip(ghost.stack.layers, ghost.stack.blocks, strict=True):
            if layer not in counted:
                counted[layer] = kept(ghost, partial(block, x))
        return (kept(ghost, embedding), *(counted[layer] for layer in ghost.stack.layers), kept(ghost, head))


def kept(module: nn.Module, forward: Callable[[], object]) -> int:
    """Bytes of the distinct storages that autograd saves in `forward`, those of the module's own tensors aside."""
    own = {_storage(t) for t in [*module.parameters(), *module.buffers()]}
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
