"""kernels/linear against sums over pairs, in float64."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from kernels import backend, flops
from kernels.linear import chunks, portable, weak
from kernels.linear.op import linear_attention


@pytest.fixture(params=("portable", "reference"))
def implementation(request):
    with backend.using(request.param):
        yield request.param


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(portable, "CHUNK", 4)


def by_pairs(q, k, v, normalise, ids=None, log_decay=None, causal=True):
    """sum_j (q_i . k_j) exp(sum of log-decay over (j, i]) v_j over visible j, divided by the same sum without v."""
    batch, time, heads, _ = q.shape
    y = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for i in range(time):
                total = 0.0
                for j in range(i + 1 if causal else time):
                    if ids is not None and (ids[b, i] != ids[b, j] or ids[b, i] == 0):
                        continue
                    real = [t for t in range(j + 1, i + 1) if ids is None or ids[b, t] > 0]
                    decay = 1.0 if log_decay is None else float(torch.exp(log_decay[b, real, h].sum()))
                    weight = float(q[b, i, h] @ k[b, j, h]) * decay
                    y[b, i, h] += weight * v[b, j, h]
                    total += weight
                if normalise and total:
                    y[b, i, h] /= total
    return y


def inputs(time=11, batch=2, heads=3, key_dim=5, value_dim=4, grad=False):
    torch.manual_seed(time)
    q, k = (torch.rand(batch, time, heads, key_dim, dtype=torch.float64, requires_grad=grad) for _ in range(2))
    return q, k, torch.randn(batch, time, heads, value_dim, dtype=torch.float64, requires_grad=grad)


IDS = torch.tensor([[1, 1, 1, 2, 2, 2, 2, 2, 5, 0, 0], [3, 3, 3, 3, 3, 3, 3, 4, 4, 4, 4]], dtype=torch.int32)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("kind", ["causal", "bidirectional", "decay"])
def test_equals_sum_over_pairs(implementation, small_chunks, packed, normalise, kind):
    q, k, v = inputs()
    ids = IDS if packed else None
    log_decay = -torch.rand(2, 11, 3, dtype=torch.float64) if kind == "decay" else None
    expected = by_pairs(q, k, v, normalise, ids, log_decay, kind != "bidirectional")
    y, kv, z = linear_attention(
        q, k, v, normalise=normalise, documents=ids, log_decay=log_decay, causal=kind != "bidirectional"
    )
    real = torch.ones(2, 11, dtype=torch.bool) if ids is None else ids > 0
    assert torch.allclose(y[real], expected[real], atol=1e-12)
    assert (kv is None) == (kind == "bidirectional") and (z is not None) == (normalise and kind != "bidirectional")


@pytest.mark.parametrize("kind", ["causal", "bidirectional", "fixed decay"])
def test_grouped_keys_equal_repeated_ones(implementation, small_chunks, kind):
    q, k, v = inputs(time=12, heads=6)
    log_decay = -torch.rand(6).double() if kind == "fixed decay" else None
    options = dict(log_decay=log_decay, causal=kind != "bidirectional", normalise=False)
    repeated = [x[:, :, :2].repeat_interleave(3, 2) for x in (q, k)]
    expected = linear_attention(*repeated, v, **options)
    got = linear_attention(q[:, :, :2], k[:, :, :2], v, **options)
    assert all(a is b is None or torch.allclose(a, b, atol=1e-12) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("cuts", [[0, 5, 11], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [0, 0, 9, 11]], ids=str)
def test_state_carries_over_any_cut(implementation, small_chunks, packed, cuts):
    """C02, C07: both the state and the normaliser go on."""
    q, k, v = inputs()
    log_decay = -torch.rand(2, 11, 3, dtype=torch.float64)
    whole = linear_attention(q, k, v, log_decay=log_decay, documents=IDS if packed else None)
    kv = z = document = None
    pieces = []
    for a, b in pairwise(cuts):
        part = dict(documents=IDS[:, a:b], document=document) if packed else {}
        y, kv, z = linear_attention(q[:, a:b], k[:, a:b], v[:, a:b], log_decay=log_decay[:, a:b], kv=kv, z=z, **part)
        pieces.append(y)
        document = IDS[:, :b].amax(1) if packed and b else torch.zeros(2, dtype=torch.int32)
    real = IDS > 0 if packed else torch.ones(2, 11, dtype=torch.bool)
    assert torch.allclose(torch.cat(pieces, 1)[real], whole[0][real], atol=1e-12)
    assert torch.allclose(kv, whole[1], atol=1e-12) and torch.allclose(z, whole[2], atol=1e-12)


@pytest.mark.parametrize("time", [3, 11])
@pytest.mark.parametrize("packed", [False, True])
def test_without_a_state_the_output_is_the_same(implementation, small_chunks, time, packed):
    q, k, v = (t[:, :time] for t in inputs())
    ids = IDS[:, :time] if packed else None
    expected = linear_attention(q, k, v, documents=ids)[0]
    y, kv, z = linear_attention(q, k, v, documents=ids, return_state=False)
    real = torch.ones(2, time, dtype=torch.bool) if ids is None else ids > 0
    assert torch.allclose(y[real], expected[real], atol=1e-12) and kv is None and z is None


def test_gradients_pass_through_state_in_and_out(implementation, small_chunks):
    q, k, v = inputs(time=6, batch=1, heads=1, key_dim=2, value_dim=2, grad=True)
    kv, z = torch.rand(1, 1, 2, 2).double().requires_grad_(), torch.rand(1, 1, 2).double().requires_grad_()
    log_decay = (-torch.rand(1, 6, 1).double()).requires_grad_()
    ids, document = torch.tensor([[2, 2, 2, 3, 3, 0]]), torch.tensor([2])

    def run(q, k, v, kv, z, log_decay):
        return linear_attention(q, k, v, kv=kv, z=z, log_decay=log_decay, documents=ids, document=document)

    assert torch.autograd.gradcheck(run, (q, k, v, kv, z, log_decay))


@pytest.mark.parametrize("decay", [None, "head", "token"])
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_gradients_equal_those_of_the_recurrence(small_chunks, decay, normalise, packed):
    """Two heads a group, V + 1 columns, rows that are and are not whole chunks."""
    for time in (8, 11):
        q, k, v = (t.detach() for t in inputs(time=time, heads=4))
        log_decay = {None: None, "head": -torch.rand(4).double(), "token": -torch.rand(2, time, 4).double()}[decay]
        state = torch.rand(2, 4, 5, 4).double(), torch.rand(2, 4, 5).double() if normalise else None
        tensors = [t.requires_grad_() for t in (q[:, :, :2], k[:, :, :2], v, *state, log_decay) if t is not None]
        part = dict(documents=IDS[:, :time], document=torch.tensor([1, 2])) if packed else {}

        def gradients(name, time=time, state=state, tensors=tensors, log_decay=log_decay, part=part):
            options = dict(normalise=normalise, kv=state[0], z=state[1], log_decay=log_decay, **part)
            with backend.using(name):
                outputs = [t for t in linear_attention(*tensors[:3], **options) if t is not None]
            torch.manual_seed(0)
            return torch.autograd.grad(outputs, tensors, [torch.randn_like(t) for t in outputs])

        for got, expected in zip(gradients("portable"), gradients("reference"), strict=True):
            assert torch.allclose(got, expected, atol=1e-12)


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("at_once", [1, 16, 24])
def test_chunks_of_weak_and_of_strong_decay_go_together(monkeypatch, normalise, packed, at_once):
    """Chunks, or two and three of them, are worked on in different ways; states before and after must be the same."""
    monkeypatch.setattr(portable, "CHUNK", 8)
    monkeypatch.setattr(chunks, "AT_ONCE", at_once)
    monkeypatch.setattr(weak, "LIMIT", 3.5)
    q, k, v = inputs(time=50, heads=4)
    # A chunk that grows is strong, too.
    steps = torch.tensor([0.4, 1.5, 8.0, 1.5, 0.4, -0.1, 0.4]).repeat_interleave(8)[:50, None]
    log_decay = -(0.5 + 0.5 * torch.rand(2, 50, 4).double()) * steps
    assert weak.pieces(portable._steps(log_decay, 2, 50, 8, 2)).tolist() == [1, 2, 0, 2, 1, 0, 1]
    kv, z = torch.rand(2, 4, 5, 4).double(), torch.rand(2, 4, 5).double()
    ids = torch.tensor([[1] * 13 + [2] * 14 + [3] * 23, [7] * 45 + [0] * 5])
    part = dict(documents=ids, document=torch.tensor([1, 7])) if packed else {}
    tensors = [t.requires_grad_() for t in (q[:, :, :2], k[:, :, :2], v, log_decay, kv, *([z] if normalise else []))]

    def gradients(name):
        options = dict(normalise=normalise, kv=kv, z=z if normalise else None, log_decay=log_decay, **part)
        with backend.using(name):
            outputs = [t for t in linear_attention(*tensors[:3], **options) if t is not None]
        torch.manual_seed(0)
        return [*outputs, *torch.autograd.grad(outputs, tensors, [torch.randn_like(t) for t in outputs])]

    for got, expected in zip(gradients("portable"), gradients("reference"), strict=True):
        assert (got - expected).norm() < 1e-12 * expected.norm()


@pytest.mark.parametrize("step", [0.01, 0.93, 1.87, 2.0])
def test_float32_is_exact_up_to_where_a_decay_is_strong(step):
    """0.9375 a token is what a whole chunk can be taken apart for, twice as much half of one."""

    def gradients(name, dtype):
        torch.manual_seed(0)
        q, k, v, weight = (torch.randn(1, 256, heads, 32).to(dtype).requires_grad_() for heads in (1, 1, 3, 3))
        log_decay = torch.full((1, 256, 3), -step, dtype=dtype, requires_grad=True)
        with backend.using(name):
            y = linear_attention(q, k, v, log_decay=log_decay, normalise=False)[0]
        return [y, *torch.autograd.grad((y * weight).sum(), (q, k, v, log_decay))]

    truth = gradients("reference", torch.float64)
    for got, expected in zip(gradients("portable", torch.float32), truth, strict=True):
        assert (got - expected).norm() < 2e-6 * expected.norm()


def slopes(dtype, name, q, k, v, log_decay, dy, ids=None):
    """The gradient of log-decays."""
    q, k, v, log_decay, dy = (t.to(dtype) for t in (q, k, v, log_decay.detach(), dy))
    log_decay.requires_grad_()
    part = {} if ids is None else dict(documents=ids)
    with backend.using(name):
        y = linear_attention(q, k, v, log_decay=log_decay, normalise=False, **part)[0]
    return torch.autograd.grad((y * dy).sum(), log_decay)[0]


@pytest.mark.parametrize("step", [0.3, 0.93])
def test_what_a_token_reads_of_itself_blurs_no_gradient_of_decays(step):
    """It has no part in it: not where queries are keys, nor where one token has large values and a key of its own."""
    torch.manual_seed(0)
    k, v = torch.randn(1, 128, 1, 32), torch.randn(1, 128, 2, 32)
    log_decay = torch.full((1, 128, 2), -step)
    loud = v.clone()
    loud[:, 20] *= 1e4
    alone = torch.cat([k, torch.zeros(1, 128, 1, 1)], -1)
    alone[:, 20] = torch.eye(33)[32]
    for keys, values, dy in ((k, v, v), (alone, loud, torch.randn(1, 128, 2, 32))):
        truth = slopes(torch.float64, "reference", keys, keys, values, log_decay, dy)
        got = slopes(torch.float32, "portable", keys, keys, values, log_decay, dy)
        assert (got - truth).norm() < 1e-5 * truth.norm()


def test_a_loud_document_blurs_no_gradient_of_another():
    torch.manual_seed(0)
    q, k, v, dy = (torch.randn(1, 64, 1, 16) for _ in range(4))
    v[:, :30] *= 1e6
    log_decay, ids = torch.full((1, 64, 1), -0.3), torch.tensor([[1] * 30 + [2] * 34])
    truth = slopes(torch.float64, "reference", q, k, v, log_decay, dy, ids)[:, 30:]
    got = slopes(torch.float32, "portable", q, k, v, log_decay, dy, ids)[:, 30:]
    assert (got - truth).norm() < 1e-5 * truth.norm()


def test_the_result_may_be_changed_in_place():
    q, k, v = inputs()
    log_decay = (-torch.rand(2, 11, 3).double()).requires_grad_()
    y = linear_attention(q, k, v, log_decay=log_decay, normalise=False)[0]
    expected = torch.autograd.grad((2 * y).sum(), log_decay, retain_graph=True)[0]
    y.mul_(2)
    assert torch.equal(torch.autograd.grad(y.sum(), log_decay)[0], expected)


def test_backward_works_on_chunks_as_forward_did():
    """Though what was saved may come back a little different, here on the other side of the limit of a step."""
    q, k, v = inputs(time=64)
    log_decay = torch.full((2, 64, 3), -1.88, dtype=torch.float64, requires_grad=True)
    nearer = torch.autograd.graph.saved_tensors_hooks(
        lambda t: 0.99 * t if t.is_floating_point() and (t == -1.88).all() else t, lambda t: t)
    exact = torch.autograd.grad(linear_attention(q, k, v, log_decay=log_decay, normalise=False)[0].sum(), log_decay)[0]
    with nearer:
        y = linear_attention(q, k, v, log_decay=log_decay, normalise=False)[0]
    found = torch.autograd.grad(y.sum(), log_decay)[0]
    assert not torch.equal(found, exact) and (found - exact).norm() < 0.1 * exact.norm()


@pytest.mark.parametrize("time", [1, 63, 64, 65, 127, 1025])
def test_chunked_equals_recurrence_at_odd_lengths(time):
    q, k, v = inputs(time=time, batch=1, heads=2)
    with backend.using("reference"):
        expected = linear_attention(q, k, v)
    got = linear_attention(q, k, v)
    assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-12) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("log_decay", [-0.5, -8.0])
def test_strong_decay_does_not_overflow(log_decay):
    """C09: the decay is masked before it is exponentiated, forward and backward."""
    q, k, v = inputs(time=256, batch=1, heads=1, grad=True)
    decay = torch.full((1, 256, 1), log_decay, dtype=torch.float64, requires_grad=True)
    y = linear_attention(q, k, v, log_decay=decay, normalise=False)[0]
    with backend.using("reference"):
        expected = linear_attention(q, k, v, log_decay=decay, normalise=False)[0]
    assert torch.allclose(y, expected, atol=1e-10)
    got, wanted = (torch.autograd.grad(out.sum(), (q, k, v, decay)) for out in (y, expected))
    assert all(torch.isfinite(a).all() and torch.allclose(a, b, atol=1e-8) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("strong", [-100.0, -1e6, float("-inf")])
@pytest.mark.parametrize("normalise", [True, False])
def test_a_strong_decay_leaves_the_weak_ones_after_it_exact(strong, normalise):
    q, k, v = (t.float().requires_grad_() for t in inputs(time=64, batch=1, heads=1))
    decay = torch.full((1, 64, 1), -0.05)
    decay[:, 3] = strong
    y = linear_attention(q, k, v, log_decay=decay, normalise=normalise)[0]
    with backend.using("reference"):
        wide = (t.detach().double() for t in (q, k, v))
        expected = linear_attention(*wide, log_decay=decay.double(), normalise=normalise)[0]
    assert (y - expected).abs().max() < 1e-5 * expected.abs().max()
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(y.sum(), (q, k, v)))


def test_long_and_large_half_precision_keys_are_finite_and_right():
    """4,096 keys of norm 20 in float16: the state grows past what float16 holds."""
    torch.manual_seed(0)
    q, k, v = (torch.rand(1, 4096, 1, 16, dtype=torch.float64) for _ in range(3))
    k = (20 * k / k.norm(dim=-1, keepdim=True)).half()
    y, kv, _ = linear_attention(q.half(), k, v.half())
    expected = linear_attention(q.half().double(), k.double(), v.half().double())
    assert kv.amax() > 4096 and (kv - expected[1]).norm() < 1e-5 * expected[1].norm()
    assert y.dtype == torch.float16 and (y - expected[0]).norm() < 1e-3 * expected[0].norm()


@pytest.mark.slow
def test_operator_is_registered_as_pytorch_wants_it(small_chunks):
    q, k, v = inputs(time=6, batch=1, heads=2, grad=True)
    log_decay = (-torch.rand(1, 6, 2).double()).requires_grad_()
    state, ids = torch.rand(1, 2, 5, 4).double().requires_grad_(), torch.ones(1, 6, dtype=torch.int32)
    run = torch.ops.mixerlab.linear_attention_portable.default
    gain = torch.rand(1, 6, 2).double().requires_grad_()
    for some in ((log_decay, gain, state, ids, ids[:, 0]), (None, None, state, None, None)):
        torch.library.opcheck(run, (q, k, v, *some, False, some[0] is not None))


def test_an_empty_batch_is_an_empty_result(implementation):
    q, k, v = (t[:0] for t in inputs())
    y, kv, z = linear_attention(q, k, v)
    assert y.shape == v.shape and kv.shape == (0, 3, 5, 4) and z.shape == (0, 3, 5)


def test_state_is_at_least_fp32(implementation):
    q, k, v = (t.to(torch.bfloat16) for t in inputs())
    y, kv, z = linear_attention(q, k, v)
    assert y.dtype == torch.bfloat16 and kv.dtype == z.dtype == torch.float32


@pytest.mark.parametrize("normalise", [True, False])
def test_flops_are_the_multiply_adds_of_the_recurrence(normalise):
    batch, time, heads, key_dim, value_dim = 2, 7, 3, 5, 4
    count = 0
    for _ in range(batch * time * heads):
        count += key_dim * value_dim + key_dim * value_dim  # S += k v^T, then q S
        count += 2 * key_dim if normalise else 0  # z += k (one weight of 1), then q . z
    q, v = torch.empty(batch, time, heads, key_dim), torch.empty(batch, time, heads, value_dim)
    with flops.FlopCounter() as counter:
        linear_attention(q, q, v, normalise=normalise)
    assert counter.total == 2 * count


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(causal=False, log_decay=torch.zeros(3).double()), "causal=False has no decay"),
        (dict(kv=torch.zeros(2, 3, 4, 4)), r"kv must have shape \[2, 3, 5, 4\]"),
        (dict(kv=torch.zeros(2, 3, 5, 4)), "kv must be of dtype torch.float64 or wider .* got torch.float32"),
        (dict(kv=torch.zeros(2, 3, 5, 4).double(), documents=IDS), "needs `document`"),
        (dict(log_decay=torch.zeros(2)), "log_decay must have shape"),
    ],
    ids=lambda part: None if isinstance(part, dict) else part[:12],
)
def test_bad_input_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        linear_attention(*inputs(), **change)


def test_groups_must_divide_heads():
    q, k, v = inputs()
    with pytest.raises(ValueError, match="H=3 heads of v must be a multiple of G=2 groups of q and k"):
        linear_attention(q[:, :, :2], k[:, :, :2], v)


def test_a_state_has_its_normaliser_or_none():
    q, v = torch.rand(1, 4, 1, 3), torch.rand(1, 4, 1, 3)
    _, kv, z = linear_attention(q, q, v)
    for options in (dict(kv=kv), dict(z=z), dict(kv=kv, z=z, normalise=False)):
        with pytest.raises(ValueError, match="a state is kv, and z beside it with normalise=True alone"):
            linear_attention(q, q, v, **options)
