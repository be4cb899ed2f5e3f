"""What `weak` and `strong` share: rows and a few chunks of them, and what their tokens see.

n chunks of C tokens; batch B, G groups, P = B G; H heads, r = H / G of a group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor

from kernels.linear.frame import Ids


@dataclass(frozen=True)
class Place:
    """Where a few chunks stand in rows: `at`, counted in chunks of `size` tokens; there are G groups of heads."""

    size: int
    at: slice
    groups: int

    def keys(self, x: Tensor) -> Tensor:
        """A view [n, B, G, C, K] of [B, T, G, K]."""
        return x.view(x.shape[0], x.shape[1] // self.size, self.size, *x.shape[2:]).permute(1, 0, 3, 2, 4)[self.at]

    def values(self, x: Tensor) -> Tensor:
        """A view [n, B, G, C, r, V] of [B, T, H, V], or without V."""
        (batch, time, heads), size = x.shape[:3], self.size
        view = x.view(batch, time // size, size, self.groups, heads // self.groups, *x.shape[3:])
        return view.permute(1, 0, 3, 2, 4, *range(5, view.dim()))[self.at]


@dataclass(frozen=True)
class Rows:
    """Inputs of whole rows, or of a few chunks as views of these; or their gradients.

    Attributes:
        q, k: [B, T, G, K]; of chunks [n, B, G, C, K].
        v: [B, T, H, V]; of chunks [n, B, G, C, r, V].
        gain: [B, T, H] of v; of chunks [n, B, G, C, r].
        steps: as gain, the gradient of log-decays, where it is wanted.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    gain: Tensor | None = None
    steps: Tensor | None = None

    def of(self, place: Place) -> Rows:
        """Of some chunks."""
        more = (None if x is None else place.values(x) for x in (self.gain, self.steps))
        return Rows(place.keys(self.q), place.keys(self.k), place.values(self.v), *more)


@dataclass(frozen=True)
class Seen:
    """Who sees whom of the tokens before; None where everybody does.

    Attributes:
        strict: a token does not see itself.
        same: [n, P, C (i), C (j)] 1 where both are of one document.
        starts: [n, P, C, 1] 1 where a token is of that of the state before the chunk.
        ends: [n, P, C, 1] 1 where it is of that of the state after.
        kept: [n, P, 1, 1] 1 where both states are of one.
    """

    strict: bool
    same: Tensor | None = None
    starts: Tensor | None = None
    ends: Tensor | None = None
    kept: Tensor | None = None

    @classmethod
    def of(cls, strict: bool, ids: Ids | None, place: Place, kind: torch.dtype) -> Seen:
        """A state belongs to one document."""
        if ids is None:
            return cls(strict)
        every = rearrange(ids.row, "b (n c) -> n b c", c=place.size)
        before = torch.cat([ids.before[None], every[:-1, :, -1]])[place.at].repeat_interleave(place.groups, 1)
        own = every[place.at].repeat_interleave(place.groups, 1)
        last = own[..., -1]
        same = (own[..., :, None] == own[..., None, :]).to(kind)
        starts, ends = ((own == id[..., None])[..., None].to(kind) for id in (before, last))
        return cls(strict, same, starts, ends, (before == last)[..., None, None].to(kind))

    def hide_(self, x: Tensor, strict: bool = False) -> Tensor:
        """0 where token i does not see j, in place; x [n, P, r, C, C], or with fewer dimensions before the last two."""
        x.tril_(-1 if self.strict or strict else 0)
        if self.same is not None:
            x.view(*self.same.shape[:2], -1, *x.shape[-2:]).mul_(self.same[:, :, None])
        return x


def load(x: Tensor, kind: torch.dtype, factor: Tensor | None = None) -> Tensor:
    """[n, B, G, ...], contiguous, of the dtype to compute in, times a factor [n, P, ...]; x itself where it is so."""
    if factor is None:
        return x.to(kind).contiguous()
    return torch.mul(x, factor.unflatten(1, x.shape[1:3]), out=x.new_empty(x.shape, dtype=kind))


def store(x: Tensor, view: Tensor, factor: Tensor | None = None) -> None:
    """The way back; x may have its dimensions otherwise."""
    x = x.reshape(view.shape)
    if factor is None:
        view.copy_(x)
    else:
        torch.mul(x, factor.unflatten(1, view.shape[1:3]), out=view)


def gain(rows: Rows, kind: torch.dtype) -> Tensor | None:
    """That of some chunks [n, P, C, r, 1]."""
    return None if rows.gain is None else rows.gain.flatten(1, 2).to(kind)[..., None]


def scaled(x: Tensor, factor: Tensor | None) -> Tensor:
    """x times the factor, where there is one."""
    return x if factor is None else x * factor


def product(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    """x times y; None is 1."""
    return y if x is None else scaled(x, y)
