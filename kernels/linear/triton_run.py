"""From tensors to launches, forward and backward; see `triton_forward` for what each launch computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels.linear import triton_tiles as tiling
from kernels.linear.frame import Ids
from kernels.linear.triton_backward import decay_kernel
from kernels.linear.triton_forward import product_kernel, states_kernel
from kernels.triton_launch import dot_precision, empty, launch


@dataclass(frozen=True)
class Call:
    """One causal sum, ready for the kernels: inputs with any strides but the last."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    ids: Tensor | None
    strict: bool

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, ids: Ids | None, strict: bool) -> Call:
        """From the arguments of the operator."""
        q, k, v = (_readable(t) for t in (q, k, v))
        decay = None if log_decay is None else log_decay.to(torch.float32).expand(v.shape[:3])
        # The state's document in front of the tokens'.
        documents = None if ids is None else torch.cat([ids.before[:, None], ids.row], 1).to(torch.int32)
        return cls(q, k, v, decay, documents, strict)

    @property
    def share(self) -> int:
        """Heads of a group."""
        return self.v.shape[2] // self.q.shape[2]

    @property
    def rows(self) -> int:
        """Groups of the batch."""
        return self.q.shape[0] * self.q.shape[2]

    @property
    def chunks(self) -> int:
        """Chunks of a row."""
        return -(-self.q.shape[1] // tiling.CHUNK)

    @property
    def decay_strides(self) -> tuple[int, ...]:
        """Zeros where there is no decay."""
        return (0, 0, 0) if self.log_decay is None else self.log_decay.stride()

    def states(self, a: Tensor, b: Tensor, initial: Tensor, reverse: bool) -> tuple[Tensor, Tensor]:
        """States [n, B G, K, r, V] before each chunk, in the order of time or its reverse; [B, H, K, V] after all."""
        batch, time, heads, value_dim = b.shape
        key_dim, initial = a.shape[3], initial.contiguous()
        states = empty(initial, self.chunks, self.rows, key_dim, self.share, value_dim)
        final, tiles = empty(initial, *initial.shape), tiling.states_tiles(self.wide)
        block_a, block_b = tiling.block(tiles, key_dim), tiling.block(tiles, value_dim)
        launch(
            states_kernel, batch * heads * -(-key_dim // block_a) * -(-value_dim // block_b), a, b, self.log_decay,
            self.ids, initial, states, final, *a.stride()[:3], *b.stride()[:3], *self.decay_strides, time, heads,
            self.share, self.rows, REVERSE=reverse, A_WIDTH=key_dim, B_WIDTH=value_dim, CHUNK=tiling.CHUNK,
            BLOCK_A=block_a, BLOCK_B=block_b, PRECISION=self.precision, warps=tiles.warps, stages=tiles.stages,
        )  # fmt: skip
        return states, final

    def product(self, a: Tensor, b: Tensor, c: Tensor, x: Tensor, out: Tensor, reverse: bool) -> Tensor:
        """Fills `out` [B, T, H or G, .]; x are states, whose K stands inside or outside as it fits a."""
        batch, time, heads, outer = out.shape
        total, inner, share = self.v.shape[2], a.shape[3], self.share
        key_inside = a is self.q or a is self.k
        strides = (x.stride(2), 1) if key_inside else (1, x.stride(2))
        tiles = tiling.product_tiles(self.wide)
        block_i, block_o = tiling.block(tiles, inner, 32), tiling.block(tiles, outer)
        launch(
            product_kernel, batch * heads * self.chunks * -(-outer // block_o), a, b, c, x, self.log_decay, self.ids,
            out, *a.stride()[:3], *b.stride()[:3], *c.stride()[:3], x.stride(3), *strides, *self.decay_strides, time,
            total, self.rows, total // heads, share, *(total // t.shape[2] for t in (a, b, c)),
            STRICT=self.strict, REVERSE=reverse, INNER=inner, OUTER=outer, CHUNK=tiling.CHUNK, BLOCK_I=block_i,
            BLOCK_O=block_o, PRECISION=self.precision, warps=tiles.warps, stages=tiles.stages,
        )  # fmt: skip
        return out

    def decay_gradient(self, states: Tensor, later: Tensor, dy: Tensor) -> Tensor:
        """[B, T, H]"""
        assert self.log_decay is not None
        batch, time, heads = self.v.shape[:3]
        found, tiles = empty(states, batch, time, heads), tiling.decay_tiles(self.wide)
        key_dim, value_dim = self.q.shape[3], self.v.shape[3]
        launch(
            decay_kernel, batch * heads * self.chunks, self.q, self.k, self.v, dy, states, later, self.log_decay,
            self.ids, found, *self.q.stride()[:3], *self.k.stride()[:3], *self.v.stride()[:3], *dy.stride()[:3],
            *self.decay_strides, time, heads, self.share, self.rows, K_WIDTH=key_dim, V_WIDTH=value_dim,
            CHUNK=tiling.CHUNK, BLOCK_K=tiling.block(tiles, key_dim), BLOCK_V=tiling.block(tiles, value_dim),
            PRECISION=self.precision, warps=tiles.warps, stages=tiles.stages,
        )  # fmt: skip
        return found

    @property
    def wide(self) -> bool:
        """Is everything fp32?"""
        return self.q.dtype == self.v.dtype == torch.float32

    @property
    def precision(self) -> str:
        """Of fp32 products: one of TF32 has the digits of half precision inputs."""
        exact = dot_precision(self.q.new_empty(0, dtype=torch.float32))
        return exact if self.wide or exact == "ieee" else "tf32"


def _readable(t: Tensor) -> Tensor:
    """Kernels want the channels of a head beside each other; the other strides are free."""
    return t if t.stride(-1) == 1 else t.contiguous()


def forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, state: Tensor, ids: Ids | None, strict: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """See `operators.Forward`."""
    call = Call.of(q, k, v, log_decay, ids, strict)
    states, final = call.states(call.k, call.v, state, reverse=False)
    y = call.product(call.q, call.k, call.v, states, empty(state, *v.shape), reverse=False)
    return y, final, states


def backward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, states: Tensor, ids: Ids | None, strict: bool,
    dy: Tensor, dstate: Tensor, decay: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:  # fmt: skip
    """See `operators.Backward`."""
    call, dy = Call.of(q, k, v, log_decay, ids, strict), _readable(dy)
    q, k, v = call.q, call.k, call.v
    later, dinitial = call.states(q, dy, dstate, reverse=True)
    dq = call.product(dy, v, k, states, empty(q, *q.shape), reverse=False)
    dk = call.product(v, dy, q, later, empty(k, *k.shape), reverse=True)
    dv = call.product(k, q, dy, later, empty(v, *v.shape), reverse=True)
    found = None
    if decay and log_decay is not None:
        found = call.decay_gradient(states, later, dy).sum_to_size(log_decay.shape).to(log_decay.dtype)
    return dq, dk, dv, found, dinitial


def examples() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Calls whose kernels `kernels.triton_aot` compiles."""
    for kind, width in ((torch.bfloat16, 64), (torch.bfloat16, 128), (torch.float32, 64)):
        yield _label(kind, width, "gates"), partial(_example, kind, width, decay=True)
    half = torch.bfloat16
    yield _label(half, 64, "normaliser"), partial(_example, half, 64, value_dim=1)
    yield _label(half, 64, "documents"), partial(_example, half, 64, decay=True, ids=True)
    yield _label(half, 128, "ssd"), partial(_example, half, 128, value_dim=64, decay=True, groups=1)


def _label(kind: torch.dtype, width: int, what: str) -> str:
    return f"linear, {str(kind).removeprefix('torch.')}, K {width}, {what}"


def _example(
    kind: torch.dtype, width: int, *, value_dim: int | None = None, decay: bool = False, ids: bool = False,
    groups: int = 8,
) -> None:  # fmt: skip
    """A layer of 8 heads; values of a group are dt x, which is fp32."""
    q = torch.empty(2, 4096, groups, width, dtype=kind, device="meta")
    v = q.new_empty(2, 4096, 8, value_dim or width, dtype=kind if groups == 8 else torch.float32)
    state = v.new_empty(2, 8, width, v.shape[3], dtype=torch.float32)
    log_decay = state.new_empty(2, 4096, 8) if decay else None
    documents = Ids(q.new_empty(2, 4096, dtype=torch.int32), q.new_empty(2, dtype=torch.int32)) if ids else None
    y, _, states = forward(q, q, v, log_decay, state, documents, False)
    backward(q, q, v, log_decay, states, documents, False, y, state, decay)
