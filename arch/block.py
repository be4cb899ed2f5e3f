"""One layer of a stack: x + mixer(conv(norm(x))), then x + mlp(norm(x))."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn

from arch.mlp import Kind, mlp, norm
from mixers.base import Memory, Mixer, Packing, State
from mixers.convolution import ShortConvolution


@dataclass(frozen=True)
class BlockOptions:
    """What all blocks of a model have in common; meanings in `arch.language_model.LanguageModel`."""

    mlp: Kind = "swiglu"
    mlp_width: int | None = None
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    sandwich: bool = False
    bias: bool = False
    convolution: int | None = None
    parallel: Literal["sum", "mean", "normed_mean"] = "sum"
    dropout: float = 0.0
    norm_eps: float | None = None

    def make_norm(self, d_model: int) -> nn.Module:
        """A norm of this model's kind."""
        return norm(self.norm, d_model, self.bias, self.norm_eps)


class Sublayer(nn.Module):
    """What mixers and MLPs share: norm before, norm after where the model is a sandwich, dropout."""

    def __init__(self, d_model: int, options: BlockOptions):
        super().__init__()
        self.before = options.make_norm(d_model)
        self.after = options.make_norm(d_model) if options.sandwich else nn.Identity()
        self.dropout = nn.Dropout(options.dropout)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """The residual sum."""
        return x + self.dropout(self.after(y))


class MixerSublayer(Sublayer):
    """One mixer, or several in parallel on the same input, behind an optional short causal convolution."""

    def __init__(self, d_model: int, mixers: Sequence[Mixer], options: BlockOptions, cross: Collection[int] = ()):
        super().__init__(d_model, options)
        self.mixers = cast("Sequence[Mixer]", nn.ModuleList(mixers))
        self.cross = frozenset(cross)
        self.parallel = options.parallel
        width = None if all(m.has_convolution for m in mixers) else options.convolution
        self.convolution = None if width is None else ShortConvolution(d_model, width=width)
        normed = len(mixers) > 1 and options.parallel == "normed_mean"
        self.norms = nn.ModuleList(options.make_norm(d_model) for _ in mixers) if normed else None

    def parts(self) -> dict[str, Mixer]:
        """The parts with a state, by the name that it has in the block's state."""
        single = len(self.mixers) == 1
        named: dict[str, Mixer] = {"mixer" if single else f"mixer.{i}": m for i, m in enumerate(self.mixers)}
        return named if self.convolution is None else {"conv": self.convolution} | named

    def crossing(self) -> list[str]:
        """The names of the parts that attend to the memory, and not to x."""
        return [name for i, name in enumerate(n for n in self.parts() if n != "conv") if i in self.cross]

    def mix(
        self, x: Tensor, past: State | None, documents: Tensor | None, memory: Memory | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See `Mixer.mix`."""
        normed = self.before(x)
        kept: dict[str, Tensor] = {}
        inputs, outputs, crossing = normed, [], self.crossing()
        for name, part in self.parts().items():
            reads = inputs if part is not self.convolution and not part.has_convolution else normed
            before = None if past is None else past.part(name)
            if name in crossing and memory is None and not _remembers(before):
                raise ValueError("a cross-attending layer needs a memory: see arch.encoder_decoder.EncoderDecoder")
            y, state = part.mix(reads, before, documents, memory if name in crossing else None)
            kept |= {f"{name}.{key}": tensor for key, tensor in state.items()}
            if part is self.convolution:
                inputs = y
            else:
                outputs.append(y)
        return self.add(x, self._combine(outputs)), kept

    def alignments(self, x: Tensor, memory: Memory) -> dict[int, Tensor]:
        """Weights [B, T, H, S] of the branches that attend to the memory, by index; see `EncoderDecoder.alignments`."""
        found: dict[int, Tensor] = {}
        read = self.read(x)
        for i in sorted(self.cross):
            mixer = self.mixers[i]
            weights = getattr(mixer, "cross_weights", None)
            if weights is None:
                raise ValueError(f"{type(mixer).__name__} has no method cross_weights: its weights cannot be told")
            found[i] = weights(read[i], memory)
        return found

    def read(self, x: Tensor, packing: Packing | None = None) -> list[Tensor]:
        """What each of the mixers reads when the sublayer is given x [B, T, D], to look at them one by one."""
        normed = self.before(x)
        inputs = normed if self.convolution is None else self.convolution(normed, packing)
        return [normed if mixer.has_convolution else inputs for mixer in self.mixers]

    def _combine(self, outputs: list[Tensor]) -> Tensor:
        if self.norms is not None:
            outputs = [norm(y) for norm, y in zip(self.norms, outputs, strict=True)]
        total = torch.stack(outputs).sum(0) if len(outputs) > 1 else outputs[0]
        return total if self.parallel == "sum" else total / len(outputs)


class MLPSublayer(Sublayer):
    """The MLP."""

    def __init__(self, d_model: int, options: BlockOptions):
        super().__init__(d_model, options)
        self.mlp = mlp(options.mlp, d_model, options.mlp_width, options.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        return self.add(x, self.mlp(self.before(x)))


class Block(Mixer):
    """One layer; a Mixer itself, so it has the same door and one state made of its parts' states.

    Args:
        mixers: the parallel branches; none: the layer is an MLP alone.
        with_mlp: an MLP sublayer behind the mixers.
        cross: the branches, by index, that attend to the memory; the others do not see it.
    """

    has_convolution = True

    def __init__(
        self,
        d_model: int,
        mixers: Sequence[Mixer],
        options: BlockOptions,
        with_mlp: bool,
        cross: Collection[int] = (),
    ):
        super().__init__()
        self.mixing = MixerSublayer(d_model, mixers, options, cross) if mixers else None
        self.mlp = MLPSublayer(d_model, options) if with_mlp else None
        # A memory is there as a whole, whichever way a cross-attending mixer looks at its own input.
        self.causal = all(m.causal for i, m in enumerate(mixers) if i not in cross)
        self.takes_memory = bool(cross)

    def parts(self) -> dict[str, Mixer]:
        """The parts with a state."""
        return {} if self.mixing is None else self.mixing.parts()

    def empty(self, batch: int, like: Tensor) -> dict[str, Tensor]:
        """The parts' states under dotted names; of a cross-attending part the memory is all of it."""
        return {
            f"{name}.{key}": t
            for name, part in self.parts().items()
            if name not in self._crossing()
            for key, t in part.empty(batch, like).items()
        }

    def remember(self, memory: Memory) -> dict[str, Tensor]:
        """The parts' memories under dotted names."""
        return {
            f"{name}.{key}": t
            for name, part in self.parts().items()
            if name in self._crossing()
            for key, t in part.remember(memory).items()
        }

    def mix(
        self, x: Tensor, past: State | None, documents: Tensor | None, memory: Memory | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See `Mixer.mix`."""
        kept: dict[str, Tensor] = {}
        if self.mixing is not None:
            x, kept = self.mixing.mix(x, past, documents, memory)
        return (x if self.mlp is None else self.mlp(x)), kept

    def _crossing(self) -> list[str]:
        return [] if self.mixing is None else self.mixing.crossing()


def _remembers(past: State | None) -> bool:
    """Does the state of a part hold a memory?"""
    return past is not None and any(name.startswith("memory.") for name in past.tensors)
