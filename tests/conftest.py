"""For all tests: where Triton kernels run, and how tests are dealt to processes where pytest-xdist is missing."""

from __future__ import annotations

import os

import torch

# Without a GPU, in Triton's interpreter; it must be chosen before anything imports triton.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items):
    """TEST_PART=2/12 keeps every twelfth test, from the third on."""
    part, _, parts = os.environ.get("TEST_PART", "0/1").partition("/")
    items[:] = items[int(part) :: int(parts)]
