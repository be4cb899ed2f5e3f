"""Generation: prompts of any lengths in, new tokens out: one state, filled by the prompts, extended by each token."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mixers.base import Memory, Packing

if TYPE_CHECKING:
    from arch.language_model import LanguageModel

Prompts = Tensor | Sequence[Tensor | Sequence[int]]


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen.

    Args:
        temperature: what logits are divided by; 0: the most likely token is taken (greedy).
        top_k: only so many of the most likely tokens.
        top_p: only the fewest most likely tokens whose probabilities, after temperature and top_k, reach this sum.
    Raises:
        ValueError: an option out of range, or top_k or top_p under greedy choice, where they mean nothing.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ValueError(f"temperature={self.temperature} must be a finite number of at least 0; 0 is greedy")
        if self.top_k is not None and (type(self.top_k) is not int or self.top_k < 1):
            raise ValueError(f"top_k={self.top_k!r} must be a whole number of at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1")
        for name in ("top_k", "top_p"):
            if self.temperature == 0 and getattr(self, name) is not None:
                raise ValueError(f"{name}={getattr(self, name)} needs a temperature above 0: temperature=0 is greedy")

    def probabilities(self, logits: Tensor) -> Tensor:
        """The distribution that a token is drawn from: [..., V] -> [..., V] float64; of equals, lower ids come first.

        Raises:
            ValueError: top_k is larger than V.
        """
        size = logits.shape[-1]
        if self.top_k is not None and self.top_k > size:
            raise ValueError(f"top_k={self.top_k} must be at most the vocabulary, {size}")
        scores, ids = logits.double().sort(stable=True, dim=-1, descending=True)
        if self.temperature == 0:
            shares = torch.zeros_like(scores).index_fill_(-1, torch.zeros(1, dtype=torch.int64, device=ids.device), 1)
        else:
            # From the best one, so that no temperature is too low.
            shares = ((scores - scores[..., :1]) / self.temperature).softmax(-1)
        if self.top_k is not None:
            shares[..., self.top_k :] = 0
            shares = shares / shares.sum(-1, keepdim=True)
        # Rounding must leave nothing out where all is asked for.
        if self.top_p is not None and self.top_p < 1:
            shares = shares.masked_fill(shares.cumsum(-1) - shares >= self.top_p, 0)
            shares = shares / shares.sum(-1, keepdim=True)
        return torch.zeros_like(shares).scatter(-1, ids, shares)

    def choose(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """A token for each row: [B, V] -> [B] int64."""
        if self.temperature == 0:
            return logits.argmax(-1)
        return self.probabilities(logits).multinomial(1, generator=generator)[:, 0]


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompts: Prompts,
    max_new_tokens: int,
    sampling: Sampling,
    stop: int | None = None,
    generator: torch.Generator | None = None,
    memory: Memory | None = None,
) -> list[Tensor]:
    """See `LanguageModel.generate`."""
    tokens, lengths, ragged = batch_of(model, prompts)
    if memory is not None and len(memory.x) != len(tokens):
        raise ValueError(f"memory has {len(memory.x)} rows; the prompts are {len(tokens)}")
    _check(model, int(lengths.max()), max_new_tokens, stop)
    chosen: list[Tensor] = []
    with evaluating(model):
        hidden, state = model.advance(tokens, model.start(len(tokens), memory), ragged)
        logits = model.logits(hidden[torch.arange(len(tokens), device=lengths.device), lengths - 1])
        running = torch.ones(len(tokens), dtype=torch.bool, device=lengths.device)
        while len(chosen) < max_new_tokens:
            chosen.append(sampling.choose(logits, generator))
            if stop is not None:
                running &= chosen[-1] != stop
                if not running.any():
                    break
            if len(chosen) < max_new_tokens:
                logits, state = model.extend(chosen[-1][:, None], state)
                logits = logits[:, 0]
    return [_until(row, stop) for row in torch.stack(chosen, 1)]


def _until(row: Tensor, stop: int | None) -> Tensor:
    """The row up to its first `stop`, which belongs to it."""
    ends = (row == stop).nonzero() if stop is not None else row.new_zeros(0, 1)
    return row[: int(ends[0, 0]) + 1] if len(ends) else row


def batch_of(model: LanguageModel, prompts: Prompts, what: str = "prompt") -> tuple[Tensor, Tensor, Packing | None]:
    """Rows of any lengths on the model's device: ids [B, T], lengths [B], and their packing where lengths differ.

    Args:
        what: the name of a row in errors.
    """
    rows = _rows(model, prompts, what)
    lengths = torch.tensor([len(row) for row in rows], device=rows[0].device)
    tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return tokens, lengths, Packing.from_lengths(lengths, tokens.shape[1]) if lengths.unique().numel() > 1 else None


def _rows(model: LanguageModel, prompts: Prompts, what: str) -> list[Tensor]:
    """The prompts on the model's device, each [its length] int64."""
    if not len(prompts):
        raise ValueError(f"{what}s must hold at least one {what}")
    rows = []
    for i, prompt in enumerate(prompts):
        row = torch.as_tensor(prompt, device=model.embedding.weight.device)
        if row.dim() != 1:
            raise ValueError(f"{what} {i} must be a row of ids; got shape {list(row.shape)}: [[1, 2]] is one {what}")
        if not len(row):
            raise ValueError(f"{what} {i} is empty; it must have at least one token")
        if row.is_floating_point() or row.is_complex() or row.dtype == torch.bool:
            raise ValueError(f"{what} {i} must hold integers; got {row.dtype}")
        row = row.long()
        wrong = row[(row < 0) | (row >= model.vocabulary)]
        if len(wrong):
            raise ValueError(f"{what} {i} has the id {int(wrong[0])}; ids are from 0 to {model.vocabulary - 1}")
        rows.append(row)
    return rows


def _check(model: LanguageModel, longest: int, max_new_tokens: int, stop: int | None) -> None:
    if type(max_new_tokens) is not int or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens!r} must be a whole number of at least 1")
    if stop is not None and (type(stop) is not int or not 0 <= stop < model.vocabulary):
        raise ValueError(f"stop={stop!r} must be an id, from 0 to {model.vocabulary - 1}")
    position = model.stack.position
    # The last token is not read.
    needed = longest + max_new_tokens - 1
    if position.table is not None and needed > position.max_length:
        raise ValueError(
            f"position=learned was built for max_length={position.max_length}; a prompt of {longest} and "
            f"max_new_tokens={max_new_tokens} need {needed}"
        )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
