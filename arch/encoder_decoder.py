"""An encoder that reads a source, and a language model that attends to it; builds from a plain dict, without Hydra.

    model = EncoderDecoder(
        "mha + cross + mlp",                                # Vaswani et al.: self-attention, cross-attention, MLP
        encoder={"layout": "mha"},
        mixers={"cross": {"mixer": "mha", "cross": True}},
        vocabulary=29,
    )
    logits = model(tokens, packing, model.encode(source, source_packing))
    answers = model.transduce(sources, [[begin]] * len(sources), max_new_tokens=20, stop=end)

Bahdanau et al.: a recurrent decoder with additive cross-attention, "mamba2 + cross + mlp" with "mixer": "additive".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from arch.block import BlockOptions
from arch.generate import Prompts, batch_of, evaluating
from arch.init import initialise
from arch.language_model import LanguageModel, looked_up
from arch.mlp import Kind
from arch.stack import Position, Stack, mixer_options
from mixers import registry
from mixers.base import Memory, Packing
from mixers.options import call
from mixers.parts import mark


@dataclass(frozen=True)
class EncoderOptions:
    """What an encoder has of its own; width, blocks and positions are the decoder's.

    Args:
        layout: order of the mixers, see `arch.layout`; none of them cross-attends.
        n_layers: layers; None: whole periods of the layout, at least 2 layers.
        mixers: options beside those of the decoder's mixers, which hold here too, except that every mixer that has the
            option is `causal: False`. Mixers without it (mamba) stay causal: a recurrent encoder that reads once, as in
            Sutskever et al. 2014; {"mha": {"causal": True}} makes others so.
    """

    layout: str
    n_layers: int | None = None
    mixers: dict[str, Any] | None = None

    def build(self, d_model: int, mixers: Mapping[str, Any], *shared: Any) -> Stack:
        """The encoder beside a decoder of these mixers.

        Raises:
            ValueError: a layout, a mixer or an option that does not fit, or a layer that cross-attends.
        """
        stack = Stack(self.layout, d_model, self.n_layers, both_sides(mixers, self.mixers or {}), *shared)
        if stack.takes_memory:
            crossing = sorted(name for name, options in stack.used.items() if options.get("cross"))
            raise ValueError(f"layout {self.layout!r} cross-attends with {', '.join(crossing)}: there is no memory yet")
        return stack


class EncoderDecoder(LanguageModel):
    """Source ids to annotations that layers of a causal stack attend to: Bahdanau et al. 2014, Vaswani et al. 2017.

    A `LanguageModel` whose calls take the memory that `encode` makes; training, generation and cost are its own.

    Args:
        layout: of the decoder: causal, with a layer at least of a name that has "cross": True in `mixers`.
        encoder: see `EncoderOptions`.
        share_embeddings: source and target have one table; False: the source has its own.
        vocabulary: ids of source and target.
        others: as in `LanguageModel`, of both stacks.
    Raises:
        ValueError: any option that does not fit, a decoder that sees later tokens or has no cross-attending layer, an
            encoder that has one.
    """

    def __init__(
        self,
        layout: str,
        *,
        encoder: dict[str, Any],
        vocabulary: int,
        share_embeddings: bool = True,
        d_model: int = 64,
        n_layers: int | None = None,
        mixers: dict[str, Any] | None = None,
        mlp: Kind = "swiglu",
        mlp_width: int | None = None,
        norm: Literal["rmsnorm", "layernorm"] = "rmsnorm",
        norm_eps: float | None = None,
        sandwich: bool = False,
        bias: bool = False,
        convolution: int | None = None,
        parallel: Literal["sum", "mean", "normed_mean"] = "sum",
        position: Position = "none",
        max_length: int = 2048,
        tied: bool = True,
        logit_softcap: float | None = None,
        dropout: float = 0.0,
        init_std: float | None = None,
    ):
        super().__init__(
            layout,
            vocabulary=vocabulary,
            d_model=d_model,
            n_layers=n_layers,
            mixers=mixers,
            mlp=mlp,
            mlp_width=mlp_width,
            norm=norm,
            norm_eps=norm_eps,
            sandwich=sandwich,
            bias=bias,
            convolution=convolution,
            parallel=parallel,
            position=position,
            max_length=max_length,
            tied=tied,
            logit_softcap=logit_softcap,
            dropout=dropout,
            init_std=init_std,
        )
        _check_decoder(layout, self.stack)
        options = BlockOptions(mlp, mlp_width, norm, sandwich, bias, convolution, parallel, dropout, norm_eps)
        chosen = call(EncoderOptions, encoder, "encoder")
        try:
            self.encoder = chosen.build(d_model, mixers or {}, options, position, max_length)
        except ValueError as error:
            raise ValueError(f"encoder: {error}") from error
        initialise(self.encoder, init_std)
        self.source_embedding = self.embedding
        if not share_embeddings:
            self.source_embedding = mark(nn.Embedding(vocabulary, d_model), no_decay=True)
            initialise(self.source_embedding, init_std)

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """The encoder, the decoder."""
        return (self.encoder, self.stack)

    def encode(self, source: Tensor, packing: Packing | None = None) -> Memory:
        """[B, S] ids -> their annotations [B, S, D]; a document of the target attends to that of the same id."""
        x = self.dropout(looked_up(self.source_embedding, source, packing))
        return Memory(self.encoder(x, packing), packing)

    @torch.no_grad()
    def alignments(self, source: Tensor, tokens: Tensor) -> dict[str, Tensor]:
        """What each token of the target takes from each of the source, in eval mode: [B, S], [B, T] ids, no pads.

        Returns:
            "<layer> <name>" -> weights [B, T, H, S] of every cross-attending branch, computed again for this purpose;
            they sum to 1 over the source (to less with sinks).
        Raises:
            ValueError: a mixer whose weights cannot be told.
        """
        found: dict[str, Tensor] = {}
        with evaluating(self):
            memory = self.encode(source)
            given = self.stack.passed(self.embed(tokens), None, memory)
            for i, (layer, (block, x)) in enumerate(zip(self.stack.layers, given, strict=True)):
                if block.mixing is not None:
                    found |= {f"{i} {layer.mixers[j]}": w for j, w in block.mixing.alignments(x, memory).items()}
        return found

    @torch.no_grad()
    def transduce(self, sources: Prompts, prompts: Prompts, max_new_tokens: int, **options: Any) -> list[Tensor]:
        """New tokens behind prompts, given sources: rows of any lengths, a prompt for each source.

        Args:
            prompts: how each answer begins; most often the id of a beginning alone, [[begin]] * B.
            options: those of `generate`.
        Returns:
            The new tokens of each row, as `generate`.
        """
        tokens, _, ragged = batch_of(self, sources, "source")
        with evaluating(self):
            return self.generate(prompts, max_new_tokens, memory=self.encode(tokens, ragged), **options)


def both_sides(mixers: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The mixers of an encoder: those of the decoder, not causal where they can be, and what is its own."""
    chosen = mixer_options(mixers)
    for name, options in chosen.items():
        if "causal" in registry.options(options["mixer"]):
            chosen[name] = options | {"causal": False}
    given = {name: chosen.get(name, {}) | dict(o) if isinstance(o, Mapping) else o for name, o in own.items()}
    return chosen | given


def _check_decoder(layout: str, stack: Stack) -> None:
    if not stack.causal:
        seeing = {str(layer) for layer, block in zip(stack.layers, stack.blocks, strict=True) if not block.causal}
        raise ValueError(f"layout {layout!r}: a decoder must be causal, and {', '.join(sorted(seeing))} is not")
    if not stack.takes_memory:
        raise ValueError(
            f"layout {layout!r} has no cross-attending layer, so the decoder would not see the source: name an alias "
            "with cross: true, such as mixers={'cross': {'mixer': 'mha', 'cross': True}} in 'mha + cross'"
        )
