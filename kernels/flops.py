"""The counting mode: floating-point operations of a forward pass, counted without running it.

Convention: 2 FLOPs a multiply-add. A public op of `kernels` records the formula of its *algorithm*, whatever backend
would run, returns empty tensors and counts nothing inside; everything else is counted by its matrix products and
convolutions (elementwise work is not). Meant for the meta device.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

_active: list[FlopCounter] = []

# Namespaces of torch's own operators: whatever has no formula there is elementwise, a view or a copy.
_OWN = {"aten", "prim", "prims", "inductor", "profiler"}
_FUSED_ATTENTION = ("scaled_dot_product", "flash_attention", "efficient_attention")


class FlopCounter(TorchDispatchMode):
    """Context manager that counts.

    Attributes:
        flops: FLOPs by name of the op ("attention", "aten.mm", ...).
        dense: True when attention was met outside of our ops: its masked pairs are counted as if they were visible.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops: Counter[str] = Counter()
        self.dense = False

    def __enter__(self) -> FlopCounter:
        _active.append(self)
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        _active.remove(self)
        super().__exit__(*error)

    @property
    def total(self) -> int:
        """FLOPs counted so far."""
        return sum(self.flops.values())

    def record(self, op: str, flops: int) -> None:
        """Add the formula's value for one call of a public op."""
        self.flops[op] += flops

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func._overloadpacket
        if packet not in flop_registry and func.has_kernel_for_dispatch_key(
            torch._C.DispatchKey.CompositeImplicitAutograd
        ):
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        result = func(*args, **kwargs)
        name = func.__name__
        fused = any(part in name for part in _FUSED_ATTENTION)
        if fused:
            self.flops[str(packet)] += _all_pairs(*args[:3])
        elif packet in flop_registry:
            self.flops[str(packet)] += int(flop_registry[packet](*args, **kwargs, out_val=result))
        elif func.namespace not in _OWN:
            raise ValueError(
                f"the custom operator {packet} has no FLOP formula: register one with "
                "torch.utils.flop_counter.register_flop_formula"
            )
        self.dense |= fused or _over_pairs(name, result)
        return result


def _all_pairs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> int:
    """Torch's own fused attention over [B, H, T, K], masked pairs included: its CPU form has no formula in torch."""
    return 2 * q.shape[:-1].numel() * k.shape[-2] * (q.shape[-1] + v.shape[-1])


def _over_pairs(name: str, result: Any) -> bool:
    """Is this a softmax over keys, that is of a [.., T, S] score matrix with T > 1?"""
    return "softmax" in name and isinstance(result, torch.Tensor) and result.dim() >= 3 and result.shape[-2] > 1


def counter() -> FlopCounter | None:
    """The innermost counter that is on, if any."""
    return _active[-1] if _active else None
