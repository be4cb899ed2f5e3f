"""kernels/attention against loops over pairs, torch's own attention and brute force over the mask."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels import backend, flops
from kernels.attention.op import attention, moved_bytes, score_bytes, visible_pairs

IMPLEMENTATIONS = ("portable", "reference")


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    with backend.using(request.param):
        yield request.param


def by_pairs(q, k, v, visible, *, scale=None, softcap=None, slopes=None, sinks=None):
    """The definition, a query, head and key at a time in Python floats; `visible(b, i, j)` is the distance or None."""
    batch, queries, heads, width = q.shape
    y = torch.zeros(batch, queries, heads, v.shape[3], dtype=torch.float64)
    lse = torch.full((batch, queries, heads), float("-inf"), dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            g = h // (heads // k.shape[2])
            for i in range(queries):
                scores = {}
                for j in range(k.shape[1]):
                    distance = visible(b, i, j)
                    if distance is None:
                        continue
                    s = float(q[b, i, h] @ k[b, j, g]) * (width**-0.5 if scale is None else scale)
                    s = s if softcap is None else softcap * math.tanh(s / softcap)
                    scores[j] = s - (0 if slopes is None else float(slopes[h]) * abs(distance))
                total = sum(math.exp(s) for s in scores.values()) + (0 if sinks is None else math.exp(float(sinks[h])))
                for j, s in scores.items():
                    y[b, i, h] += math.exp(s) / total * v[b, j, g]
                if total:
                    lse[b, i, h] = math.log(total)
    return y, lse


def random_qkv(queries=5, keys=7, heads=4, groups=2, key_dim=6, value_dim=3, batch=2, dtype=torch.float64, grad=False):
    torch.manual_seed(queries * 100 + keys)
    shapes = ((batch, queries, heads, key_dim), (batch, keys, groups, key_dim), (batch, keys, groups, value_dim))
    return [torch.randn(s, dtype=dtype, requires_grad=grad) for s in shapes]


def end_aligned(queries, keys, causal, window):
    def visible(b, i, j):
        d = i + keys - queries - j
        inside = d >= 0 if causal else True
        return d if inside and (window is None or abs(d) < window) else None

    return visible


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (2, 5), (1, 7), (5, 2), (7, 7)])
def test_equals_definition_end_aligned(implementation, causal, window, queries, keys):
    q, k, v = random_qkv(queries, keys)
    expected, lse = by_pairs(q, k, v, end_aligned(queries, keys, causal, window))
    y, got_lse = attention(q, k, v, causal=causal, window=window, return_lse=True)
    assert torch.allclose(attention(q, k, v, causal=causal, window=window), expected, atol=1e-12)
    assert torch.allclose(y, expected, atol=1e-12)
    assert torch.allclose(got_lse, lse, atol=1e-12)


@pytest.mark.parametrize(
    "options",
    [
        dict(scale=1.0),
        dict(scale=0.3),
        dict(softcap=0.7),
        dict(slopes=True),
        dict(sinks=True),
        dict(softcap=2.0, slopes=True, sinks=True),
    ],
    ids=str,
)
def test_options_equal_definition(implementation, options):
    q, k, v = random_qkv(5, 5)
    slopes = torch.tensor([0.5, 0.25, 0.125, 2.0], dtype=torch.float64) if options.pop("slopes", False) else None
    sinks = torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64) if options.pop("sinks", False) else None
    expected, _ = by_pairs(q, k, v, end_aligned(5, 5, True, None), slopes=slopes, sinks=sinks, **options)
    assert torch.allclose(attention(q, k, v, alibi_slopes=slopes, sinks=sinks, **options), expected, atol=1e-12)


@pytest.mark.parametrize("window", [None, 2])
def test_positions_and_documents_equal_definition(implementation, window):
    q, k, v = random_qkv(4, 6)
    q_positions = torch.tensor([[3, 4, 5, 6], [0, 1, 2, 3]])
    k_positions = torch.tensor([[4, 5, 2, 3, 6, 1], [0, 1, 2, 3, 2**30, 2**30]])
    q_documents = torch.tensor([[1, 1, 2, 0], [3, 3, 3, 3]], dtype=torch.int32)
    k_documents = torch.tensor([[1, 2, 1, 1, 2, 0], [3, 3, 3, 3, 3, 3]], dtype=torch.int32)

    def visible(b, i, j):
        d = int(q_positions[b, i] - k_positions[b, j])
        same = q_documents[b, i] == k_documents[b, j] and q_documents[b, i] > 0
        return d if same and d >= 0 and (window is None or d < window) else None

    expected, _ = by_pairs(q, k, v, visible)
    got = attention(
        q,
        k,
        v,
        window=window,
        q_positions=q_positions,
        k_positions=k_positions,
        q_documents=q_documents,
        k_documents=k_documents,
    )
    assert torch.allclose(got, expected, atol=1e-12)
    assert (got[0, 3] == 0).all()


@pytest.mark.parametrize("side", ["q", "k"])
def test_one_sided_documents_only_hide_pads(implementation, side):
    q, k, v = random_qkv(4, 4)
    ids = torch.tensor([[1, 2, 0, 3], [0, 1, 1, 1]], dtype=torch.int32)
    expected, _ = by_pairs(q, k, v, lambda b, i, j: 0 if ids[b, i if side == "q" else j] else None)
    assert torch.allclose(attention(q, k, v, causal=False, **{f"{side}_documents": ids}), expected, atol=1e-12)


def test_row_with_nothing_to_see_is_zero_with_the_gradients_of_the_row_deleted(implementation):
    """C03: a masked row must not poison gradients, even when its output is unused."""
    q, k, v = random_qkv(4, 4, heads=2, groups=2, grad=True)
    q_documents = torch.tensor([[1, 1, 0, 1]] * 2, dtype=torch.int32)
    keys = torch.ones(2, 4, dtype=torch.int32)
    y = attention(q, k, v, causal=False, q_documents=q_documents, k_documents=keys)
    assert (y[:, 2] == 0).all()
    for used in (y.square().sum(), y[:, [0, 1, 3]].square().sum()):
        got = torch.autograd.grad(used, (q, k, v), retain_graph=True)
        rest = attention(q[:, [0, 1, 3]], k, v, causal=False)
        expected = torch.autograd.grad(rest.square().sum(), (q, k, v))
        for a, b in zip(got, expected, strict=True):
            assert torch.isfinite(a).all()
            assert torch.allclose(a, b, atol=1e-12)
        assert (got[0][:, 2] == 0).all()


def test_decode_of_one_token_sees_all_keys(implementation):
    """C01: torch's own causal flag is aligned top-left, so that one token sees key 0 only."""
    for queries, keys in ((1, 16), (2, 5)):
        q, k, v = random_qkv(keys, keys, heads=1, groups=1, key_dim=8, value_dim=8)
        whole = attention(q, k, v)
        assert torch.allclose(attention(q[:, -queries:], k, v), whole[:, -queries:], atol=1e-12)


def test_alibi_of_one_decoded_token_falls_with_the_distance(implementation):
    """C18: one query behind 6 keys: the bias is -m (5, 4, 3, 2, 1, 0), not 0."""
    q, k, v = torch.zeros(1, 1, 1, 4), torch.zeros(1, 6, 1, 4), torch.eye(6)[None, :, None]
    weights = torch.tensor([-0.5 * d for d in (5, 4, 3, 2, 1, 0)]).softmax(0)
    assert torch.allclose(attention(q, k, v, alibi_slopes=torch.tensor([0.5]))[0, 0, 0], weights)


def test_groups_are_interleaved_and_gradients_summed_over_them(implementation):
    """C35, C36: query head h reads key head h // group; dk and dv are sums over the group; V differs from K."""
    q, k, v = random_qkv(6, 6, heads=6, groups=2, key_dim=16, value_dim=32, grad=True)
    y = attention(q, k, v)
    repeated = [t.detach().repeat_interleave(3, 2).requires_grad_() for t in (k, v)]
    expected = attention(q, *repeated)
    assert torch.allclose(y, expected, atol=1e-12)
    dk, dv = torch.autograd.grad(y.square().sum(), (k, v))
    wide = torch.autograd.grad(expected.square().sum(), repeated)
    for got, full in zip((dk, dv), wide, strict=True):
        assert torch.allclose(got, full.unflatten(2, (2, 3)).sum(3), atol=1e-12)


@pytest.mark.parametrize("time", [1, 17, 127, 1025])
def test_odd_lengths_with_alibi_are_finite_and_right(time):
    """C33."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, time, 2, 8, requires_grad=True) for _ in range(3))
    slopes = torch.tensor([0.5, 0.1])
    y = attention(q, k, v, alibi_slopes=slopes)
    i = torch.arange(time)
    bias = (-slopes[:, None, None] * (i[:, None] - i)).masked_fill(i[:, None] < i, float("-inf"))
    expected = scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), attn_mask=bias).transpose(1, 2)
    assert torch.allclose(y, expected, atol=1e-5)
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(y.sum(), (q, k, v)))


def test_strided_inputs_equal_contiguous_ones(implementation):
    """C32."""
    torch.manual_seed(0)
    fused = torch.randn(2, 9, 3, 4, 16, dtype=torch.float64)
    q, k, v = (
        fused[:, :, 0, :, ::2],
        fused[:, :, 1, :, ::2],
        torch.randn(2, 1, 4, 5, dtype=torch.float64).expand(2, 9, 4, 5),
    )
    expected = attention(q.contiguous(), k.contiguous(), v.contiguous(), window=4)
    assert torch.equal(attention(q, k, v, window=4), expected)


def test_log_sum_exp_has_a_gradient():
    q, k, v = random_qkv(4, 4, grad=True)
    assert torch.autograd.gradcheck(lambda q, k, v: attention(q, k, v, return_lse=True)[1], (q, k, v))


def test_gradients_match_finite_differences(implementation):
    q, k, v = random_qkv(4, 5, grad=True)
    documents = dict(q_documents=torch.tensor([[1, 1, 2, 0]] * 2), k_documents=torch.tensor([[1, 1, 1, 2, 0]] * 2))
    assert torch.autograd.gradcheck(lambda q, k, v: attention(q, k, v, window=3, **documents), (q, k, v))


def test_empty_inputs_give_empty_or_zero_outputs(implementation):
    q, k, v = random_qkv(4, 4)
    assert attention(q[:, :0], k, v).shape == (2, 0, 4, 3)
    assert (attention(q, k[:, :0], v[:, :0]) == 0).all()


def test_dropout_drops_its_share_and_keeps_the_mean():
    torch.manual_seed(0)
    q, k = torch.zeros(1, 400, 1, 4), torch.zeros(1, 400, 1, 4)
    y = attention(q, k, torch.ones(1, 400, 1, 1), causal=False, dropout=0.25)
    assert y.mean().item() == pytest.approx(1, abs=0.01)
    assert y.std().item() == pytest.approx(math.sqrt(0.25 / 0.75 / 400), rel=0.2)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 2, 5, 40])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (7, 7), (3, 9), (1, 20), (9, 3), (0, 5), (5, 0), (17, 17)])
def test_visible_pairs_are_the_sum_over_the_mask(causal, window, queries, keys):
    visible = end_aligned(queries, keys, causal, window)
    count = sum(visible(0, i, j) is not None for i in range(queries) for j in range(keys))
    assert visible_pairs(queries, keys, causal, window) == count


def test_flops_by_hand():
    """C04, C20: 4 B H S^2 D when nothing is masked; T (T + 1) / 2 pairs when causal."""
    q = torch.empty(1, 64, 12, 64, device="meta")
    for causal, expected in ((False, 12_582_912), (True, 4 * 12 * 64 * 64 * 65 // 2)):
        with flops.FlopCounter() as count:
            attention(q, q, q, causal=causal)
        assert count.total == expected and not count.dense


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(window=0), "window=0 must be a whole number of at least 1"),
        (dict(window=1.5), "window=1.5 must be a whole number of at least 1"),
        (dict(scale=0.0), "scale=0.0 must be above 0 and finite"),
        (dict(softcap=math.nan), "softcap=nan must be above 0 and finite"),
        (dict(softcap=0.0), "softcap=0.0 must be above 0 and finite"),
        (dict(dropout=1.0), "dropout=1.0 must be at least 0 and below 1"),
        (dict(k=torch.zeros(2, 4, 3, 6), v=torch.zeros(2, 4, 3, 3)), "H=4 query heads must be a multiple of G=3"),
        (dict(k=torch.zeros(2, 4, 2, 5)), "wants q"),
        (dict(v=torch.zeros(2, 4, 2, 3).half()), "one floating dtype"),
        (dict(v=torch.zeros(2, 4, 2, 3, device="meta")), "one device; got cpu, cpu, meta"),
        (dict(q_positions=torch.zeros(2, 4)), "q_positions and k_positions together"),
        (dict(k_documents=torch.zeros(2, 4)), "k_documents must be integers; got torch.float32"),
        (dict(alibi_slopes=torch.zeros(4, dtype=torch.int32)), "alibi_slopes must be floating; got torch.int32"),
        (dict(sinks=torch.zeros(4, device="meta")), "sinks must be on the device of q, cpu; got meta"),
        (dict(sinks=torch.zeros(3)), r"sinks must have shape \[4\]; got \[3\]"),
        (dict(k_documents=torch.zeros(2, 3)), r"k_documents must have shape \[2, 4\]"),
    ],
    ids=lambda part: None if isinstance(part, dict) else part[:12],
)
def test_bad_input_is_named(change, message):
    q, k, v = random_qkv(4, 4, dtype=torch.float32)
    arguments = dict(q=q, k=k, v=v) | change
    with pytest.raises(ValueError, match=message):
        attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


def test_backend_that_cannot_run_raises():
    q, k, v = random_qkv(4, 4)
    with backend.using("triton"), pytest.raises(ValueError, match="backend='triton' cannot run attention here: "):
        attention(q, k, v)
    with pytest.raises(ValueError, match="backend='fast' is unknown; allowed: auto"):
        backend.use("fast")


@pytest.mark.parametrize(("length", "size"), [(512, 2**19), (4096, 2**25), (32_768, 2**31), (131_072, 2**35)])
def test_score_matrices_are_those_of_the_articles(length, size):
    """0.5 MB, 32 MB, 2 GB and 32 GB: n x n, one head, fp16."""
    assert score_bytes((1, length, 1, 64), (1, length, 1, 64), 2) == size


def test_moved_bytes_by_hand():
    """q and y [2, 3, 4, 8] and [2, 3, 4, 5], k and v [2, 7, 2, 8] and [2, 7, 2, 5], two bytes an entry."""
    moved = 2 * (2 * 3 * 4 * (8 + 5) + 2 * 7 * 2 * (8 + 5))
    assert moved_bytes((2, 3, 4, 8), (2, 7, 2, 8), (2, 7, 2, 5), 2) == moved
