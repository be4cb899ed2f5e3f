"""Linear attention in chunks: dense products inside a chunk, one state a chunk between them.

Shapes here: P = batch x groups, n chunks of C tokens, r heads a group. The decay is masked before it is exponentiated,
so that nothing overflows.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from einops import rearrange, repeat
from torch import Tensor
from torch.nn.functional import pad

from kernels.linear import reference
from kernels.linear.frame import Ids, attend

CHUNK = 64


def linear_attention(q: Tensor, k: Tensor, v: Tensor, *, alone: bool = False, **options: Any) -> tuple:
    """As `reference.linear_attention`; for a single token the recurrence itself."""
    if q.shape[1] == 1 and options["causal"]:
        return reference.linear_attention(q, k, v, **options)
    return attend(partial(causal_sum, alone=alone), q, k, v, **options)


def causal_sum(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    state: Tensor,
    ids: Ids | None,
    strict: bool = False,
    alone: bool = False,
) -> tuple[Tensor, Tensor]:
    """Sum over the visible past, y [B, T, H, V] and the state [B, H, K, V] after the last token, both of state's dtype.

    Args:
        log_decay: [H] or [B, T, H], 0 at pads.
        strict: a token does not see itself.
        alone: the state before is zero and the one after is not wanted.
    """
    batch, time, groups, _ = q.shape
    if 0 in q.shape:
        return v.new_zeros(v.shape, dtype=state.dtype), state
    size = min(CHUNK, time)
    q, k, v = (_fill(x.to(state.dtype), size) for x in (q, k, v))
    q, k = (rearrange(x, "b (n c) g k -> (b g) n c k", c=size) for x in (q, k))
    v = rearrange(v, "b (n c) (g r) v -> (b g) n c r v", c=size, g=groups)
    steps = None if log_decay is None else _steps(log_decay.to(state.dtype), batch, time, size, groups)
    chunk_ids = None if ids is None else _chunks_of(ids, size, groups)

    y = _inside(q, k, v, steps, None if chunk_ids is None else chunk_ids[0], strict)
    if not (alone and q.shape[1] == 1):
        state = rearrange(state, "b (g r) k v -> (b g) k r v", g=groups)
        behind, state = _behind(q, k, v, steps, chunk_ids, state)
        y = y + behind
        state = rearrange(state, "(b g) k r v -> b (g r) k v", b=batch)
    return rearrange(y, "(b g) n c r v -> b (n c) (g r) v", b=batch)[:, :time], state


def _inside(q: Tensor, k: Tensor, v: Tensor, steps: Tensor | None, ids: Tensor | None, strict: bool) -> Tensor:
    """What the tokens of the chunk itself give: [P, n, C, r, V]."""
    size = q.shape[2]
    seen = torch.ones(size, size, dtype=torch.bool, device=q.device).tril(-1 if strict else 0)
    if ids is not None:
        seen = seen & (ids[..., :, None] == ids[..., None, :])
    weights = q @ k.transpose(-1, -2)
    if steps is None:
        return (weights.masked_fill(~seen, 0) @ v.flatten(-2)).unflatten(-1, v.shape[-2:])
    hidden = ~seen if ids is None else ~seen[:, :, None]
    weights = weights[:, :, None] * _between(steps).masked_fill(hidden, float("-inf")).exp()
    return (weights @ v.transpose(2, 3)).transpose(2, 3)


def _behind(
    q: Tensor, k: Tensor, v: Tensor, steps: Tensor | None, ids: tuple[Tensor, Tensor, Tensor] | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """What the chunks before give [P, n, C, r, V], and the state [P, K, r, V] after the last one."""
    keep = None
    if steps is not None:
        # What is left of each token at the chunk's end, and of the state before the chunk after all of it.
        v = v * _after(steps).exp().transpose(2, 3)[..., None]
        keep = steps.sum(-1).exp()
    if ids is not None:
        now, before, after = ids
        k = k.masked_fill((now != after[..., None])[..., None], 0)
        q = q.masked_fill((now != before[..., None])[..., None], 0)
        same = (before == after).to(q.dtype)[..., None]
        keep = same if keep is None else keep * same
    added = (k.transpose(-1, -2) @ v.flatten(-2)).unflatten(-1, v.shape[-2:])
    states, state = _scan(added, keep, state)
    behind = (q @ states.flatten(-2)).unflatten(-1, v.shape[-2:])
    if steps is not None:
        behind = behind * steps.cumsum(-1).exp().transpose(2, 3)[..., None]
    return behind, state


def _scan(added: Tensor, keep: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
    """States before each chunk [P, n, K, r, V] and after the last, from what each adds and keeps [P, n, r]."""
    states = [state]
    # unbind, not indexing: a slice in a loop makes the backward pass quadratic.
    chunks = added.shape[1]
    kept = [None] * chunks if keep is None else keep[:, :, None, :, None].expand(-1, chunks, -1, -1, -1).unbind(1)
    for new, share in zip(added.unbind(1), kept, strict=True):
        states.append(states[-1] + new if share is None else torch.addcmul(new, share, states[-1]))
    return torch.stack(states[:-1], 1), states[-1]


def _fill(x: Tensor, size: int) -> Tensor:
    """Zeros at the end of the time axis, up to whole chunks: they add nothing to the state."""
    return pad(x, (0, 0, 0, 0, 0, -x.shape[1] % size))


def _chunks_of(ids: Ids, size: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ids [P, n, C]; the id before and after each chunk [P, n]."""
    row = torch.cat([ids.row, ids.row[:, -1:].expand(-1, -ids.row.shape[1] % size)], 1)
    row = repeat(row, "b (n c) -> (b g) n c", c=size, g=groups)
    after = row[..., -1]
    return row, torch.cat([ids.before.repeat_interleave(groups)[:, None], after[:, :-1]], 1), after


def _steps(log_decay: Tensor, batch: int, time: int, size: int, groups: int) -> Tensor:
    """Log-decay of each token [P, n, r, C]; n is 1 where all chunks are alike.

    Bounded, because 0 x inf is no number; exp is 0 from -104 on in float32 and from -746 on in float64.
    """
    log_decay = log_decay.clamp(min=-1e4)
    if log_decay.dim() == 1 and time % size == 0:
        return repeat(log_decay, "(g r) -> (b g) 1 r c", b=batch, c=size, g=groups)
    full = pad(log_decay.expand(batch, time, -1), (0, 0, 0, -time % size))
    return rearrange(full, "b (n c) (g r) -> (b g) n r c", c=size, g=groups)


def _between(steps: Tensor) -> Tensor:
    """Log-decay from token j to token i >= j of a chunk, [.., C] -> [.., C (i), C (j)].

    Summed for each j alone: a difference of two sums from the chunk's start loses all digits behind a strong decay.
    """
    ones = torch.ones(steps.shape[-1], steps.shape[-1], dtype=steps.dtype, device=steps.device)
    return (steps[..., None, :] * ones.tril()) @ ones.tril(-1)


def _after(steps: Tensor) -> Tensor:
    """Log-decay from each token to the end of its chunk, its own left out."""
    return pad(steps[..., 1:], (0, 1)).flip(-1).cumsum(-1).flip(-1)
