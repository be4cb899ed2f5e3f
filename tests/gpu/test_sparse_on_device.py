"""What only a GPU shows of NSA's branches: the paper's sizes, long rows, races (`make gpu`)."""

from __future__ import annotations

import pytest
import torch

from kernels import backend
from kernels.attention.op import attention
from kernels.sparse.op import compressed_attention, selected_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: `make gpu`")
PAPER = dict(block=32, stride=16, n_selected=16, select_block=64)


def example(time, keys, heads, groups, width, dtype):
    """q, k, v and the gradient of the result."""
    torch.manual_seed(time)
    shapes = (time, heads), (keys, groups), (keys, groups), (time, heads)
    return [torch.randn(1, *s, width, device="cuda", dtype=dtype) for s in shapes]


def results(name, precision, op, inputs, *rest, **options):
    """The choice, if any, y and the gradients of q, k and v in float64."""
    q, k, v, dy = (t.detach().to(precision).requires_grad_() for t in inputs)
    torch.backends.cuda.matmul.allow_tf32 = False
    with backend.using(name):
        found = op(q, k, v, *rest, **options)
    y, choice = found if isinstance(found, tuple) else (found, None)
    return choice, [t.detach().double() for t in (y, *torch.autograd.grad(y, (q, k, v), dy))]


def assert_within_budget(dtype, op, inputs, *rest, **options):
    """Relative to the norm: twice the error of the definition in the same precision, and one rounding."""
    right_choice, truth = results("reference", torch.float64, op, inputs, *rest, **options)
    _, plain = results("reference", dtype, op, inputs, *rest, **options)
    choice, got = results("triton", dtype, op, inputs, *rest, **options)
    for name, right, base, mine in zip(("y", "dq", "dk", "dv"), truth, plain, got, strict=True):
        assert (mine - right).norm() <= 2 * (base - right).norm() + 4 * torch.finfo(dtype).eps * right.norm(), name
    # Scores that are equal to rounding may be told apart otherwise.
    assert choice is None or (choice == right_choice).all(-1).double().mean() > 0.99


@pytest.mark.parametrize(("heads", "groups", "width"), [(8, 2, 64), (16, 1, 128), (2, 2, 128), (6, 2, 96)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_error_is_within_budget(heads, groups, width, dtype):
    time = 2000
    blocks = (time - 32) // 16 + 1
    assert_within_budget(dtype, compressed_attention, example(time, blocks, heads, groups, width, dtype), **PAPER)
    inputs = example(time, time, heads, groups, width, dtype)
    _, indices = compressed_attention(inputs[0], inputs[1][:, :blocks], inputs[2][:, :blocks], **PAPER)
    assert_within_budget(dtype, selected_attention, inputs, indices, block=64)


def test_selected_attention_stays_in_documents():
    """Last blocks reach into the next document, whose own blocks write the same slots at the same time."""
    lengths = (700, 1, 65, 1234)
    starts = torch.tensor([sum(lengths[:i]) for i in range(4)], device="cuda")
    counts = torch.tensor(lengths, device="cuda")
    places = dict(
        starts=starts.repeat_interleave(counts)[None],
        positions=torch.cat([torch.arange(length, device="cuda") for length in lengths])[None],
    )
    own = places["positions"] // 64
    indices = torch.stack([torch.where(own > 0, 0, own), torch.where(own > 0, own, -1)], -1)
    inputs = example(2000, 2000, 4, 2, 64, torch.float32)
    chosen = indices[:, :, None].expand(-1, -1, 2, -1).int()
    assert_within_budget(torch.float32, selected_attention, inputs, chosen, block=64, **places)


def test_all_blocks_chosen_is_causal_attention():
    q, k, v, _ = example(1024, 1024, 8, 2, 128, torch.bfloat16)
    indices = torch.arange(16, dtype=torch.int32, device="cuda").expand(1, 1024, 2, 16)
    assert torch.allclose(selected_attention(q, k, v, indices, block=64), attention(q, k, v), atol=2e-2)


def test_gradients_are_equal_to_the_last_bit_from_run_to_run():
    inputs = example(4096, 4096, 16, 2, 64, torch.bfloat16)
    _, indices = compressed_attention(inputs[0], inputs[1][:, :255], inputs[2][:, :255], **PAPER)
    runs = [results("triton", torch.bfloat16, selected_attention, inputs, indices, block=64)[1] for _ in range(4)]
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


def test_a_long_row_takes_memory_linear_in_its_length():
    """A score matrix of 65536 tokens would take 8 GB a head."""
    q, k, v, dy = example(65_536, 65_536, 8, 2, 64, torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    _, indices = compressed_attention(q, k[:, :4095], v[:, :4095], **PAPER)
    results("triton", torch.bfloat16, selected_attention, (q, k, v, dy), indices, block=64)
    assert torch.cuda.max_memory_allocated() - before < 3 * 2**30
