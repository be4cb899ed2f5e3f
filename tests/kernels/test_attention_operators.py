"""The Triton kernels as operators of PyTorch: registration, tracing, edges, what they refuse, what they do not read."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from kernels import backend
from kernels.attention import dispatch
from kernels.attention.op import attention
from mixers import registry
from mixers.base import Packing

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.usefixtures("small_tiles")


def random_qkv(queries=40, keys=40, heads=2, groups=1, width=16, batch=1, dtype=torch.float32, grad=False):
    torch.manual_seed(queries + keys)
    shapes = ((batch, queries, heads, width), (batch, keys, groups, width), (batch, keys, groups, width))
    return [torch.randn(s, dtype=dtype, device=DEVICE, requires_grad=grad) for s in shapes]


def run(*arguments, **options):
    with backend.using("triton"):
        return attention(*arguments, **options)


def definition(*arguments, **options):
    with backend.using("reference"):
        return attention(*arguments, **options)


@pytest.mark.slow
def test_operator_is_registered_as_pytorch_wants_it():
    q, k, v = random_qkv(5, 7, grad=True)
    slopes, sinks = (torch.tensor([0.5, 0.25], device=DEVICE, requires_grad=True) for _ in range(2))
    ids = torch.ones(1, 7, dtype=torch.int32, device=DEVICE)
    arguments = (q, k, v, slopes, sinks, None, None, ids[:, :5], ids, True, 3, 0.2, 2.0)
    torch.library.opcheck(dispatch.forward, arguments)
    plain = (q.detach(), k.detach(), v.detach(), None, None, None, None, None, None, False, None, 0.2, None)
    y, lse = dispatch.forward(*plain)
    torch.library.opcheck(dispatch.backward, (y, lse, y, lse, False, *plain))


def test_compiled_without_a_break_equals_eager():
    """C47, the half of it that needs no second device."""
    q, k, v = random_qkv(grad=True)

    def step(q, k, v):
        return run(q.transpose(1, 2).contiguous().transpose(1, 2), k, v, window=9, softcap=2.0, return_lse=True)

    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        y, lse = function(q, k, v)
        results.append((y, lse, *torch.autograd.grad(y.square().sum() + lse.sum(), (q, k, v))))
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


def test_two_runs_are_equal_to_the_last_bit():
    """C45, C48: nothing is accumulated over calls, tuned or added in the order of arrival."""
    q, k, v = random_qkv(70, 70, heads=4, groups=2, grad=True)
    first, second = (torch.autograd.grad(run(q, k, v, window=20).square().sum(), (q, k, v)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_offsets_beyond_32_bits():
    """C46: samples 2**30 + 64 elements apart, so that the third starts beyond 2**31; only what is used takes memory."""
    torch.manual_seed(0)
    stride, shape = 2**30 + 64, (3, 33, 1, 16)
    memory = torch.empty(2 * stride + 33 * 16, dtype=torch.bfloat16, device=DEVICE)
    apart = memory.as_strided(shape, (stride, 16, 16, 1)).copy_(torch.randn(shape))
    results = []
    for x in (apart, apart[2:].clone()):
        q, k, v = (x.detach().requires_grad_() for _ in range(3))
        y = run(q, k, v)
        results.append([t[-1] for t in (y, *torch.autograd.grad(y.square().sum(), (q, k, v)))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(("batch", "queries", "keys"), [(1, 0, 5), (1, 5, 0), (1, 0, 0), (0, 5, 5), (2, 1, 0)])
def test_empty_inputs_give_empty_or_zero_outputs_and_gradients(batch, queries, keys):
    inputs = random_qkv(queries, keys, batch=batch, grad=True)
    sinks = torch.tensor([0.5, -1.0], device=DEVICE)
    for options in ({}, {"sinks": sinks}):
        y, lse = run(*inputs, **options, return_lse=True)
        right, right_lse = definition(*inputs, **options, return_lse=True)
        assert torch.equal(y, right) and torch.allclose(lse, right_lse)
        assert all((g == 0).all() for g in torch.autograd.grad(y.sum(), inputs))


def test_row_with_nothing_to_see_is_zero_with_zero_gradients():
    """C03."""
    q, k, v = random_qkv(6, 6, grad=True)
    q_documents = torch.tensor([[1, 1, 0, 1, 1, 1]], device=DEVICE)
    y, lse = run(q, k, v, q_documents=q_documents, k_documents=torch.ones_like(q_documents), return_lse=True)
    assert (y[:, 2] == 0).all() and (lse[:, 2] == float("-inf")).all()
    gradients = torch.autograd.grad(y.square().sum() + lse[:, [0, 1, 3, 4, 5]].sum(), (q, k, v))
    assert all(g.isfinite().all() for g in gradients)
    assert (gradients[0][:, 2] == 0).all()


def test_a_ring_of_which_not_every_slot_is_filled():
    q, k, v = random_qkv(1, 40)
    q_positions = torch.tensor([[33]], device=DEVICE)
    k_positions = torch.arange(40, device=DEVICE).roll(7)[None]
    k_positions = torch.where(k_positions > 33, 2**32 + 30, k_positions)
    places = dict(q_positions=q_positions, k_positions=k_positions, window=20)
    seen = (k_positions[0] <= 33) & (k_positions[0] > 13)
    right = definition(q, k[:, seen], v[:, seen], causal=False)
    assert seen.sum() == 20 and torch.allclose(run(q, k, v, **places), right, atol=1e-6)


@pytest.mark.parametrize("kind", ["window", "two-sided window", "documents", "positions"])
def test_blocks_outside_of_the_range_are_never_loaded(kind):
    """Two parts, of 64 and 96, that do not see each other: NaN in values and gradients of the first stays there."""
    half = 64
    q, k, v = random_qkv(160, 160)
    ids = (torch.arange(160, device=DEVICE) >= half).int()[None]
    far = torch.arange(160, device=DEVICE) + 1000 * ids
    options = {
        "window": dict(window=3),
        "two-sided window": dict(window=3, causal=False),
        "documents": dict(q_documents=ids + 1, k_documents=ids + 1, causal=False),
        "positions": dict(q_positions=far, k_positions=far, window=70),
    }[kind]
    # Under a window the rows behind the border see a little of the first part: their tile is left out; where keys see
    # backwards too, so is the tile that sees that one.
    skip = {"window": 32, "two-sided window": 64}.get(kind, 0)
    right = definition(q, k, v, **options)[:, half + skip :]
    v[:, :half] = float("nan")
    inputs = [t.requires_grad_() for t in (q, k, v)]
    y = run(*inputs, **options)
    assert torch.allclose(y[:, half + skip :], right, atol=1e-5)
    dy = torch.zeros_like(y)
    dy[:, :half] = float("nan")
    dy[:, half + skip :] = 1.0
    for gradient in torch.autograd.grad(y, inputs, dy):
        assert gradient[:, half + skip :].isfinite().all()


@pytest.mark.parametrize("name", ["gqa", "window"])
def test_a_mixer_on_the_kernels_packs_and_decodes_as_on_the_portable_path(name):
    torch.manual_seed(0)
    mixer = registry.build(name, 32, n_heads=2).to(DEVICE)
    x = torch.randn(2, 12, 32, device=DEVICE)
    ids = torch.tensor([[1] * 5 + [2] * 7, [0] * 3 + [1] * 6 + [0] * 3], dtype=torch.int32, device=DEVICE)

    def outputs():
        packed = mixer(x, Packing(ids))
        first, state = mixer.extend(x[:, :8], mixer.start(2, x), Packing(ids[:, :8]))
        second, state = mixer.extend(x[:, 8:9], state, Packing(ids[:, 8:9]))
        return packed, first, second

    with backend.using("portable"):
        right = outputs()
    with backend.using("triton"), torch.no_grad():
        for got, wanted in zip(outputs(), right, strict=True):
            assert torch.allclose(got, wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(dropout=0.1), "dropout=0.1 of attention weights exists on the portable path alone"),
        (dict(width=257), "K=257 and V=257 must be at most 256"),
        (dict(dtype=torch.float64), "dtype torch.float64 must be one of torch.float32, torch.bfloat16, torch.float16"),
    ],
    ids=str,
)
def test_what_the_kernels_lack_is_refused_and_auto_goes_on_without_them(change, message):
    dropout = change.pop("dropout", 0.0)
    q, k, v = random_qkv(3, 3, **change)
    with pytest.raises(ValueError, match=f"backend='triton' cannot run attention here: {message}"):
        run(q, k, v, dropout=dropout)
    assert attention(q, k, v, dropout=dropout).isfinite().all()


def test_automatic_choice_is_triton_on_a_gpu_for_what_it_has(monkeypatch):
    table = {"triton": "kernels", "portable": "plain"}
    gpu, cpu = (SimpleNamespace(device=torch.device(name)) for name in ("cuda", "cpu"))
    assert backend.implementation("op", table, gpu) == "kernels"
    assert backend.implementation("op", table, gpu, "no dropout") == "plain"
    assert backend.implementation("op", table, cpu) == "plain"
    monkeypatch.setattr(backend, "_TRITON", False)
    assert backend.implementation("op", table, gpu) == "plain"


def test_without_gpu_and_interpreter_the_choice_of_triton_is_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    q, k, v = (t.cpu() for t in random_qkv(3, 3))
    with pytest.raises(ValueError, match="tensors on cpu must be on a GPU, or TRITON_INTERPRET=1 be set"):
        run(q, k, v)
    monkeypatch.setattr(backend, "_TRITON", False)
    with pytest.raises(ValueError, match="the package triton is not installed"):
        run(q, k, v)
    assert attention(q, k, v).isfinite().all()
