"""The Triton kernels of linear attention and ssd against the float64 recurrence: on the GPU, or in the interpreter.

Error budget: where the recurrence, computed in the kernels' own dtype, is off by e, a kernel may be off by 2 e and one
rounding of what it sums. All inputs are views into memory full of NaN, and so are all outputs before they are written.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from kernels import backend
from kernels.linear import triton_run, triton_tiles
from kernels.linear.op import linear_attention
from kernels.ssm.ssd import ssd

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FENCE = 64


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Chunks and tiles of 16: short inputs have several, and the interpreter is slow."""
    monkeypatch.setattr(triton_tiles, "CHUNK", 16)
    for name in ("states_tiles", "product_tiles", "decay_tiles"):
        monkeypatch.setattr(triton_tiles, name, lambda wide: triton_tiles.Tiles(16, 4, 1))


@pytest.fixture(autouse=True)
def fences(monkeypatch):
    """Outputs are full of NaN and fenced by it: what is not written shows, and so does what is written outside."""
    fenced = []

    def empty(like, *shape, dtype=None):
        count = torch.Size(shape).numel()
        memory = torch.full((count + 2 * FENCE,), float("nan"), dtype=dtype or like.dtype, device=like.device)
        fenced.append(memory)
        return memory[FENCE : FENCE + count].view(shape)

    monkeypatch.setattr(triton_run, "empty", empty)
    yield
    assert all(memory[:FENCE].isnan().all() and memory[-FENCE:].isnan().all() for memory in fenced)


def surrounded(t):
    """The same numbers as a view into memory that is NaN everywhere else."""
    memory = torch.full([n + 2 for n in t.shape], float("nan"), dtype=t.dtype, device=DEVICE)
    return memory[tuple(slice(1, n + 1) for n in t.shape)].copy_(t)


CASES = {
    # dtype, normalised, decay, documents, time, heads, groups, K, V
    "gates, documents, normaliser": (torch.float32, True, "token", True, 19, 2, 1, 20, 17),
    "decay a head": (torch.float32, False, "head", False, 33, 2, 2, 16, 24),
    "bfloat16, gates, documents": (torch.bfloat16, False, "token", True, 19, 2, 1, 16, 16),
    "float16, normaliser": (torch.float16, True, None, False, 18, 1, 1, 16, 16),
}


def tensors(case):
    """q, k, v, kv, z, log_decay and the gradients of y, kv and z, in float64 but exact in the case's dtype."""
    dtype, _, decay, _, time, heads, groups, key_dim, value_dim = case
    torch.manual_seed(0)
    q, k = (torch.rand(1, time, groups, key_dim).to(dtype) for _ in range(2))
    v, dy = (torch.randn(1, time, heads, value_dim).to(dtype) for _ in range(2))
    kv, dkv = (torch.rand(1, heads, key_dim, value_dim) for _ in range(2))
    z, dz = (torch.rand(1, heads, key_dim) for _ in range(2))
    log_decay = {None: None, "head": -torch.rand(heads), "token": -torch.rand(1, time, heads)}[decay]
    return [t if t is None else t.double().to(DEVICE) for t in (q, k, v, kv, z, log_decay, dy, dkv, dz)]


def places(case):
    if not case[3]:
        return {}
    ids = torch.tensor([[1] * 5 + [2] * (case[4] - 7) + [0] * 2], dtype=torch.int32, device=DEVICE)
    return dict(documents=ids, document=torch.tensor([1], dtype=torch.int32, device=DEVICE))


def results(case, inputs, dtype, implementation):
    """y, states and gradients in float64, computed in `dtype`."""
    normalise, wide = case[1], torch.promote_types(dtype, torch.float32)
    q, k, v, kv, z, log_decay, dy, dkv, dz = inputs
    leaves = dict(q=q.to(dtype), k=k.to(dtype), v=v.to(dtype), kv=kv.to(wide))
    leaves |= {"z": z.to(wide)} if normalise else {}
    leaves |= {} if log_decay is None else {"log_decay": log_decay.to(wide)}
    leaves = {name: surrounded(t).requires_grad_() for name, t in leaves.items()}
    with backend.using(implementation):
        y, *states = linear_attention(**leaves, normalise=normalise, **places(case))
    outputs = [y, *states[: 1 + normalise]]
    weights = [t.to(out) for t, out in zip((dy, dkv, dz), outputs, strict=False)]
    gradients = torch.autograd.grad(outputs, list(leaves.values()), weights)
    found = dict(zip(("y", "S", "Z"), outputs, strict=False)) | dict(zip(leaves, gradients, strict=True))
    return {name: t.detach().double() for name, t in found.items()}


def magnitudes(case, inputs, truth):
    """What each result sums, every term positive: roundings are relative to that, also where terms cancel."""
    q, k, v, kv, z, log_decay, dy, dkv, dz = (t if t is None else t.abs() for t in inputs)
    if case[1]:
        ones = [torch.ones_like(v[..., :1])]
        with backend.using("reference"):
            options = dict(normalise=False, kv=inputs[4][..., None], log_decay=inputs[5], **places(case))
            total = linear_attention(*inputs[:2], *ones, **options)[0]
        v, kv, dkv = torch.cat([v, *ones], -1), torch.cat([kv, z[..., None]], -1), torch.cat([dkv, dz[..., None]], -1)
        dy = torch.cat([dy, (inputs[6] * truth["y"]).sum(-1, keepdim=True).abs()], -1) / total.where(total != 0, 1)
    plain = (case[0], False, *case[2:])
    log_decay = log_decay if log_decay is None else -log_decay
    found = results(plain, (q, k, v, kv, z, log_decay, dy, dkv, dz), torch.float64, "reference")
    del found["y"]
    return {name: t.abs().amax() for name, t in found.items()}


@pytest.mark.parametrize("name", CASES)
def test_error_is_within_twice_that_of_the_recurrence_in_the_same_precision(name):
    case = CASES[name]
    inputs = tensors(case)
    truth = results(case, inputs, torch.float64, "reference")
    plain, got = (results(case, inputs, case[0], implementation) for implementation in ("reference", "triton"))
    summed = magnitudes(case, inputs, truth)
    for part, right in truth.items():
        rounding = torch.finfo(case[0]).eps * max(right.abs().amax(), summed.get(part, 0))
        allowed = 2 * (plain[part] - right).abs().amax() + rounding
        assert (got[part] - right).abs().amax() <= allowed, part


def test_both_ways_equal_the_sum_over_all_pairs():
    q, k, v = tensors((torch.float32, True, None, False, 19, 1, 1, 16, 16))[:3]
    ids = torch.tensor([[1] * 5 + [2] * 12 + [0] * 2], dtype=torch.int32, device=DEVICE)
    with backend.using("reference"):
        expected = linear_attention(q, k, v, causal=False, documents=ids)[0]
    with backend.using("triton"):
        y = linear_attention(q.float(), k.float(), v.float(), causal=False, documents=ids)[0]
    assert (y - expected).abs().amax() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ssd_equals_its_recurrence(dtype):
    """Values dt x are fp32 beside b and c of half precision; steps of 2 and a of -400 are no overflow."""
    torch.manual_seed(0)
    x, b, c = (torch.randn(1, 19, n, 16, device=DEVICE).to(dtype).requires_grad_() for n in (2, 1, 1))
    dt = (2 * torch.rand(1, 19, 2, device=DEVICE)).requires_grad_()
    a = torch.tensor([-0.5, -400.0], device=DEVICE).requires_grad_()
    leaves = (x, dt, a, b, c)

    def run(name, kind):
        wide = torch.promote_types(kind, torch.float32)
        given = [t.to(kind if t.dtype == dtype and t is not dt and t is not a else wide) for t in leaves]
        with backend.using(name):
            y, state = ssd(*given)
        return y, state, *torch.autograd.grad(y.double().square().sum() + state.sum(), leaves)

    # bfloat16 gradients are rounded once more when they are added up over heads.
    rounding = 4 * torch.finfo(dtype).eps
    for got, right in zip(run("triton", dtype), run("reference", torch.float64), strict=True):
        assert (got - right).abs().amax() <= rounding * right.abs().amax()


def test_a_strong_decay_leaves_the_weak_ones_after_it_exact():
    q, k, v, *_ = tensors((torch.float32, False, None, False, 19, 1, 1, 16, 16))
    log_decay = torch.full((1, 19, 1), -0.05, device=DEVICE)
    log_decay[:, 3], log_decay[:, 9] = -1e6, float("-inf")
    with backend.using("reference"):
        expected = linear_attention(q, k, v, normalise=False, log_decay=log_decay.double())[0]
    with backend.using("triton"):
        y = linear_attention(q.float(), k.float(), v.float(), normalise=False, log_decay=log_decay)[0]
    assert (y - expected).abs().amax() < 1e-6 * expected.abs().amax()


def test_offsets_beyond_32_bits():
    """C46: samples 2**30 + 64 elements apart, so that the third starts beyond 2**31; only what is used takes memory."""
    torch.manual_seed(0)
    stride, shape = 2**30 + 64, (3, 17, 1, 16)
    memory = torch.empty(2 * stride + 17 * 16, dtype=torch.bfloat16, device=DEVICE)
    apart = memory.as_strided(shape, (stride, 16, 16, 1)).copy_(torch.randn(shape))
    found = []
    for x in (apart, apart[2:].clone()):
        q, k, v = (x.detach().requires_grad_() for _ in range(3))
        with backend.using("triton"):
            y = linear_attention(q, k, v, normalise=False)[0]
        found.append([t[-1] for t in (y, *torch.autograd.grad(y.square().sum(), (q, k, v)))])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_dtype_that_the_kernels_lack_is_refused():
    q = torch.rand(1, 5, 1, 4, dtype=torch.float64, device=DEVICE)
    with backend.using("triton"), pytest.raises(ValueError, match=r"dtype torch\.float64 must be one of"):
        linear_attention(q, q, q)
