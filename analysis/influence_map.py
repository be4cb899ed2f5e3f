"""Which tokens an output depends on, measured by gradients, the same for every mixer and for a whole model.

Of a function of tokens x [T, D] with outputs y [T, E]:

    influence[i, j]   = || d y_i / d x_j ||, the Frobenius norm of the Jacobian's [E, D] block: how much a small change
                        of token j can move output i
    share[i, j]       = influence[i, j] / sum_j influence[i, j]
    profile[n]        = mean over the queries i of the shares at distance |i - j| = n, which sums to 1
    effective context = the fewest nearest tokens, the query's own among them, that hold 90% of the profile

An input gradient is how saliency maps are made (Simonyan et al. 2013, arXiv:1312.6034); its mean over the places of a
receptive field is the effective receptive field of Luo et al. 2016 (arXiv:1701.04128, section 2.1), whose one output
unit is here all E of them.

The norm is taken along K of the E output directions, drawn orthonormal: E / K * sum_k || u_k^T J ||^2 is ||J||^2 in the
mean over draws, and exactly that at K = E. Each (query, direction) is a row of a batch of copies of x, so all that is
asked of a mixer is its door and a backward pass; what a mask hides stays exactly 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from arch.encoder_decoder import EncoderDecoder
from arch.generate import evaluating
from arch.language_model import LanguageModel
from mixers.base import Memory, Mixer, Packing

# Of all copies in one pass: what bounds the memory.
TOKENS_A_PASS = 8192
# What the effective context holds.
MOST = 0.9
MODEL = "whole model"

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Row:
    """The tokens to look at: one row without pads.

    Args:
        tokens: [T] ids.
        documents: [T] int32, where the row holds several.
        source: [S] ids that an encoder reads.
    """

    tokens: Tensor
    documents: Tensor | None = None
    source: Tensor | None = None


@dataclass(frozen=True)
class Effort:
    """What is measured, the same for every part.

    Args:
        queries: positions in the row.
        directions: K, output directions of a query; at most E of them count.
        seed: of their draw.
    """

    queries: Sequence[int]
    directions: int = 16
    seed: int = 0


@dataclass(frozen=True)
class Map:
    """The influence of every token on some queries, through one mixer or a whole model.

    Attributes:
        name: "<layer> <mixer>", or `MODEL`.
        values: [Q, T] float64, at least 0.
        queries: their positions.
        window: W of a mixer that has one.
        weights: [Q, T] what the queries take from each token, the mean over heads; None where there is no such thing.
    """

    name: str
    values: Tensor
    queries: Sequence[int]
    window: int | None = None
    weights: Tensor | None = None


def influence(function: Function, x: Tensor, effort: Effort, head: Function = lambda y: y) -> Tensor:
    """influence[i, j] at the queries, [Q, T] float64.

    Args:
        function: [B, T, D] -> [B, T, ...], its rows independent of each other.
        x: [T, D], in whose dtype it is computed.
        head: [B, ...] -> [B, E], from the outputs at the queries to what is told apart, such as logits.
    Raises:
        ValueError: a gradient that is not finite.
    """
    x = x.detach()
    with torch.no_grad():
        width = head(function(x[None])[:, 0]).shape[-1]
    directions = _directions(width, min(effort.directions, width), effort.seed).to(x)
    asked = [(i, k) for i in range(len(effort.queries)) for k in range(len(directions))]
    squares = torch.zeros(len(effort.queries), len(x), dtype=torch.float64)
    at_once = max(1, TOKENS_A_PASS // len(x))
    for start in range(0, len(asked), at_once):
        rows, along = torch.tensor(asked[start : start + at_once]).T
        places = torch.tensor(effort.queries)[rows]
        copies = x.expand(len(rows), *x.shape).clone().requires_grad_()
        with torch.enable_grad():
            outputs = head(function(copies)[torch.arange(len(rows)), places])
            (gradient,) = torch.autograd.grad((outputs * directions[along]).sum(), copies)
        squares.index_add_(0, rows, gradient.double().square().sum(-1).cpu())
    if not squares.isfinite().all():
        raise ValueError("the gradients are not finite: the model has diverged")
    return (squares * (width / len(directions))).sqrt()


def _directions(width: int, count: int, seed: int) -> Tensor:
    """[K, E] orthonormal, float64."""
    drawn = torch.randn(width, count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return torch.linalg.qr(drawn).Q.T


def model_map(model: LanguageModel, row: Row, effort: Effort) -> Map:
    """From the embeddings to the logits, in eval mode."""
    with evaluating(model), torch.no_grad():
        x, memory = model.embed(row.tokens[None])[0], _memory(model, row)

        def hidden(copies: Tensor) -> Tensor:
            return model.stack(copies, _packed(row.documents, len(copies)), _repeated(memory, len(copies)))

        return Map(MODEL, influence(hidden, x, effort, model.logits), effort.queries)


def mixer_maps(model: LanguageModel, row: Row, effort: Effort) -> list[Map]:
    """Of each mixer alone, from what it reads for this row to what it gives, without the residual stream around it.

    Mixers that attend to a source are left out: they read nothing but the query's own token.
    """
    packing, found = _packed(row.documents, 1), []
    with evaluating(model), torch.no_grad():
        given = model.stack.passed(model.embed(row.tokens[None]), packing, _memory(model, row))
        for i, (layer, (block, x)) in enumerate(zip(model.stack.layers, given, strict=True)):
            sublayer = block.mixing
            for j, read in enumerate([] if sublayer is None else sublayer.read(x, packing)):
                if j not in sublayer.cross:
                    name = f"{i} {layer.mixers[j]}"
                    found.append(mixer_map(name, sublayer.mixers[j], read[0], row.documents, effort))
    return found


def mixer_map(name: str, mixer: Mixer, x: Tensor, documents: Tensor | None, effort: Effort) -> Map:
    """Of one mixer in eval mode: x [T, D], documents [T] or None."""
    values = influence(lambda copies: mixer(copies, _packed(documents, len(copies))), x, effort)
    weigh, weights = getattr(mixer, "self_weights", None), None
    if weigh is not None:
        with torch.no_grad():
            every = weigh(x.detach()[None], None if documents is None else documents[None])
        weights = every[0, list(effort.queries)].mean(1).double().cpu()
    return Map(name, values, effort.queries, getattr(mixer, "window", None), weights)


def _packed(documents: Tensor | None, rows: int) -> Packing | None:
    return None if documents is None else Packing(documents.expand(rows, -1).contiguous(), check=False)


def _memory(model: LanguageModel, row: Row) -> Memory | None:
    return model.encode(row.source[None]) if isinstance(model, EncoderDecoder) and row.source is not None else None


def _repeated(memory: Memory | None, rows: int) -> Memory | None:
    return None if memory is None else Memory(memory.x.expand(rows, -1, -1))


def shares(values: Tensor) -> Tensor:
    """[Q, T] -> [Q, T], each row over its sum; NaN where that is 0: nothing has influence there."""
    return values / values.sum(1, keepdim=True)


def by_distance(values: Tensor, queries: Sequence[int]) -> Tensor:
    """[Q, T] -> [Q, 2T - 1] from T - 1 tokens ahead of the query over its own to T - 1 back; NaN where no token is."""
    time = values.shape[1]
    moved = values.new_full((len(values), 2 * time - 1), math.nan)
    for row, query in enumerate(queries):
        # Token j of this query is query - j back.
        moved[row, query : query + time] = values[row].flip(0)
    return moved


def profile(values: Tensor, queries: Sequence[int]) -> Tensor:
    """The mean share at each distance on either side, [T] from 0 to T - 1; NaN where nothing has any influence."""
    told = [row for row in range(len(values)) if values[row].sum() > 0]
    if not told:
        return values.new_full((values.shape[1],), math.nan)
    moved = by_distance(shares(values[told]), [queries[row] for row in told])
    mean, own = moved.nan_to_num(0).mean(0), values.shape[1] - 1
    return torch.cat([mean[own : own + 1], mean[own + 1 :] + mean[:own].flip(0)])


def context(profile: Tensor, most: float = MOST) -> int | None:
    """The effective context in tokens; None where the profile is NaN."""
    # The sum may end a rounding error below what it should hold.
    held = (profile.cumsum(0) >= most * profile.sum()).nonzero()
    return 1 + int(held[0, 0]) if len(held) else None


def beyond(profile: Tensor, window: int) -> float:
    """The share of tokens that are `window` or more away: what a window of so many tokens does not hold."""
    return float(profile[window:].sum())


def ahead(values: Tensor, queries: Sequence[int]) -> float:
    """The largest share of any query's influence that lies after it; exactly 0 for what is causal."""
    later = torch.arange(values.shape[1]) > torch.tensor(queries)[:, None]
    return float(shares(values).where(later, 0).sum(1).nan_to_num(0).max())


def farthest(values: Tensor, queries: Sequence[int]) -> int | None:
    """The largest distance to a token with any influence; None where nothing has."""
    distance = (torch.arange(values.shape[1]) - torch.tensor(queries)[:, None]).abs()
    return int(distance[values > 0].max()) if (values > 0).any() else None
