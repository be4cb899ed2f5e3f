"""Causal depthwise convolution in plain PyTorch: a multiply-add over the whole row for each tap.

Channels lie beside each other, so that shifting time copies nothing; torch's own convolution wants them apart and
transposes twice, and its weight gradient is slower still.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tail: Tensor | None,
    documents: Tensor | None,
    tail_documents: Tensor | None,
) -> Tensor:
    """As `reference.causal_conv`; sums in fp32 or wider."""
    wide = torch.promote_types(x.dtype, torch.float32)
    inputs, ids = x, documents
    if tail is not None:
        inputs = torch.cat([tail, x], 1)
        if documents is not None and tail_documents is not None:
            ids = torch.cat([tail_documents.to(documents.dtype), documents], 1)
    inputs, weight, bias = inputs.to(wide), weight.to(wide), None if bias is None else bias.to(wide)
    run = _one if x.shape[1] == 1 else _Convolution.apply
    return run(inputs, weight, bias, inputs.shape[1] - x.shape[1], ids).to(x.dtype)


def _one(inputs: Tensor, weight: Tensor, bias: Tensor | None, before: int, ids: Tensor | None) -> Tensor:
    """A single output, as in decode: a sum over its taps."""
    inputs = _own(inputs, ids, slice(None), slice(None), before)
    y = (inputs * weight[-before - 1 :]).sum(1, keepdim=True)
    return y if bias is None else y + bias


class _Convolution(torch.autograd.Function):
    """Of inputs [B, P + T, D], P of them before the first output, with weight [W, D]; ids [B, P + T] or None."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, before: int, ids: Tensor | None
    ) -> Tensor:
        """[B, T, D]"""
        ctx.save_for_backward(inputs, weight, ids)
        ctx.before = before
        x = inputs[:, before:]
        y = x * weight[-1] if bias is None else torch.addcmul(bias, x, weight[-1])
        for tap, outs, ins in _taps(weight, inputs, before):
            y[:, outs].addcmul_(_own(inputs[:, ins], ids, outs, ins, before), weight[tap])
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of inputs, weight and bias."""
        inputs, weight, ids = ctx.saved_tensors
        before, dy = ctx.before, dy.contiguous()
        dinputs = dy * weight[-1]
        if before:
            dinputs = pad(dinputs, (0, 0, before, 0))
        # One buffer for all products: fresh memory for each costs more than the product.
        products = dy * inputs[:, before:]
        sums = [products.sum((0, 1))]
        for tap, outs, ins in _taps(weight, inputs, before):
            dinputs[:, ins].addcmul_(_own(dy[:, outs], ids, outs, ins, before), weight[tap])
            past = _own(inputs[:, ins], ids, outs, ins, before)
            room = products.view(-1)[: past.numel()].view(past.shape)
            sums.append(torch.mul(dy[:, outs], past, out=room).sum((0, 1)))
        unused = [torch.zeros_like(weight[0])] * (len(weight) - len(sums))
        dweight = torch.stack([*unused, *reversed(sums)])
        return dinputs, dweight, dy.sum((0, 1)) if ctx.needs_input_grad[2] else None, None, None


def _taps(weight: Tensor, inputs: Tensor, before: int) -> Iterator[tuple[int, slice, slice]]:
    """The taps of the past that reach an input, latest first: (tap, outputs, their inputs)."""
    taps, time = weight.shape[0], inputs.shape[1] - before
    for back in range(1, taps):
        first = max(back - before, 0)
        if first < time:
            start = before - back
            yield taps - 1 - back, slice(first, time), slice(start + first, start + time)


def _own(values: Tensor, ids: Tensor | None, outs: slice, ins: slice, before: int) -> Tensor:
    """0 where an output's tap is of another document; a product with 0 would let its NaN through."""
    if ids is None:
        return values
    return torch.where((ids[:, before:][:, outs] == ids[:, ins])[..., None], values, 0)
