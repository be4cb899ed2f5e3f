"""The short causal convolution that a block may put in front of its mixers; itself a Mixer, so it has a state."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kernels.conv.op import causal_conv
from mixers import cache
from mixers.base import Memory, Mixer, State
from mixers.parts import mark


class ShortConvolution(Mixer):
    """Depthwise, linear, W taps; the state is the last W - 1 real inputs.

    Args:
        width: W, at least 1.
    """

    has_convolution = True

    def __init__(self, d_model: int, *, width: int = 4):
        super().__init__()
        if width < 1:
            raise ValueError(f"convolution={width} must be at least 1")
        self.weight = nn.Parameter(torch.empty(width, d_model))
        nn.init.uniform_(self.weight, -(width**-0.5), width**-0.5)
        mark(self, own_init=True, no_decay=True)

    def empty(self, batch: int, like: Tensor) -> dict[str, Tensor]:
        """The tail before any token: zeros [B, W - 1, D]."""
        return {"tail": like.new_zeros(batch, len(self.weight) - 1, like.shape[-1])}

    def mix(
        self, x: Tensor, past: State | None, documents: Tensor | None, memory: Memory | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See `Mixer.mix`."""
        return convolve(x, self.weight, None, past, documents)


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, past: State | None, documents: Tensor | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """`causal_conv` of a piece behind the inputs that `past` holds as "tail": x [B, T, D], weight [W, D], bias [D].

    Returns:
        [B, T, D], and the tail after the piece ({} when past is None).
    """
    if past is None:
        return causal_conv(x, weight, bias, documents=documents), {}
    ids = None if documents is None else cache.tail_documents(past, documents)
    # Only the part that was fed: the zeros before it are no taps and cost nothing.
    unfed = max(len(weight) - 1 - past.length, 0)
    y = causal_conv(
        x,
        weight,
        bias,
        tail=past["tail"][:, unfed:],
        documents=documents,
        tail_documents=None if ids is None else ids[:, unfed:],
    )
    return y, cache.tail(past["tail"], x, documents, ids)
