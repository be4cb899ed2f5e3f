"""The portable attention at lengths of several blocks, against the float64 definition: options, precision, memory.

Hand-worked values and loops over pairs: test_attention.py.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from kernels import backend
from kernels.attention import pairs
from kernels.attention.op import attention

# (T, S) around blocks of 64 and 128 queries.
LENGTHS = ((1, 1), (1, 140), (3, 140), (65, 150), (130, 130), (150, 65))
FACTORS = {
    "lengths": LENGTHS,
    "heads": ((2, 1), (2, 2), (6, 2)),
    "widths": ((8, 8), (4, 6), (6, 4)),
    "causal": (True, False),
    "window": (None, 1, 20, 1000),
    "softcap": (None, 1.5),
    "scale": (None, 1.0),
    "slopes": (None, "fixed", "learned"),
    "sinks": (False, True),
    "positions": (False, True),
    "documents": (False, True),
    "return_lse": (False, True),
}


def draws(count):
    """Options drawn at random, the same every time."""
    generator = random.Random(0)
    return [{name: generator.choice(levels) for name, levels in FACTORS.items()} for _ in range(count)]


DRAWS = draws(150)


def test_the_draws_hold_every_pair_of_options():
    for (a, levels), (b, others) in itertools.combinations(FACTORS.items(), 2):
        assert set(itertools.product(levels, others)) <= {(draw[a], draw[b]) for draw in DRAWS}, (a, b)


def example(draw, dtype=torch.float64, batch=2):
    """Arguments of `attention`, and those of them that take gradients."""
    (queries, keys), (heads, groups), (width, value) = draw["lengths"], draw["heads"], draw["widths"]
    make = torch.Generator().manual_seed(queries + keys)
    normal = lambda *shape: torch.randn(shape, generator=make, dtype=torch.float64).to(dtype).requires_grad_()  # noqa: E731
    whole = lambda high, *shape: torch.randint(0, high, shape, generator=make, dtype=torch.int32)  # noqa: E731
    arguments = {name: draw[name] for name in ("causal", "window", "softcap", "scale", "return_lse")}
    for name, shape in (("q", (queries, heads, width)), ("k", (keys, groups, width)), ("v", (keys, groups, value))):
        arguments[name] = normal(batch, *shape)
    if draw["slopes"]:
        slopes = torch.linspace(0.1, 1, heads, dtype=dtype)
        arguments["alibi_slopes"] = slopes.requires_grad_(draw["slopes"] == "learned")
    if draw["sinks"]:
        arguments["sinks"] = normal(heads)
    if draw["positions"]:
        arguments |= {"q_positions": whole(keys + 3, batch, queries), "k_positions": whole(keys, batch, keys)}
    if draw["documents"]:
        arguments |= {"q_documents": whole(3, batch, queries), "k_documents": whole(3, batch, keys)}
    return arguments, [t for t in arguments.values() if isinstance(t, torch.Tensor) and t.requires_grad]


def outputs_and_gradients(arguments, leaves, implementation):
    with backend.using(implementation):
        y = attention(**arguments)
    outputs = list(y) if isinstance(y, tuple) else [y]
    generator = torch.Generator().manual_seed(0)
    loss = 0
    for i, out in enumerate(outputs):
        weight = torch.randn(out.shape, generator=generator, dtype=torch.float64)
        hidden = out == float("-inf")
        outputs[i] = out.masked_fill(hidden, 123.0)
        loss = loss + (outputs[i].double() * weight).sum()
    grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return [t.detach().double() for t in (*outputs, *grads)]


@pytest.mark.parametrize("draw", DRAWS, ids=lambda draw: "-".join(str(level) for level in draw.values()))
def test_equals_definition(draw):
    """C01, C03, C16, C35, C36: outputs, log-sum-exp and every gradient."""
    got, expected = (outputs_and_gradients(*example(draw), name) for name in ("portable", "reference"))
    for a, b in zip(got, expected, strict=True):
        assert torch.isfinite(a).all() and torch.allclose(a, b, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("widths", [(16, 16), (80, 80), (128, 64), (192, 128), (256, 256)], ids=str)
def test_widths_of_heads_equal_definition(widths):
    for options in (dict(window=20), dict(window=20, softcap=1.5)):
        draw = PLAIN | options | dict(widths=widths, lengths=(70, 70))
        got, expected = (outputs_and_gradients(*example(draw), name) for name in ("portable", "reference"))
        assert all(torch.allclose(a, b, atol=1e-11, rtol=1e-11) for a, b in zip(got, expected, strict=True))


SINGLES = {
    "plain": {},
    "window": dict(window=20),
    "softcap": dict(softcap=1.5),
    "slopes": dict(slopes="fixed"),
    "learned slopes": dict(slopes="learned"),
    "sinks": dict(sinks=True),
    "documents": dict(documents=True),
    "positions": dict(positions=True),
    "lse": dict(return_lse=True),
}
PLAIN = {name: levels[0] for name, levels in FACTORS.items()} | dict(lengths=(150, 150), heads=(6, 2), slopes=None)


@pytest.mark.parametrize("name", SINGLES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_is_at_most_twice_that_of_the_definition_in_the_same_precision(name, dtype):
    draw = PLAIN | SINGLES[name]
    got, same = (outputs_and_gradients(*example(draw, dtype), each) for each in ("portable", "reference"))
    wide, leaves = example(draw)
    narrow, _ = example(draw, dtype)
    for leaf, rounded in zip(leaves, (t for t in narrow.values() if getattr(t, "requires_grad", False)), strict=True):
        leaf.data = rounded.detach().double()
    if "alibi_slopes" in narrow:
        wide["alibi_slopes"].data = narrow["alibi_slopes"].detach().double()
    truth = outputs_and_gradients(wide, leaves, "reference")
    for a, b, exact in zip(got, same, truth, strict=True):
        rounding = torch.finfo(dtype).eps * exact.norm()
        assert (a - exact).norm() <= 2 * (b - exact).norm() + rounding


@pytest.mark.parametrize("options", [{}, dict(window=64), dict(softcap=2.0), dict(return_lse=True)], ids=str)
def test_memory_kept_for_the_backward_pass_is_linear_in_the_length(options):
    kept = []
    for time in (256, 512):
        q, k, v = (torch.randn(1, time, 2, 8, requires_grad=True) for _ in range(3))
        kept.append(0)

        def count(t):
            kept[-1] += t.numel()
            return t

        with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
            attention(q, k, v, **options)
    assert kept[1] <= 2 * kept[0]


def test_keys_out_of_the_windows_reach_are_never_read():
    q, k, v = (torch.randn(1, 256, 2, 8) for _ in range(3))
    k[:, :100], v[:, :100] = float("nan"), float("nan")
    y = attention(q, k, v, window=20)
    assert torch.isfinite(y[:, 192:]).all() and torch.isnan(y[:, 50]).all()


def test_expanded_gradients_and_strided_inputs_are_read_right():
    """C32: the gradient of a sum has strides of 0, and the fused operator knows only contiguous heads."""
    q, k, v = (torch.randn(1, 70, 2, 16, dtype=torch.float64)[..., ::2].requires_grad_() for _ in range(3))
    got = torch.autograd.grad(attention(q, k, v, window=5).sum(), (q, k, v))
    with backend.using("reference"):
        expected = torch.autograd.grad(attention(q, k, v, window=5).sum(), (q, k, v))
    for a, b in zip(got, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-12)


@pytest.mark.parametrize("name", ["window", "sinks", "documents", "lse", "learned slopes"])
def test_compiled_equals_eager(name):
    """C47; queries and keys may share one tensor of documents."""
    arguments, leaves = example(PLAIN | SINGLES[name])
    if name == "documents":
        arguments["k_documents"] = arguments["q_documents"]
    torch._dynamo.reset()
    run = torch.compile(lambda: attention(**arguments), fullgraph=True, backend="aot_eager", dynamic=False)
    results = []
    for function in (run, lambda: attention(**arguments)):
        y = function()
        y = y if isinstance(y, tuple) else (y,)
        results.append([*y, *torch.autograd.grad(sum(t.square().sum() for t in y), leaves)])
    torch._dynamo.reset()
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_log_sum_exp_is_wide_and_the_output_is_not(dtype):
    y, lse = attention(*(torch.randn(1, 5, 1, 4).to(dtype) for _ in range(3)), return_lse=True)
    assert y.dtype == dtype and lse.dtype == torch.promote_types(dtype, torch.float32)


def test_large_distances_of_alibi_survive_half_precision():
    """0.1 x 999 tokens: bf16 has no number between 99.5 and 100."""
    x = torch.zeros(1, 1, 1, 4, dtype=torch.bfloat16)
    places = dict(q_positions=torch.tensor([[999]]), k_positions=torch.tensor([[0]]))
    _, lse = attention(x, x, x, alibi_slopes=torch.tensor([0.1]), return_lse=True, **places)
    assert lse.item() == pytest.approx(-99.9, abs=1e-4)


def test_products_of_our_own_are_in_fp32_and_rounded_once():
    q, k, v = (torch.randn(1, 150, 2, 8).bfloat16() for _ in range(3))
    wide = attention(q.float(), k.float(), v.float(), softcap=3.0)
    assert torch.equal(attention(q, k, v, softcap=3.0), wide.bfloat16())


def test_autocast_does_not_narrow_what_is_inside():
    q, k, v = (torch.randn(1, 150, 2, 8) for _ in range(3))
    expected = attention(q, k, v, softcap=3.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(attention(q, k, v, softcap=3.0), expected)


def test_gradients_of_gradients_are_refused_and_not_wrong():
    q = torch.randn(1, 150, 1, 4, requires_grad=True)
    (grad,) = torch.autograd.grad(attention(q, q, q, window=9).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"attention_blocked_backward.* but no autograd formula"):
        grad.sum().backward()


@pytest.mark.parametrize("name", ["window", "sinks", "documents", "learned slopes"])
def test_the_operator_is_registered_right(name):
    """torch's own check: schema, fake tensors, gradients, tracing."""
    a, _ = example(PLAIN | SINGLES[name] | dict(lengths=(70, 70)))
    names = ("q", "k", "v", "alibi_slopes", "sinks", "q_positions", "k_positions", "q_documents", "k_documents")
    tensors = [a.get(name) for name in names]
    torch.library.opcheck(torch.ops.mixerlab.attention_blocked.default, (*tensors, True, a["window"], 0.3, None))


def test_meta_tensors_go_through_every_way():
    for options in SINGLES.values():
        arguments, _ = example(PLAIN | options)
        ghosts = {n: t.to("meta") if isinstance(t, torch.Tensor) else t for n, t in arguments.items()}
        y, expected = attention(**ghosts), attention(**arguments)
        if not isinstance(y, tuple):
            y, expected = (y,), (expected,)
        assert [(t.shape, t.dtype) for t in y] == [(t.shape, t.dtype) for t in expected]


def test_a_window_reads_blocks_of_its_own_width_only():
    x = torch.empty(1, 1000, 1, 4)
    found = list(pairs.Pairs(x, x, True, 100, None, (None, None), (None, None)).blocks())
    assert all(columns.stop - columns.start <= 100 + pairs.WINDOW_BLOCK - 1 for _, columns in found)
    assert [rows.start for rows, _ in found] == list(range(0, 1000, pairs.WINDOW_BLOCK))


@pytest.mark.parametrize("window", [None, 8])
def test_compiled_for_one_length_it_runs_for_others(window):
    # From the second length on, torch.compile makes lengths symbols.
    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    for length in (20, 12, 33, 1, 65):
        q, k, v = torch.randn(3, 2, length, 4, 8)
        torch.testing.assert_close(compiled(q, k, v, window=window), attention(q, k, v, window=window))


@pytest.mark.parametrize("name", ["portable", "reference"])
def test_autocast_narrows_nothing_inside(name):
    q = torch.randn(1, 5, 2, 8)
    with backend.using(name):
        plain = attention(q, q, q, return_lse=True)
        with torch.autocast("cpu", torch.bfloat16):
            inside = attention(q, q, q, return_lse=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, inside, strict=True))
