"""Every Triton kernel compiles for GPUs that are not here, fits them, does not spill and uses what they have."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from kernels import triton_aot
from kernels.attention import triton_run
from kernels.triton_launch import recording

ROOT = Path(__file__).resolve().parents[2]
FINE = triton_aot.Report(
    "forward_kernel", "", 90, warps=4, stages=3, registers=200, stack=0, shared=65536, tensor_cores=32,
    async_copies=48, multiplies=True,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [80, 90])
def test_every_kernel_compiles_fits_and_does_not_spill(architecture):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # Triton 3.9 warns that its default will change.
    environment["TRITON_DEFAULT_FP_FUSION"] = "1"
    # `make aot` compiles all examples; these four of each kernel hold its usual widths and dtypes.
    command = [sys.executable, "-m", "kernels.triton_aot", "--sm", str(architecture), "--each", "4"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for width in (64, 128):
        for kernel in ("forward", "dq", "dkv"):
            assert any(line.startswith(f"| {kernel} | bfloat16, D {width} |") for line in lines)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (dict(), ""),
        (dict(shared=232_449), "shared memory 232449 B is over 232448 B"),
        (dict(stack=8), "8 B of stack, 0 B are tolerated"),
        (dict(kernel="dkv_kernel", stack=64), ""),
        (dict(kernel="dkv_kernel", stack=72), "72 B of stack, 64 B are tolerated"),
        (dict(tensor_cores=0), "no tensor-core instruction"),
        (dict(async_copies=0), "no asynchronous copy"),
        (dict(multiplies=False, tensor_cores=0, async_copies=0), ""),
        (dict(stages=1, async_copies=0), ""),
    ],
    ids=str,
)
def test_faults_are_named(change, fault):
    assert "; ".join(replace(FINE, **change).faults()).startswith(fault)
    assert bool(fault) == bool(replace(FINE, **change).faults())


def test_few_queries_split_the_keys_and_many_do_not():
    k = torch.empty(1, 8192, 2, 64, device="meta", dtype=torch.bfloat16)
    for queries, group, splits in ((1, 4, 32), (16, 4, 32), (17, 1, 1)):
        with recording() as launches:
            q = k.new_empty(1, queries, 8, 64)
            triton_run.forward(triton_run.Call.of(q, k, k, *[None] * 6, True, None, 0.1, None))
        kernel = launches[0].arguments
        # 8192 keys in tiles of 64, at least 4 tiles a split.
        assert (kernel["GROUP"], kernel["splits"], len(launches)) == (group, splits, 1 + (splits > 1))
