"""The counting mode: floating-point operations of a forward pass, counted without running it.

Convention: 2 FLOPs a multiply-add. A public op of `kernels` records the formula of its *algorithm*, whatever backend
would run, returns empty tensors and counts nothing inside; everything else is counted by its matrix products and
convolutions (elementwise work is not). Meant for the meta device.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from types import CodeType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

_active: list[FlopCounter] = []

# Namespaces of torch's own operators: whatever has no formula there is elementwise, a view or a copy.
_OWN = {"aten", "prim", "prims", "inductor", "profiler"}
_FUSED_ATTENTION = ("scaled_dot_product", "flash_attention", "efficient_attention")
# Matrix products, and where among their arguments the two matrices stand.
_PRODUCTS = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1}


@dataclass(frozen=True)
class Formula:
    """FLOPs of one call as they are written down: what `explain=true` prints is what is evaluated.

    Attributes:
        text: whole numbers and names with + and *, such as "2 * B*H*(K+V) * visible_pairs".
        sizes: (name, value) of every name in it.
    """

    text: str
    sizes: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, text: str, **sizes: int) -> Formula:
        """The formula with the values of its names."""
        return cls(text, tuple(sizes.items()))

    @property
    def value(self) -> int:
        """FLOPs."""
        return int(eval(_compiled(self.text), {"__builtins__": {}}, dict(self.sizes)))

    def __str__(self) -> str:
        """2 * B*H*(K+V) * visible pairs = 2 * 1*4*(16+16) * 2,080 = 532,480."""
        sizes = dict(self.sizes)
        filled = re.sub(r"[A-Za-z_]\w*", lambda name: f"{sizes[name[0]]:,}", self.text)
        return " = ".join(dict.fromkeys([self.text.replace("_", " "), filled, f"{self.value:,}"]))


class FlopCounter(TorchDispatchMode):
    """Context manager that counts.

    Attributes:
        calls: how often each (op, formula) was met; ops are named "attention", "aten.mm", ...
        attention_bytes: least traffic with device memory of our attention: q, k and v read once, the output written.
        score_bytes: the score matrices that a fused kernel never writes.
        dense: True when attention was met outside of our ops: its masked pairs are counted as if they were visible.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[str, Formula]] = Counter()
        self.attention_bytes = 0
        self.score_bytes = 0
        self.dense = False

    def __enter__(self) -> FlopCounter:
        _active.append(self)
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        _active.remove(self)
        super().__exit__(*error)

    @property
    def flops(self) -> Counter[str]:
        """FLOPs by name of the op."""
        by_name: Counter[str] = Counter()
        for (op, formula), times in self.calls.items():
            by_name[op] += times * formula.value
        return by_name

    @property
    def total(self) -> int:
        """FLOPs counted so far."""
        return sum(self.flops.values())

    def record(self, op: str, flops: Formula | int) -> None:
        """Add one call of an op."""
        self.calls[op, flops if isinstance(flops, Formula) else Formula(f"{flops}", ())] += 1

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
            self.record(str(packet), _all_pairs(*args[:3]))
        elif packet.__name__ in _PRODUCTS and func.namespace == "aten":
            self.record(str(packet), _product(*args[_PRODUCTS[packet.__name__] :][:2]))
        elif packet in flop_registry:
            self.record(str(packet), int(flop_registry[packet](*args, **kwargs, out_val=result)))
        elif func.namespace not in _OWN:
            raise ValueError(
                f"the custom operator {packet} has no FLOP formula: register one with "
                "torch.utils.flop_counter.register_flop_formula"
            )
        self.dense |= fused or _over_pairs(name, result)
        return result


@cache
def _compiled(text: str) -> CodeType:
    return compile(text, "<formula>", "eval")


def _product(a: torch.Tensor, b: torch.Tensor) -> Formula:
    """A matrix product, or a batch of them."""
    *batch, rows, inner = a.shape
    sizes = dict(rows=rows, inner=inner, columns=b.shape[-1])
    if batch:
        return Formula.of("2 * batch*rows*inner*columns", batch=batch[0], **sizes)
    return Formula.of("2 * rows*inner*columns", **sizes)


def _all_pairs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Formula:
    """Torch's own fused attention over [B, H, T, K], masked pairs included: its CPU form has no formula in torch."""
    sizes = dict(B=q.shape[:-3].numel(), H=q.shape[-3], T=q.shape[-2], S=k.shape[-2], K=q.shape[-1], V=v.shape[-1])
    return Formula.of("2 * B*H*(K+V) * T*S", **sizes)


def _over_pairs(name: str, result: Any) -> bool:
    """Is this a softmax over keys, that is of a [.., T, S] score matrix with T > 1?"""
    return "softmax" in name and isinstance(result, torch.Tensor) and result.dim() >= 3 and result.shape[-2] > 1


def counter() -> FlopCounter | None:
    """The innermost counter that is on, if any."""
    return _active[-1] if _active else None
