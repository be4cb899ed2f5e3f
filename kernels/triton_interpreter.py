"""bfloat16 made right in Triton's interpreter (TRITON_INTERPRET=1), which runs kernels on a CPU in numpy.

numpy has no bfloat16: the interpreter keeps its bit patterns as integers, multiplies and adds those (seen in triton
3.6 and 3.9: errors of 1e9) and rounds towards zero. Here every bfloat16 operand is widened to float32 first, and
results are rounded to nearest even. And every call of a device function replaces triton.language's functions anew:
once a launch is enough, and twice as fast. Only the interpreter is touched, nothing where kernels are compiled.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def mend() -> None:
    """Put the right arithmetic in place, once a process."""
    if InterpreterBuilder.cast_impl is not _cast:
        InterpreterBuilder.cast_impl = _cast
        InterpreterBuilder.create_fp_to_fp = _convert
        InterpreterBuilder.create_dot = _dot
        InterpreterBuilder.binary_op = _binary
        InterpreterBuilder.unary_op = _unary
        interpreter._patch_lang = _Language


_raw_cast, _raw_convert = InterpreterBuilder.cast_impl, InterpreterBuilder.create_fp_to_fp
_raw_dot, _raw_binary, _raw_unary = (
    InterpreterBuilder.create_dot,
    InterpreterBuilder.binary_op,
    InterpreterBuilder.unary_op,
)


class _Language:
    """The interpreter's functions in place of those of the language modules that a function sees, once a launch."""

    replace = staticmethod(interpreter._patch_lang)
    done: ClassVar[set[frozenset[int]]] = set()

    def __init__(self, function: Any) -> None:
        modules = (value for value in function.__globals__.values() if isinstance(value, ModuleType))
        seen = frozenset(id(module) for module in modules if module in (tl, tl.core))
        self.scope = None if seen in self.done else self.replace(function)
        self.done.add(seen)

    def restore(self) -> None:
        """The end of a launch."""
        self.done.clear()
        if self.scope is not None:
            self.scope.restore()


def _narrow(handle: Any) -> bool:
    return handle.dtype.scalar == tl.bfloat16


def _widened(handle: Any) -> Any:
    """The same numbers in float32."""
    if not _narrow(handle):
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << np.uint32(16)).view(np.float32), tl.float32)


def _rounded(data: Any) -> Any:
    """Numbers to bfloat16, to nearest even; a NaN stays one."""
    data = np.asarray(data, dtype=np.float32)
    bits = np.ascontiguousarray(data).view(np.uint32)
    bits = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    return TensorHandle(np.where(np.isnan(data), np.uint16(0x7FC0), bits).reshape(data.shape), tl.bfloat16)


def _cast(self: Any, handle: Any, kind: Any) -> Any:
    if _narrow(handle) == (kind.scalar == tl.bfloat16):
        return _raw_cast(self, handle, kind)
    if _narrow(handle):
        return _raw_cast(self, _widened(handle), kind)
    return _rounded(handle.data)


def _convert(self: Any, handle: Any, kind: Any, rounding: Any) -> Any:
    half = {handle.dtype.scalar, kind.scalar} <= {tl.bfloat16, tl.float16, tl.float32}
    return _cast(self, handle, kind) if half else _raw_convert(self, handle, kind, rounding)


def _dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
    return _raw_dot(self, _widened(a), _widened(b), *rest)


def _binary(self: Any, a: Any, b: Any, op: Any) -> Any:
    if not _narrow(a):
        return _raw_binary(self, a, b, op)
    result = _raw_binary(self, _widened(a), _widened(b), op)
    return result if result.data.dtype == np.bool_ else _rounded(result.data)


def _unary(self: Any, a: Any, op: Any) -> Any:
    return _rounded(_raw_unary(self, _widened(a), op).data) if _narrow(a) else _raw_unary(self, a, op)
