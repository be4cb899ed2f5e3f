"""Causal depthwise convolution in plain PyTorch."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import conv1d

from kernels.conv import reference


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    inputs: Tensor,
    documents: Tensor | None,
    all_documents: Tensor | None,
) -> Tensor:
    """As `reference.causal_conv`; torch's own convolution where no document ends inside of the row."""
    if documents is not None or 0 in x.shape:
        return reference.causal_conv(x, weight, bias, inputs, documents, all_documents)
    return conv1d(inputs.transpose(1, 2), weight.t()[:, None], bias, groups=x.shape[2]).transpose(1, 2)
