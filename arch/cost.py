"""What a model costs, counted on the meta device and never declared; `CONVENTION` says how."""

from __future__ import annotations

import re
from functools import cached_property

from torch import nn

from arch.activations import saved_bytes
from arch.encoder_decoder import EncoderDecoder
from arch.language_model import LanguageModel
from arch.parts import parts
from mixers.base import DOOR
from mixers.options import nearest

CONVENTION = """\
FLOPs: 2 a multiply-add; attention by its visible pairs, linear attention by its recurrence, a convolution by its taps
inside of the row, all else by its matrix products; elementwise work is not counted. One unpacked sequence, logits of
every token; an encoder-decoder has a source as long as the row beside it, read with the prompt. Training: 3 times
forward (backward is 2, nothing is computed again). State: the tensors that generation carries along for one
sequence, of a source its keys and values, in the dtype of the model or in bfloat16, where recurrent states stay at
least float32; ids and positions apart. Activations: what autograd keeps of one sequence until the backward, parameters
aside, with the portable implementations. Attention traffic: q, k and v read once, the output written once."""

# By the names that runs log behind "complexity/" -> the attribute of `Cost`.
FIGURES = {
    "parameters": "parameters",
    "parameters_active": "parameters_active",
    "parameters_without_embeddings": "parameters_without_embeddings",
    "flops_per_token_forward": "flops_per_token_forward",
    "flops_per_token_train": "flops_per_token_train",
    "prefill_flops_at_<length>": "prefill_flops",
    "decode_flops_per_token_at_<length>": "decode_flops_per_token",
    "decode_attention_bytes_at_<length>": "decode_attention_bytes",
    "state_bytes_at_<length>": "state_bytes",
    "bf16_state_bytes_at_<length>": "bf16_state_bytes",
    "activation_bytes_at_<length>": "activation_bytes",
    "attention_bytes_at_<length>": "attention_bytes",
    "score_bytes_at_<length>": "score_bytes",
}


def attribute(name: str) -> str:
    """The attribute of `Cost` behind a name such as "state_bytes_at_2048".

    Raises:
        ValueError: no such name; says the nearest.
    """
    pattern = re.sub(r"_at_[1-9]\d*$", "_at_<length>", name)
    if pattern not in FIGURES:
        raise ValueError(f"figure {name!r} is unknown{nearest(pattern, FIGURES)}; known are {', '.join(FIGURES)}")
    return FIGURES[pattern]


class Cost:
    """The figures of one model, live or on meta, at rows of one length: sums over its parts.

    `measure` makes it. Each figure is counted when it is first asked for, and equal layers once, so the time does not
    grow with the depth.

    Attributes:
        parts: an encoder's parts, the embedding, every layer in order, the head.
    """

    def __init__(self, model: LanguageModel, length: int):
        self.length, self._model = length, model
        self.parts = tuple(parts(model, length))

    @property
    def parameters(self) -> int:
        """Shared ones once."""
        return parameters(self._model)

    @property
    def parameters_active(self) -> int:
        """Those that the forward of one token reads: all but the rows of embedding tables that it does not look up.

        A tied table is read whole by the head. This is how gpt-oss counts (arXiv:2508.10925, table 1).
        """
        tables = [m for m in self._model.modules() if isinstance(m, nn.Embedding)]
        return self.parameters - sum(_unread(table) for table in tables if table.weight is not self._model.head.weight)

    @property
    def parameters_without_embeddings(self) -> int:
        """Without token and position embeddings and the head."""
        return self.parameters - _embeddings(self._model)

    @property
    def flops_per_token_forward(self) -> float:
        """Mean over the tokens of a row."""
        return sum(part.kind.forward.total for part in self.parts) / self.length

    @property
    def flops_per_token_train(self) -> float:
        """Forward and backward."""
        return 3 * self.flops_per_token_forward

    @property
    def prefill_flops(self) -> int | None:
        """Of all tokens of a prompt together."""
        return self._sum("prefill_flops")

    @property
    def decode_flops_per_token(self) -> int | None:
        """Of the token after `length` others; with `decode` "recompute" it is no real decode figure."""
        return self._sum("decode_flops_per_token")

    @property
    def decode_attention_bytes(self) -> int | None:
        """What attention of that token reads and writes at least; sparse attention reads less than its cache holds."""
        return self._sum("decode_attention_bytes")

    @property
    def state_bytes(self) -> int | None:
        """Of one sequence after `length` tokens, in the dtype of the model."""
        return self._sum("state_bytes")

    @property
    def bf16_state_bytes(self) -> int | None:
        """Of the same in bfloat16; recurrent states stay at least float32."""
        return self._sum("bf16_state_bytes")

    @property
    def bookkeeping_bytes(self) -> int | None:
        """Ids and positions beside the state once anything was packed; until then there are none.

        None for a model that is bidirectional or recomputes: the latter looks at the ids, and meta has none.
        """
        if not self._model.causal or self.decode == "recompute":
            return None
        # Of the door int32 each.
        return sum(part.kind.bookkeeping_bytes for part in self.parts) + 4 * len(DOOR)

    @property
    def attention_bytes(self) -> int:
        """What attention moves to and from device memory at least, in the forward pass of a row."""
        return sum(part.attention_bytes for part in self.parts)

    @property
    def score_bytes(self) -> int:
        """The score matrices that this pass would write without a fused kernel."""
        return sum(part.score_bytes for part in self.parts)

    @cached_property
    def activations(self) -> tuple[int | None, ...]:
        """Bytes a part that autograd keeps of a training row, see `arch.activations`; None where it cannot be known."""
        return saved_bytes(self._model, self.length)

    @property
    def activation_bytes(self) -> int | None:
        """The same of the whole model."""
        known = [kept for kept in self.activations if kept is not None]
        return sum(known) if len(known) == len(self.parts) else None

    @property
    def decode(self) -> str:
        """ "state", or "recompute" where some mixer extends by running everything again."""
        return self._model.stack.decode

    @property
    def dense_counted(self) -> bool:
        """Was some attention outside of our ops counted with all its masked pairs?"""
        return any(part.dense_counted for part in self.parts)

    def figure(self, name: str) -> float | None:
        """A figure by its name in `FIGURES`; None where the model has none, as a decode figure of a recomputing one.

        Raises:
            ValueError: no such name; says the nearest.
        """
        found = attribute(name)
        if found.startswith("decode_") and self.decode == "recompute":
            return None
        value: float | None = getattr(self, found)
        return value

    def metrics(self) -> dict[str, float]:
        """All but the activations, which take longer, by the names that runs log; what does not exist is left out."""
        names = [name.replace("<length>", str(self.length)) for name in FIGURES if not name.startswith("activation")]
        found = {f"complexity/{name}": self.figure(name) for name in names}
        return {name: value for name, value in found.items() if value is not None}

    def _sum(self, name: str) -> int | None:
        """Over the parts; None where the model is bidirectional."""
        return sum(getattr(part, name) for part in self.parts) if self._model.causal else None


def measure(model: LanguageModel, length: int) -> Cost:
    """Count a model, live or on meta, at rows of `length` tokens; its weights are not touched.

    Raises:
        ValueError: length below 1. The figures raise one for a custom operator without a FLOP formula.
    """
    if length < 1:
        raise ValueError(f"length={length} must be at least 1")
    return Cost(model, length)


def parameters(model: nn.Module) -> int:
    """Number of parameters, shared ones once."""
    return sum(p.numel() for p in model.parameters())


def _embeddings(model: LanguageModel) -> int:
    """Token and position embeddings and the head, shared ones once."""
    tables = [model.embedding, *(stack.position.table for stack in model.stacks)]
    if isinstance(model, EncoderDecoder):
        tables.append(model.source_embedding)
    weights = [model.head.weight, *(table.weight for table in tables if table is not None)]
    return sum({id(weight): weight.numel() for weight in weights}.values())


def _unread(table: nn.Embedding) -> int:
    """The entries that one token does not look up."""
    return (table.num_embeddings - 1) * table.embedding_dim

