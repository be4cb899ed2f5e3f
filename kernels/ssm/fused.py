"""mamba-ssm's fused CUDA kernels behind our ops: the one file that imports that package, when it runs.

Written against the documented signatures of mamba-ssm 2; see docs/mamba.md for what it was and was not run on.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Tokens a chunk of mamba-ssm's Mamba-2: its own default.
CHUNK = 256
MAX_STATES = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def scan_refusal(x: Tensor, states: int, begun: bool, documents: Tensor | None, wanted: bool) -> str | None:
    """What of a selective scan mamba-ssm does not have; None: nothing.

    Args:
        states: N.
        begun: is there a state before the first token?
        wanted: is the state after the last token wanted?
    """
    if begun and (x.shape[1] != 1 or torch.is_grad_enabled()):
        return "its scan starts from a state of zero, but for one token without gradients"
    if wanted and torch.is_grad_enabled():
        return "its scan has no gradient through the state after the last token"
    if states > MAX_STATES:
        return f"N={states} must be at most {MAX_STATES}"
    return _refusal(x, documents)


def ssd_refusal(x: Tensor, documents: Tensor | None) -> str | None:
    """What of a call of `ssd` mamba-ssm does not have; None: nothing."""
    if x.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest":
        return "it rounds products of float32 to TF32, which torch.set_float32_matmul_precision('high') would allow"
    return _refusal(x, documents)


def _refusal(x: Tensor, documents: Tensor | None) -> str | None:
    if documents is not None:
        return "its kernels know neither documents nor padding"
    if x.dtype not in DTYPES:
        return f"dtype {x.dtype} must be one of {', '.join(map(str, DTYPES))}"
    return None if x.numel() else "there are no tokens"


def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    state: Tensor,
    fresh: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """As `scan_reference.selective_scan`, where `scan_refusal` has nothing to say; all in fp32, as steps must be."""
    if x.shape[1] == 1 and not torch.is_grad_enabled():
        return _one_token(x, dt, a, b, c, d, state)
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    # Time last, as its kernels want it.
    x_last, dt_last, b_last, c_last = (t.float().transpose(1, 2).contiguous() for t in (x, dt, b, c))
    y, last = selective_scan_fn(x_last, dt_last, a, b_last, c_last, d, return_last_state=True)
    return y.transpose(1, 2).to(x.dtype), last


def _one_token(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    from mamba_ssm.ops.triton.selective_state_update import selective_state_update

    state = state.clone()  # written in place
    y = selective_state_update(state, x[:, 0].float(), dt[:, 0], a, b[:, 0].float(), c[:, 0].float(), d)
    return y[:, None].to(x.dtype), state


def ssd(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    state: Tensor,
    documents: Tensor | None,
    document: Tensor | None,
    alone: bool,
) -> tuple[Tensor, Tensor]:
    """As `ssd_reference.ssd`, where `ssd_refusal` has nothing to say."""
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    initial = None if alone else state.contiguous()
    return mamba_chunk_scan_combined(x, dt, a, b, c, CHUNK, initial_states=initial, return_final_states=True)
