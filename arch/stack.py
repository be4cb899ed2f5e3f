"""A layout made of blocks: names to mixers, positions at the model, one state for the whole stack."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from arch.block import Block, BlockOptions
from arch.layout import MLP, Layer, layers
from mixers import registry
from mixers.base import Memory, Mixer, Packing, State, positions
from mixers.options import nearest
from mixers.parts import mark

Position = Literal["none", "learned", "sinusoidal"]
# What may stand beside the options of a mixer's constructor: which mixer it is, and whether it reads a memory.
NOT_THE_MIXERS = ("mixer", "cross")


class Stack(Mixer):
    """Blocks in the order of a layout, and a norm behind the last.

    Its state holds part "3.mixer.k" for the cache of layer 3, whatever weights the layers share.

    Raises:
        ValueError: a layout, a mixer or an option that does not fit; says which.
    """

    has_convolution = True

    def __init__(
        self,
        layout: str,
        d_model: int,
        n_layers: int | None,
        mixers: Mapping[str, Any],
        options: BlockOptions,
        position: Position,
        max_length: int,
    ):
        super().__init__()
        chosen = mixer_options(mixers)
        self.layers = layers(layout, n_layers, chosen)
        self.used = {name: chosen[name] for layer in self.layers for name in layer.mixers if name != MLP}
        self.blocks = cast("Sequence[Block]", nn.ModuleList(_blocks(self.layers, d_model, chosen, options)))
        self.norm = options.make_norm(d_model)
        self.position = PositionEmbedding(position, d_model, max_length)
        self.causal = all(block.causal for block in self.blocks)
        self.takes_memory = any(block.takes_memory for block in self.blocks)

    def empty(self, batch: int, like: Tensor) -> dict[str, Tensor]:
        """The blocks' states under "<layer>.<part>"."""
        return {f"{i}.{key}": t for i, block in enumerate(self.blocks) for key, t in block.empty(batch, like).items()}

    def remember(self, memory: Memory) -> dict[str, Tensor]:
        """The blocks' memories under "<layer>.<part>"."""
        return {f"{i}.{key}": t for i, block in enumerate(self.blocks) for key, t in block.remember(memory).items()}

    def mix(
        self, x: Tensor, past: State | None, documents: Tensor | None, memory: Memory | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See `Mixer.mix`."""
        x = self.position(x, past, documents)
        kept: dict[str, Tensor] = {}
        for i, block in enumerate(self.blocks):
            x, state = block.mix(x, None if past is None else past.part(str(i)), documents, memory)
            kept |= {f"{i}.{key}": tensor for key, tensor in state.items()}
        return self.norm(x), kept

    def passed(
        self, x: Tensor, packing: Packing | None = None, memory: Memory | None = None
    ) -> Iterator[tuple[Block, Tensor]]:
        """Each block and what it is given when the stack is given x [B, T, D] without pads: to look at one by one."""
        x = self.position(x, None, None if packing is None else packing.documents)
        for block in self.blocks:
            yield block, x
            x = block(x, packing, memory if block.takes_memory else None)

    @property
    def decode(self) -> str:
        """ "recompute" as soon as one mixer is so."""
        parts = [part for block in self.blocks for part in block.parts().values()]
        return "recompute" if any(part.decode == "recompute" for part in parts) else "state"


class PositionEmbedding(nn.Module):
    """What the model itself adds for the order of tokens; positions count per document."""

    def __init__(self, kind: Position, d_model: int, max_length: int):
        super().__init__()
        if kind == "sinusoidal" and d_model % 2:
            raise ValueError(f"position=sinusoidal needs an even d_model, got {d_model}")
        if max_length < 1:
            raise ValueError(f"max_length={max_length} must be at least 1")
        self.kind, self.max_length = kind, max_length
        self.table = mark(nn.Embedding(max_length, d_model), no_decay=True) if kind == "learned" else None

    def forward(self, x: Tensor, past: State | None, documents: Tensor | None) -> Tensor:
        """x [B, T, D] plus what belongs to each token's position."""
        if self.kind == "none":
            return x
        place = positions(documents, past, x.shape[1], x.device)
        if self.table is None:
            return x + sinusoids(place, x.shape[-1], torch.promote_types(x.dtype, torch.float32)).to(x.dtype)
        end = x.shape[1] + (0 if past is None else past.length)
        # The bound counts pads and earlier documents too: past it, the real positions of packed rows must be looked at.
        if end > self.max_length and documents is not None and not place.is_meta:
            end = 1 + int(place.masked_fill(documents == 0, 0).max())
        if end > self.max_length and not (place.is_meta and documents is not None):
            raise ValueError(f"position=learned was built for max_length={self.max_length}; got position {end - 1}")
        return x + self.table(place.clamp(max=self.max_length - 1))


def sinusoids(place: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """[.., T] -> [.., T, D]: sine in even channels, cosine in odd ones (Vaswani et al. 2017, section 3.5)."""
    rates = 10_000.0 ** (-torch.arange(0, width, 2, device=place.device, dtype=dtype) / width)
    angles = place[..., None].to(dtype) * rates
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(-2)


def mixer_options(mixers: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Every name that a layout may use -> {"mixer": registered name, option: value, ...}.

    Args:
        mixers: {registered name: {option: value}}, or {alias: {"mixer": registered name, option: value}}; an alias
            starts from the options given for its mixer. "cross": True beside them makes its layers attend to a memory.
    Raises:
        ValueError: an unknown mixer or option, or a mixer that cannot cross-attend.
    """
    known = registry.names()
    for name, options in mixers.items():
        if not isinstance(options, Mapping):
            raise ValueError(f"model.mixers.{name}={options!r} must be a mapping of options")
        if name not in known and "mixer" not in options:
            raise ValueError(
                f"model.mixers.{name} is no registered mixer{nearest(name, known)} and names none: give it "
                f"mixer: one of {', '.join(known)}"
            )
        if name in known and options.get("mixer", name) != name:
            raise ValueError(
                f"model.mixers.{name} is a registered mixer and cannot be an alias of {options['mixer']!r}"
            )
        if name in registry.RESERVED:
            raise ValueError(f"model.mixers.{name}: the name is reserved ({', '.join(registry.RESERVED)})")
    base = {name: {"mixer": name} | dict(mixers.get(name, {})) for name in known}
    for name, options in mixers.items():
        if name not in known:
            registry.get(options["mixer"])
            base[name] = base[options["mixer"]] | dict(options)
    for name, options in base.items():
        what = f"model.mixers.{name}: mixer {options['mixer']!r}"
        options = base[name] = registry.one_way(options["mixer"], options, what)
        allowed = registry.options(options["mixer"])
        for option in options:
            if option not in NOT_THE_MIXERS and option not in allowed:
                raise ValueError(
                    f"{what} has no option {option!r}{nearest(option, allowed)}; options: {', '.join(allowed)}"
                )
        _check_cross(name, options)
    # One spelling of "not".
    return {name: {k: v for k, v in options.items() if k != "cross" or v} for name, options in base.items()}


def _check_cross(name: str, options: Mapping[str, Any]) -> None:
    cross, mixer = options.get("cross", False), options["mixer"]
    if not isinstance(cross, bool):
        raise ValueError(f"model.mixers.{name}: cross={cross!r} must be true or false")
    if cross and not registry.get(mixer).takes_memory:
        able = ", ".join(other for other in registry.names() if registry.get(other).takes_memory)
        raise ValueError(f"model.mixers.{name}: mixer {mixer!r} cannot cross-attend; those that can: {able}")


def _blocks(
    layout: tuple[Layer, ...], d_model: int, chosen: Mapping[str, Mapping[str, Any]], options: BlockOptions
) -> list[Block]:
    with_mlp = options.mlp != "none" and all(layer.mixers != (MLP,) for layer in layout)
    if options.mlp == "none" and any(layer.mixers == (MLP,) for layer in layout):
        raise ValueError("model.mlp=none contradicts a layout with mlp layers")
    shared: dict[str, Block] = {}
    blocks = []
    for layer in layout:
        block = shared.get(layer.share) if layer.share else None
        if block is None:
            alone = layer.mixers == (MLP,)
            mixers = [] if alone else [_mixer(chosen[name], d_model) for name in layer.mixers]
            cross = [] if alone else [i for i, name in enumerate(layer.mixers) if chosen[name].get("cross")]
            block = Block(d_model, mixers, options, with_mlp or alone, cross)
        if layer.share:
            shared[layer.share] = block
        blocks.append(block)
    return blocks


def _mixer(options: Mapping[str, Any], d_model: int) -> Mixer:
    return registry.build(options["mixer"], d_model, **{k: v for k, v in options.items() if k not in NOT_THE_MIXERS})
