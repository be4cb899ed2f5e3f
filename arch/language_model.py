"""A stack between an embedding and a head; builds from a plain dict, without Hydra."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from arch.block import BlockOptions
from arch.generate import Prompts, Sampling, generate
from arch.init import initialise
from arch.loss import cross_entropy
from arch.mlp import Kind
from arch.stack import Position, Stack
from mixers.base import Memory, Packing, State
from mixers.parts import mark


class LanguageModel(nn.Module):
    """Token ids to next-token logits.

    Args:
        layout: order of the mixers, see `arch.layout`.
        vocabulary: number of token ids.
        d_model: width D.
        n_layers: layers of the stack; None: whole periods of the layout, at least 2 layers.
        mixers: {name: {option: value}} for registered mixers, {alias: {"mixer": name, option: value}} for aliases;
            "cross": True makes the layers of a name attend to a memory, which every call then needs.
        mlp, mlp_width: channel mixer of each block, see `arch.mlp`.
        norm: "rmsnorm" or "layernorm", in front of every sublayer and behind the last.
        norm_eps: added to the mean square; None: 1.2e-7 for rmsnorm, 1e-5 for layernorm.
        sandwich: a norm behind every sublayer too (Gemma 2).
        bias: biases in MLPs and layer norms; mixers have their own option.
        convolution: taps of a short causal convolution in front of the mixers that have none of their own; None: none.
        parallel: how parallel branches are combined: sum, mean, or mean of normed branches (Hymba).
        position: embedding of positions at the model, in addition to what mixers do.
        max_length: rows of a learned position embedding.
        tied: the head is the embedding's transpose.
        logit_softcap: logits become cap * tanh(logit / cap).
        dropout: of sublayer outputs and the embedding.
        init_std: of the initial normal; None: 0.02 for embeddings, 1 / sqrt(inputs) for linear layers, see `arch.init`.
    Raises:
        ValueError: any option that does not fit; says which.
    """

    def __init__(
        self,
        layout: str,
        *,
        vocabulary: int,
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
        super().__init__()
        _check(
            vocabulary=(vocabulary, vocabulary >= 1, "at least 1"),
            d_model=(d_model, d_model >= 1, "at least 1"),
            norm_eps=(norm_eps, norm_eps is None or norm_eps > 0, "above 0"),
            logit_softcap=(logit_softcap, logit_softcap is None or logit_softcap > 0, "above 0"),
            dropout=(dropout, 0 <= dropout < 1, "at least 0 and below 1"),
            init_std=(init_std, init_std is None or init_std > 0, "above 0"),
        )
        options = BlockOptions(mlp, mlp_width, norm, sandwich, bias, convolution, parallel, dropout, norm_eps)
        self.vocabulary, self.logit_softcap = vocabulary, logit_softcap
        self.embedding = mark(nn.Embedding(vocabulary, d_model), no_decay=True)
        self.dropout = nn.Dropout(dropout)
        self.stack = Stack(layout, d_model, n_layers, mixers or {}, options, position, max_length)
        self.head = nn.Linear(d_model, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        initialise(self, init_std)

    @property
    def used(self) -> Mapping[str, dict[str, Any]]:
        """The mixers and aliases that the layout names -> their options."""
        return self.stack.used

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """All stacks, in the order in which a row passes them."""
        return (self.stack,)

    @property
    def causal(self) -> bool:
        """False where some mixer sees later tokens; such a model has no decode."""
        return self.stack.causal

    def forward(self, tokens: Tensor, packing: Packing | None = None, memory: Memory | None = None) -> Tensor:
        """[B, T] ids -> [B, T, vocabulary] logits; at pads any id is accepted and the logits mean nothing."""
        return self.logits(self.hidden(tokens, packing, memory))

    def hidden(self, tokens: Tensor, packing: Packing | None = None, memory: Memory | None = None) -> Tensor:
        """[B, T] ids -> [B, T, D], what the head reads; 0 at pads."""
        return self.stack(self.embed(tokens, packing), packing, memory)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., vocabulary]."""
        logits = self.head(hidden)
        if self.logit_softcap is None:
            return logits
        return self.logit_softcap * torch.tanh(logits / self.logit_softcap)

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """[N, D], targets [N] -> their summed cross-entropy in nats; large logits are never whole, see `arch.loss`."""
        return cross_entropy(hidden, self.head.weight, targets, self.logit_softcap)

    def start(self, batch: int, memory: Memory | None = None) -> State:
        """The state before any token; it keeps what is needed of the memory."""
        return self.stack.start(batch, self.embedding.weight, memory)

    def prefill(
        self, tokens: Tensor, packing: Packing | None = None, memory: Memory | None = None
    ) -> tuple[Tensor, State]:
        """Prompts [B, T], padded anywhere by `packing`: logits [B, T, vocabulary] and the state after them."""
        return self.extend(tokens, self.start(tokens.shape[0], memory), packing)

    def extend(self, tokens: Tensor, state: State, packing: Packing | None = None) -> tuple[Tensor, State]:
        """Go on with [B, T] further ids, see `Mixer.extend`."""
        hidden, state = self.advance(tokens, state, packing)
        return self.logits(hidden), state

    def advance(self, tokens: Tensor, state: State, packing: Packing | None = None) -> tuple[Tensor, State]:
        """As `extend`, but what the head reads, [B, T, D]: of a long prompt, only the last logits may be wanted."""
        return self.stack.extend(self.embed(tokens, packing), state, packing)

    def generate(
        self,
        prompts: Prompts,
        max_new_tokens: int,
        *,
        memory: Memory | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop: int | None = None,
        generator: torch.Generator | None = None,
    ) -> list[Tensor]:
        """New tokens behind prompts; without dropout, whatever mode the model is in.

        Args:
            prompts: rows of ids, of any lengths; a tensor [B, T] is B prompts of T.
            max_new_tokens: at most so many, at least 1.
            memory: what cross-attending layers attend to, a row for each prompt; ragged ones by its packing.
            temperature: what logits are divided by; 0 is greedy: the most likely token, the lowest id of equals.
            top_k: draw from so many of the most likely tokens only.
            top_p: draw from the fewest most likely tokens whose probabilities, after temperature and top_k, reach this.
            stop: the id that ends a row; the batch goes on until all rows have ended.
            generator: of the draws, on the model's device; None: torch's own. A batch shares it: its rows are drawn
                alike only in the same batch.
        Returns:
            The new tokens of each row, [at most max_new_tokens] int64 on the model's device, with `stop` at their end.
        Raises:
            ValueError: no prompt, an empty one, an id outside of the vocabulary, an option out of range, more positions
                than a learned embedding has, a mixer that sees later tokens, or a memory of other rows.
        """
        return generate(self, prompts, max_new_tokens, Sampling(temperature, top_k, top_p), stop, generator, memory)

    def embed(self, tokens: Tensor, packing: Packing | None = None) -> Tensor:
        """[B, T] ids -> [B, T, D], what the stack reads; at pads that of id 0."""
        return self.dropout(looked_up(self.embedding, tokens, packing))


def looked_up(table: nn.Embedding, tokens: Tensor, packing: Packing | None) -> Tensor:
    """[B, T] ids, any at pads -> [B, T, D]."""
    return table(tokens if packing is None else tokens.masked_fill(packing.documents == 0, 0))


def _check(**rules: tuple[Any, bool, str]) -> None:
    for name, (value, fine, wanted) in rules.items():
        if not fine:
            raise ValueError(f"{name}={value} must be {wanted}")
