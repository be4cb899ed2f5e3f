"""Native sparse attention (Yuan et al. 2025, arXiv:2502.11089): compressed blocks, chosen blocks and a window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from einops import rearrange
from torch import Tensor, nn

from kernels.attention.op import attention
from kernels.sparse.op import compressed_attention, selected_attention
from mixers import cache
from mixers.attention import default_kv_heads
from mixers.base import Memory, Mixer, State, positions
from mixers.blocks import Compress, Compression, Ends
from mixers.parts import head_count, mark
from mixers.registry import register
from mixers.rope import Layout, Rope

Branch = Literal["compressed", "selected", "window"]
BRANCHES: tuple[Branch, ...] = ("compressed", "selected", "window")


@register("nsa")
class NativeSparseAttention(Mixer):
    """Three attentions of the same queries, each with keys and values of its own, summed under gates.

    - compressed: blocks of tokens that are wholly past, each as one learned key and value. Neither these nor the
      queries turn here: the order inside of a block is learned, and block positions are left to the content.
    - selected: token by token, the query's own block, the first, the one before its own, and the blocks with the
      highest scores. A score sums the compressed probabilities over the query heads of a key head, which all read the
      same blocks; it carries no gradient.
    - window: the last tokens.

    A branch alone has no gate. Selected without compressed, an ablation: the scores come from the mean of a block's
    selected keys, so nothing is left without a gradient. Blocks begin with each document.

    Args:
        d_model: width D of the residual stream.
        n_heads: H; None: the largest divisor of d_model up to d_model // 64.
        n_kv_heads: G, a divisor of H; None: n_heads // 4, or the largest divisor below.
        head_dim: K; None: d_model / n_heads.
        branches: which of compressed, selected, window are on.
        compress_block, compress_stride: tokens of a compressed block, and from one to the next.
        compression: how a block becomes one token, see `mixers.blocks.Compress`.
        select_block: tokens of a block to select, a multiple of compress_stride.
        n_selected: blocks that a query reads. Up to n_selected * select_block tokens the branch is full attention.
        window: tokens of the window, the query's own included.
        shrink: divides compress_block, compress_stride, select_block and window, for short sequences.
        position: "rope" turns queries and keys of the selected and the window branch; "none" leaves order to the masks.
        rope_base, rope_fraction, rope_layout: see `mixers.rope`.
        rope_scaling: see `mixers.rope_scaling`; none whose angles depend on the length of the document.
    Raises:
        ValueError: heads or blocks that do not divide, an option out of range, no branch.
    Source: equations 5 to 12 and section 4.1 for the defaults. Equation 9 is read 1-based: compressed blocks count
        towards the selection blocks they share tokens with, each as many times as they share strides.
    """

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int | None = None,
        n_kv_heads: int | None = None,
        head_dim: int | None = None,
        branches: Sequence[Branch] = BRANCHES,
        compress_block: int = 32,
        compress_stride: int = 16,
        compression: Compression = "mlp",
        select_block: int = 64,
        n_selected: int = 16,
        window: int = 512,
        shrink: int = 1,
        position: Literal["rope", "none"] = "rope",
        rope_base: float = 10_000.0,
        rope_fraction: float = 1.0,
        rope_layout: Layout = "half",
        rope_scaling: Mapping[str, Any] | None = None,
    ):
        super().__init__()
        self.n_heads = head_count(d_model, n_heads, free=head_dim is not None)
        groups = default_kv_heads(d_model, n_heads, head_dim) if n_kv_heads is None else n_kv_heads
        if groups < 1 or self.n_heads % groups:
            raise ValueError(f"n_kv_heads={groups} must be at least 1 and divide n_heads={self.n_heads}")
        self.n_kv_heads = groups
        self.head_dim = d_model // self.n_heads if head_dim is None else head_dim
        self.branches = _chosen(branches)
        sizes = dict(
            compress_block=compress_block, compress_stride=compress_stride, select_block=select_block, window=window
        )
        _check(self.head_dim, n_selected, **sizes)
        sizes = _shrunk(sizes, shrink)
        self.compress_block, self.compress_stride = sizes["compress_block"], sizes["compress_stride"]
        self.select_block, self.n_selected, self.window = sizes["select_block"], n_selected, sizes["window"]
        self.position, self.rope = position, None
        if rope_scaling is not None and position != "rope":
            raise ValueError(f"rope_scaling={dict(rope_scaling)} needs position=rope; got {position}")
        if position == "rope":
            self.rope = Rope(self.head_dim, rope_base, rope_fraction, rope_layout, rope_scaling)
            if self.rope.by_length:
                raise ValueError(
                    f"rope_scaling={dict(rope_scaling or {})} turns cached keys anew at each length; "
                    "nsa keeps them turned: allowed are the others of mixers.rope_scaling"
                )
        inner, shared = self.n_heads * self.head_dim, len(self.branches) * self.n_kv_heads * self.head_dim
        self.q = nn.Linear(d_model, inner, bias=False)
        self.k = nn.Linear(d_model, shared, bias=False)
        self.v = nn.Linear(d_model, shared, bias=False)
        self.gate = nn.Linear(d_model, len(self.branches) * self.n_heads) if len(self.branches) > 1 else None
        how = compression if "compressed" in self.branches else "mean"
        self.compress_k = Compress(how, self.compress_block, self.head_dim)
        self.compress_v = Compress(how, self.compress_block, self.head_dim)
        self.out = mark(nn.Linear(inner, d_model, bias=False), residual=True)

    def empty(self, batch: int, like: Tensor) -> dict[str, Tensor]:
        """Caches without tokens."""
        heads, width = self.n_kv_heads, self.head_dim
        value = width if "compressed" in self.branches else 0
        kept: dict[str, Tensor] = {}
        for name in ("selected", "window"):
            if name in self.branches:
                kept |= _named(name, cache.empty(batch, heads, width, width, like))
        if set(self.branches) & {"compressed", "selected"}:
            kept |= _named("compressed", cache.empty(batch, heads, width, value, like))
            shape = batch, self.compress_block - 1, heads
            kept |= {"tail.k": like.new_zeros(*shape, width), "tail.v": like.new_zeros(*shape, value)}
        return kept

    def mix(
        self, x: Tensor, past: State | None, documents: Tensor | None, memory: Memory | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See `Mixer.mix`."""
        piece = _Piece.of(x, past, documents)
        q = rearrange(self.q(x), "b t (h k) -> b t h k", h=self.n_heads)
        k, v = (self._by_branch(project(x)) for project in (self.k, self.v))
        turned = q
        if self.rope is not None:
            angles = self.rope.angles(piece.places)
            turned = self.rope.turn(q, angles)
            k = {name: t if name == "compressed" else self.rope.turn(t, angles) for name, t in k.items()}
        parts: dict[str, Tensor] = {}
        kept: dict[str, Tensor] = {}
        if "compressed" in k:
            parts["compressed"], indices, kept = self._compressed(q, k["compressed"], v["compressed"], piece)
        elif "selected" in k:
            keys = k["selected"].detach()
            _, indices, kept = self._compressed(turned.detach(), keys, keys[..., :0], piece)
        if "selected" in k:
            parts["selected"], now = self._selected(turned, k["selected"], v["selected"], indices, piece)
            kept |= now
        if "window" in k:
            parts["window"], now = self._window(turned, k["window"], v["window"], piece)
            kept |= now
        return self.out(rearrange(self._sum(x, parts), "b t h k -> b t (h k)")), kept

    def _by_branch(self, x: Tensor) -> dict[str, Tensor]:
        """[B, T, branches * G * K] as [B, T, G, K] each."""
        split = rearrange(x, "b t (c g k) -> c b t g k", c=len(self.branches), g=self.n_kv_heads)
        return dict(zip(self.branches, split.unbind(0), strict=True))

    def _compressed(
        self, q: Tensor, k: Tensor, v: Tensor, piece: _Piece
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The branch's output, the blocks that it selects, and what is kept of it."""
        past, places = piece.past, piece.real_places
        ends = Ends(self.compress_block, self.compress_stride, q.shape[1], past, places)
        tail_k, tail_v = (None, None) if past is None else (past["tail.k"], past["tail.v"])
        keys, values = self.compress_k(ends.blocks(tail_k, k)), self.compress_v(ends.blocks(tail_v, v))
        kept: dict[str, Tensor] = {}
        if past is not None:
            seen, now = ends.keep(past, keys, values)
            keys, values = seen.k.to(q.dtype), seen.v.to(q.dtype)
            count = None if piece.documents is None else (piece.documents > 0).sum(1)
            tails = {"k": ends.tail(tail_k, k, count), "v": ends.tail(tail_v, v, count)}
            kept = _named("compressed", now) | _named("tail", tails)
        # No more than there are: a larger number would only fill memory.
        blocks = max(1, -(-(piece.offset + q.shape[1]) // self.select_block))
        y, indices = compressed_attention(
            q,
            keys,
            values,
            block=self.compress_block,
            stride=self.compress_stride,
            n_selected=min(self.n_selected, blocks) if "selected" in self.branches else 0,
            select_block=self.select_block,
            starts=ends.starts,
            positions=places,
            offset=piece.offset,
        )
        return y, indices, kept

    def _selected(
        self, q: Tensor, k: Tensor, v: Tensor, indices: Tensor, piece: _Piece
    ) -> tuple[Tensor, dict[str, Tensor]]:
        kept: dict[str, Tensor] = {}
        if piece.past is not None:
            seen, now = cache.growing(piece.past.part("selected"), k, v, piece.documents)
            k, v = seen.k.to(q.dtype), seen.v.to(q.dtype)
            kept = _named("selected", {"k": now["k"], "v": now["v"]})
        y = selected_attention(
            q,
            k,
            v,
            indices,
            block=self.select_block,
            starts=piece.starts,
            positions=piece.real_places,
            offset=piece.offset,
        )
        return y, kept

    def _window(self, q: Tensor, k: Tensor, v: Tensor, piece: _Piece) -> tuple[Tensor, dict[str, Tensor]]:
        ids = piece.documents
        if piece.past is None:
            return attention(q, k, v, window=self.window, q_documents=ids, k_documents=ids), {}
        seen, now = cache.ring(piece.past.part("window"), k, v, ids, self.window)
        y = attention(q, seen.k.to(q.dtype), seen.v.to(q.dtype), **seen.mask(self.window, ids))
        return y, _named("window", now)

    def _sum(self, x: Tensor, parts: dict[str, Tensor]) -> Tensor:
        """Of the branches under their gates: equation 5."""
        if self.gate is None:
            return parts[self.branches[0]]
        gates = rearrange(self.gate(x).sigmoid(), "b t (c h) -> c b t h 1", h=self.n_heads)
        y = gates[0] * parts[self.branches[0]]
        for gate, name in zip(gates[1:], self.branches[1:], strict=True):
            # In place: fresh memory for every sum takes longer than the sum.
            y.addcmul_(gate, parts[name])
        return y


@dataclass(frozen=True)
class _Piece:
    """Where the tokens of a call stand.

    Attributes:
        places: [1 or B, T] of each token in its document.
        real_places: the same with -1 at pads; None where nothing was packed.
        starts: [B, T] the slot of the first key of each token's document; None likewise.
        offset: tokens before; where rows differ, of the longest.
    """

    past: State | None
    documents: Tensor | None
    places: Tensor
    real_places: Tensor | None
    starts: Tensor | None
    offset: int

    @classmethod
    def of(cls, x: Tensor, past: State | None, documents: Tensor | None) -> _Piece:
        places, offset = positions(documents, past, x.shape[1], x.device), 0 if past is None else past.length
        if documents is None:
            return cls(past, None, places, None, None, offset)
        slots = torch.arange(x.shape[1], device=x.device)[None]
        if past is not None:
            slots = slots + past["filled"][:, None]
        return cls(past, documents, places, places.masked_fill(documents == 0, -1), slots - places, offset)


def _chosen(branches: Sequence[str]) -> tuple[str, ...]:
    """The branches in their order."""
    if not branches or len(set(branches)) < len(branches) or not set(branches) <= set(BRANCHES):
        raise ValueError(f"branches={list(branches)} must be one or more of {', '.join(BRANCHES)}, each once")
    return tuple(name for name in BRANCHES if name in branches)


def _shrunk(sizes: dict[str, int], shrink: int) -> dict[str, int]:
    """All sizes divided; multiples of each other stay that."""
    if shrink < 1:
        raise ValueError(f"shrink={shrink} must be at least 1")
    for name, size in sizes.items():
        if size % shrink:
            raise ValueError(f"{name}={size} must be a multiple of shrink={shrink}")
    return {name: size // shrink for name, size in sizes.items()}


def _check(
    head_dim: int, n_selected: int, compress_block: int, compress_stride: int, select_block: int, window: int
) -> None:
    for name, value in (
        ("head_dim", head_dim),
        ("n_selected", n_selected),
        ("compress_block", compress_block),
        ("compress_stride", compress_stride),
        ("select_block", select_block),
        ("window", window),
    ):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    for name, value in (("compress_block", compress_block), ("select_block", select_block)):
        if value % compress_stride:
            raise ValueError(f"{name}={value} must be a multiple of compress_stride={compress_stride}")


def _named(part: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a part under its dotted names."""
    return {f"{part}.{name}": t for name, t in tensors.items()}
