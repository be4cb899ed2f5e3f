"""What every Triton kernel of this project compiles to, without a GPU: `python -m kernels.triton_aot`.

A module named triton_* that launches kernels has a function `examples()`, yielding (label, call): the call runs on
meta-device tensors, the kernels it would launch are recorded with the tile sizes of the real thing, compiled for each
architecture by the compiler that a GPU would use, and the machine code is read. Not under TRITON_INTERPRET=1.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, mangle_type

import kernels
from kernels.record import rewrite
from kernels.triton_launch import Launch, recording

# Shared memory that one block may have, bytes: CUDA C++ Programming Guide, technical specifications by capability.
SHARED_LIMIT = {80: 166_912, 86: 101_376, 90: 232_448, 100: 232_448}
# Bytes of stack that are tolerated; 0 for everything else.
SPILL_LIMIT = {"dkv_kernel": 64}
TENSOR_CORES = ("HMMA", "HGMMA", "UTCHMMA")
ASYNC_COPIES = ("LDGSTS", "UTMALDG")
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

Example = tuple[str, Callable[[], Any]]


@dataclass(frozen=True)
class Report:
    """One kernel compiled for one architecture; memory in bytes, instructions counted in the machine code."""

    kernel: str
    label: str
    architecture: int
    warps: int
    stages: int
    registers: int
    stack: int
    shared: int
    tensor_cores: int
    async_copies: int
    multiplies: bool

    def faults(self) -> list[str]:
        """What would be slow or would not run; empty when all is well."""
        limit, spill = SHARED_LIMIT[self.architecture], SPILL_LIMIT.get(self.kernel, 0)
        found = []
        if self.shared > limit:
            found.append(f"shared memory {self.shared} B is over {limit} B")
        if self.stack > spill:
            found.append(f"{self.stack} B of stack, {spill} B are tolerated: registers spill")
        if self.multiplies and not self.tensor_cores:
            found.append(f"no tensor-core instruction ({', '.join(TENSOR_CORES)})")
        if self.multiplies and self.stages > 1 and not self.async_copies:
            found.append(f"no asynchronous copy ({', '.join(ASYNC_COPIES)})")
        return found


def modules() -> list[Any]:
    """All modules of `kernels` with Triton code in them."""
    names = (m.name for m in pkgutil.walk_packages(kernels.__path__, "kernels."))
    names = (name for name in names if name.split(".")[-1].startswith("triton_") and "interpreter" not in name)
    return [importlib.import_module(name) for name in names]


def examples() -> Iterator[Example]:
    """The examples of all modules."""
    for module in modules():
        if module.__name__ != __name__ and hasattr(module, "examples"):
            yield from module.examples()


def kernel_names() -> set[str]:
    """Names of all kernels: functions for the compiler that end in _kernel (the others are parts of kernels)."""
    found = (value for module in modules() for value in vars(module).values() if isinstance(value, JITFunction))
    return {f.__name__ for f in found if f.__name__.endswith("_kernel")}


def launches(chosen: Iterable[Example], each: int | None = None) -> Iterator[tuple[str, Launch]]:
    """(label, launch), each compilation once, and of each kernel the first `each`."""
    seen: set[tuple[Any, ...]] = set()
    many: Counter[str] = Counter()
    for label, call in chosen:
        with recording() as records:
            call()
        for launch in records:
            key = (launch.kernel.__name__, launch.warps, launch.stages, repr(_specialised(launch)))
            if key not in seen and (each is None or many[key[0]] < each):
                seen.add(key)
                many[key[0]] += 1
                yield label, launch


def _specialised(launch: Launch) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int], Any]]:
    """Signature, constants and attributes, as Triton's own launcher would derive them from the arguments."""
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        whole = isinstance(value, int) and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (whole and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        signature[parameter.name] = mangle_type(value)
        if isinstance(value, Tensor) or (whole and value % 16 == 0):
            attributes[(i,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def compiled(launch: Launch, architecture: int, label: str) -> Report:
    """Compile for a compute capability (80: 8.0) and read the machine code."""
    signature, constants, attributes = _specialised(launch)
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = dict(num_warps=launch.warps, num_stages=launch.stages)
    binary = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage = _read("cuobjdump", "-res-usage", file.name)
        code = _read("nvdisasm", "-c", file.name)
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())  # type: ignore[union-attr]

    def count(names: tuple[str, ...]) -> int:
        return len(re.findall(rf"\b(?:{'|'.join(names)})\b", code))

    return Report(
        kernel=launch.kernel.__name__,
        label=label,
        architecture=architecture,
        warps=launch.warps,
        stages=launch.stages,
        registers=registers,
        stack=stack,
        shared=binary.metadata.shared,
        tensor_cores=count(TENSOR_CORES),
        async_copies=count(ASYNC_COPIES),
        multiplies="tt.dot" in binary.asm["ttir"],
    )


def _read(tool: str, *arguments: str) -> str:
    done = subprocess.run([_TOOLS / tool, *arguments], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


HEAD = "| kernel | example | sm | warps | stages | registers | stack B | shared B | tensor-core | async copies |"


def row(r: Report) -> str:
    """A line of the table."""
    name, sizes = r.kernel.removesuffix("_kernel"), (r.architecture, r.warps, r.stages, r.registers, r.stack, r.shared)
    return f"| {name} | {r.label} | {' | '.join(map(str, (*sizes, r.tensor_cores, r.async_copies)))} |"


def main(arguments: list[str] | None = None) -> int:
    """Print the table; the exit status is 1 when a kernel has a fault."""
    parser = argparse.ArgumentParser(description="Compile every Triton kernel for GPUs that need not be there.")
    parser.add_argument("--sm", type=int, nargs="+", default=[80, 90], choices=sorted(SHARED_LIMIT))
    parser.add_argument("--only", default="", help="examples whose label holds this")
    parser.add_argument("--each", type=int, help="of every kernel only the first so many (default: all)")
    parser.add_argument("--write", action="store_true", help="put the table into docs/kernels_gpu.md")
    given = parser.parse_args(arguments)
    rows = [f"Compiled by triton {triton.__version__}.", "", HEAD, re.sub(r"[^|]+", "---", HEAD)]
    faults, seen = [], set()
    print(*rows, sep="\n")
    for label, launch in launches((e for e in examples() if given.only in e[0]), given.each):
        for architecture in given.sm:
            report = compiled(launch, architecture, label)
            seen.add(report.kernel)
            rows.append(row(report))
            print(rows[-1], flush=True)
            faults += [f"{report.kernel}, {label}, sm_{architecture}: {fault}" for fault in report.faults()]
    if not given.only:
        faults += [f"{name} is in no module's examples()" for name in sorted(kernel_names() - seen)]
    if given.write:
        rewrite("compiled", rows)
    print(*faults, sep="\n", file=sys.stderr, end="\n" if faults else "")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
