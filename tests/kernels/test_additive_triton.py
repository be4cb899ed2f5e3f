"""The Triton kernels of additive attention against the float64 definition: on the GPU, or in Triton's interpreter.

Error budget: where the definition, computed in the kernels' own dtype, is off by e, a kernel may be off by 2 e and one
rounding of what it sums; weights come from an exponent, a score of up to the sum of |w|, that is rounded in fp32.
Outputs lie between fences of NaN.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from kernels import backend
from kernels.additive import dispatch
from kernels.additive.op import additive_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.usefixtures("fences")


def example(queries, keys, dtype=torch.float32, width=16, values=16, batch=2, heads=2):
    """q, k, v, weight, bias and the gradient of the result, in float64, exact in the dtype."""
    torch.manual_seed(queries + keys)
    shapes = (batch, queries, heads, width), (batch, keys, heads, width), (batch, keys, heads, values), (heads, width)
    made = [torch.randn(s) for s in (*shapes, (heads, width), (batch, queries, heads, values))]
    return [t.to(dtype).double().to(DEVICE) for t in made]


def results(name, precision, inputs, **options):
    """y and all gradients in float64; q, k and v are views with other strides."""
    *inputs, dy = (t.to(precision) for t in inputs)
    inputs = [t.clone().requires_grad_() for t in inputs]
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in inputs[:3])
    with backend.using(name):
        y = additive_attention(q, k, v, inputs[3], bias=inputs[4], **options)
    return [t.detach().double() for t in (y, *torch.autograd.grad(y, inputs, dy))]


def places(queries, keys):
    """Two documents with pads between them, and keys in the order of a ring: another one in each row."""
    ids = torch.tensor([0, 1, 1, 0, 2], dtype=torch.int32).repeat_interleave(-(-max(queries, keys) // 5))
    ids = torch.stack([ids, ids.flip(0)])
    ring = torch.stack([torch.arange(keys).roll(5), torch.arange(keys).roll(-7)])
    found = dict(
        q_documents=ids[:, :queries], k_documents=ids[:, :keys].gather(1, ring),
        q_positions=torch.arange(keys - queries, keys).expand(2, -1), k_positions=ring,
    )  # fmt: skip
    return {name: t.to(DEVICE) for name, t in found.items()}


CASES = {
    "causal": dict(lengths=(35, 35), batch=1),
    "causal bf16": dict(lengths=(20, 33), dtype=torch.bfloat16),
    "causal fp16": dict(lengths=(20, 33), dtype=torch.float16),
    "both ways, odd widths": dict(lengths=(17, 40), width=20, values=9, causal=False, batch=1),
    "more queries than keys": dict(lengths=(37, 20), width=7, batch=1),
    "window": dict(lengths=(40, 40), window=5, batch=1),
    "window both ways": dict(lengths=(33, 40), window=6, causal=False, dtype=torch.bfloat16, batch=1),
    "more channels than a program takes": dict(lengths=(17, 20), width=70, batch=1),
    "one query": dict(lengths=(1, 50)),
    "documents and positions": dict(lengths=(40, 40), placed=True),
    "documents and positions, window": dict(lengths=(33, 40), placed=True, window=9, causal=False),
}


@pytest.mark.parametrize("case", CASES)
def test_error_is_within_twice_that_of_the_definition_in_the_same_precision(case):
    case = dict(CASES[case])
    (queries, keys), dtype = case.pop("lengths"), case.pop("dtype", torch.float32)
    sizes = {name: case.pop(name) for name in ("width", "values", "batch") if name in case}
    if case.pop("placed", False):
        case |= places(queries, keys)
    inputs = example(queries, keys, dtype, **sizes)
    exponent = torch.finfo(torch.float32).eps * inputs[3].abs().sum(1).amax()
    truth = results("reference", torch.float64, inputs, **case)
    plain = results("reference", dtype, inputs, **case)
    got = results("triton", dtype, inputs, **case)
    for name, right, base, mine in zip(("y", "dq", "dk", "dv", "dw", "db"), truth, plain, got, strict=True):
        rounding = (torch.finfo(dtype).eps + exponent) * max(1, right.abs().amax())
        assert (mine - right).abs().amax() <= 2 * (base - right).abs().amax() + rounding, name


def test_huge_scores_stay_finite():
    q, k, v, weight, bias, dy = example(9, 9)
    for q_, k_, w_ in ((q + 1e4, k - 1e4, weight), (q + 1e30, k - 1e30, weight), (q, k, 1e30 * weight)):
        assert all(t.isfinite().all() for t in results("triton", torch.float32, [q_, k_, v, w_, bias, dy]))


@pytest.mark.parametrize(("batch", "queries", "keys"), [(1, 0, 5), (1, 5, 0), (0, 5, 5)])
def test_empty_inputs_give_empty_or_zero_outputs_and_gradients(batch, queries, keys):
    found = results("triton", torch.float32, example(queries, keys, batch=batch))
    assert found[0].shape == (batch, queries, 2, 16) and not any(t.any() for t in found)


def test_two_runs_are_equal_to_the_last_bit():
    inputs = example(20, 33)
    first, second = (results("triton", torch.float32, inputs) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_compiled_without_a_break_equals_eager():
    q, k, v, weight, *_ = (t.float().requires_grad_() for t in example(17, 17))

    def call(*inputs):
        with backend.using("triton"):
            return additive_attention(*inputs, window=9)

    outcomes = []
    for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        y = function(q, k, v, weight)
        outcomes.append([y, *torch.autograd.grad(y.square().sum(), (q, k, v, weight))])
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))


@pytest.mark.parametrize(("width", "values"), [(257, 16), (16, 257)])
def test_what_the_kernels_lack_is_named_and_left_to_the_portable_path(width, values):
    inputs = example(3, 3, width=width, values=values)
    with pytest.raises(ValueError, match=f"A={width} and V={values} must be at most 256"):
        results("triton", torch.float32, inputs)
    assert dispatch.refusal(inputs[0].double(), inputs[2])
    assert results("auto", torch.float32, inputs)[0].shape == (2, 3, 2, values)
