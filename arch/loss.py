"""Cross-entropy behind a head, without the logits of all tokens at once.

N tokens over a vocabulary of V have N * V logits, and plain autograd keeps them, their softmax and its gradient: for
8,192 tokens and V = 8,192 that is 768 MB. Here tokens come in chunks of `LOGITS` logits. The loss is a sum, so the
gradient of a chunk is known up to one factor as soon as its logits are: both gradients are made in the forward pass,
while the logits are at hand, and nothing is computed twice.

Source of the idea: Hsu et al. 2024, arXiv:2410.10989 (the fused linear cross-entropy of Liger Kernel).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

# Logits of a chunk, 8 MB in float32; but of no fewer tokens than these, where the weights are read for too little.
LOGITS, TOKENS = 2**21, 256


def chunks(tokens: int, vocabulary: int) -> Iterator[slice]:
    """Slices that cover range(tokens) in order, each of at most LOGITS logits or TOKENS tokens, whichever is more."""
    rows = max(TOKENS, LOGITS // vocabulary)
    return (slice(start, start + rows) for start in range(0, tokens, rows))


def cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None = None) -> Tensor:
    """The summed cross-entropy, in nats, of logits = hidden weight^T, squashed to softcap * tanh(logits / softcap).

    What `F.cross_entropy(logits, targets, reduction="sum")` is, differentiable once. The products run in the dtype of
    autocast where that is on; softmax and sums in float32 at least.
    Args:
        hidden: [N, D]; weight: [V, D], a tied embedding too; targets: [N] int64 in [0, V).
    Returns:
        A scalar, float32 or float64; 0 for N = 0.
    Raises:
        ValueError: the shapes do not fit each other, or softcap is not above 0.
    """
    if hidden.dim() != 2 or hidden.shape[1:] != weight.shape[1:] or targets.shape != hidden.shape[:1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and targets {tuple(targets.shape)} must be "
            "[N, D], [V, D] and [N]"
        )
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap={softcap} must be above 0")
    wanted = tuple(torch.is_grad_enabled() and tensor.requires_grad for tensor in (hidden, weight))
    return _CrossEntropy.apply(hidden, weight, targets, softcap, wanted)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None, wanted: tuple[bool, bool]
    ) -> Tensor:
        exact = torch.promote_types(hidden.dtype, torch.float32)
        loss = hidden.new_zeros((), dtype=exact)
        d_hidden = torch.empty_like(hidden) if wanted[0] else None
        d_weight = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, exact)) if wanted[1] else None
        for rows in chunks(len(targets), len(weight)):
            part, slope = _chunk(hidden[rows], weight, targets[rows], softcap, any(wanted))
            loss += part
            if slope is None:
                continue
            # As they are: autocast would narrow what `_chunk` left wide.
            with torch.autocast(hidden.device.type, enabled=False):
                if d_hidden is not None:
                    d_hidden[rows] = slope @ weight.to(slope.dtype)
                if d_weight is not None:
                    d_weight += slope.T @ hidden[rows].to(slope.dtype)
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.dtype = weight.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight = ctx.saved_tensors
        if d_hidden is not None:
            d_hidden = (d_hidden * factor).to(d_hidden.dtype)
        if d_weight is not None:
            d_weight = (d_weight * factor).to(ctx.dtype)
        return d_hidden, d_weight, None, None, None


def _chunk(
    hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None, wanted: bool
) -> tuple[Tensor, Tensor | None]:
    """The loss of some tokens, and its gradient [n, V] for their products with the weights, where it is wanted."""
    product = F.linear(hidden, weight)
    # float16 would lose the small gradients: the factor of a loss scaler comes only later.
    low = torch.float32 if product.dtype == torch.float16 else product.dtype
    logits = product.to(torch.promote_types(product.dtype, torch.float32))
    if softcap is not None:
        squashed = torch.tanh(logits / softcap)
        logits = softcap * squashed
    target = targets[:, None]
    total = logits.logsumexp(1, keepdim=True)
    loss = (total - logits.gather(1, target)).sum()
    if not wanted:
        return loss, None
    # The chunk's own memory: softmax less 1 at the target.
    slope = logits.sub_(total).exp_()
    slope.scatter_(1, target, slope.gather(1, target) - 1)
    if softcap is not None:
        slope *= 1 - squashed.square()
    return loss, slope.to(low)
