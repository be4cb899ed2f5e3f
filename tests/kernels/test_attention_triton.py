"""The Triton kernels of attention against the float64 definition: on the GPU, or in Triton's interpreter without one.

Error budget: where the definition, computed in the kernels' own dtype, is off by e, a kernel may be off by 2 e and one
rounding of what it sums. All inputs are views into memory full of NaN, all outputs lie between fences of NaN.
"""

from __future__ import annotations

import importlib.util
from itertools import combinations, product
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from kernels import backend
from kernels.attention import reference
from kernels.attention.op import attention


def _load(name):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


covering = _load("covering").covering
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.usefixtures("small_tiles", "fences")


def surrounded(t):
    """The same numbers as a view into memory that is NaN everywhere else."""
    shape = [n + 2 for n in t.shape[:-1]] + [t.shape[-1] + 8]
    memory = torch.full(shape, float("nan"), dtype=t.dtype, device=t.device)
    view = memory[tuple(slice(1, n + 1) for n in t.shape[:-1])][..., : t.shape[-1]]
    return view.copy_(t)


def documents(queries, keys):
    """[2, T] and [2, S]: pads, several documents and pads again, ends aligned, rows cut at different places."""
    length = max(queries, keys)
    ids = torch.zeros(2, length, dtype=torch.int32)
    for row, cuts in enumerate(((0.1, 0.5, 0.9), (0.0, 0.25, 1.0))):
        first, middle, last = (int(length * cut) for cut in cuts)
        ids[row, first:middle], ids[row, middle:last] = 1, 2
    return ids[:, length - queries :], ids[:, length - keys :]


def positions(queries, keys):
    """[2, T] and [2, S]: keys in the order of a ring, at another place in each row."""
    q = torch.arange(keys - queries, keys).expand(2, -1)
    return q, torch.stack([torch.arange(keys).roll(5), torch.arange(keys).roll(-17)])


def place(which, queries, keys):
    """The four arguments that say who stands where."""
    found = {}
    if "documents" in which:
        found["q_documents"], found["k_documents"] = documents(queries, keys)
        if which.startswith("one"):
            del found["k_documents" if "q_" in which else "q_documents"]
    if "positions" in which:
        found["q_positions"], found["k_positions"] = positions(queries, keys)
        if "k_documents" in found:
            found["k_documents"] = found["k_documents"].gather(1, found["k_positions"])
    return {name: t.to(DEVICE) for name, t in found.items()}


OPTIONS = {
    "places": [
        "none", "documents", "positions", "positions and documents", "one-sided q_documents", "one-sided k_documents",
    ],
    "lengths": [(70, 70), (33, 95), (90, 40), (1, 131), (3, 130)],
    "dtype": [torch.float32, torch.bfloat16, torch.float16],
    "window": [None, 1, 20],
    "heads": [(2, 1), (2, 2), (4, 2)],
    "widths": [(32, 32), (16, 40), (24, 16)],
    "causal": [True, False],
    "softcap": [None, 1.5],
    "scale": [None, 0.4],
    "slopes": [False, True],
    "sinks": [False, True],
    "lse": [False, True],
}  # fmt: skip
PLAIN = {name: values[0] for name, values in OPTIONS.items()}
ALONE = [PLAIN | {name: value} for name, values in OPTIONS.items() for value in values[1:]]
CASES = [PLAIN, *ALONE, *covering(OPTIONS)]


def test_every_pair_of_options_is_covered():
    rows = covering(OPTIONS)
    for a, b in combinations(OPTIONS, 2):
        assert {(row[a], row[b]) for row in rows} == set(product(OPTIONS[a], OPTIONS[b]))
    assert rows == covering(OPTIONS)


def results(case, inputs, precision, implementation):
    """y, the finite part of the log-sum-exp and all gradients, computed in `precision`, given in float64."""
    q, k, v, slopes, sinks, dy, dlse = inputs
    q, k, v = (surrounded(t.to(precision)).requires_grad_() for t in (q, k, v))
    heads = dict(alibi_slopes=slopes, sinks=sinks)
    wide = torch.promote_types(precision, torch.float32)
    heads = {name: None if t is None else t.to(wide).requires_grad_() for name, t in heads.items()}
    queries, keys = case["lengths"]
    with backend.using(implementation):
        y, lse = attention(
            q, k, v, causal=case["causal"], window=case["window"], softcap=case["softcap"], scale=case["scale"],
            **heads, **place(case["places"], queries, keys), return_lse=True,
        )  # fmt: skip
    seen = torch.isfinite(lse)
    value = (y * dy.to(y.dtype)).sum()
    if case["lse"]:
        value = value + (torch.where(seen, lse, 0) * dlse.to(lse.dtype)).sum()
    leaves = {"q": q, "k": k, "v": v} | {name: t for name, t in heads.items() if t is not None}
    gradients = torch.autograd.grad(value, list(leaves.values()))
    found = {"y": y, "lse": torch.where(seen, lse, -1e4)} | {
        f"d{name}": g for name, g in zip(leaves, gradients, strict=True)
    }
    return {name: t.detach().double() for name, t in found.items()}


def magnitudes(case, inputs):
    """What the gradients sum with every term positive: roundings are relative to that, also where terms cancel.

    A term is p |dy| |v|; p itself comes from an exponent, the score less the log-sum-exp, rounded in fp32.
    """
    q, k, v, slopes, sinks, dy, dlse = (t if t is None else t.detach() for t in inputs)
    (queries, keys), (heads, groups) = case["lengths"], case["heads"]
    where = place(case["places"], queries, keys)
    identity = torch.eye(keys, dtype=torch.float64, device=DEVICE).expand(2, groups, -1, -1).transpose(1, 2)
    with backend.using("reference"):
        weights, lse = attention(
            q, k, identity, causal=case["causal"], window=case["window"], softcap=case["softcap"], scale=case["scale"],
            alibi_slopes=slopes, sinks=sinks, **where, return_lse=True,
        )  # fmt: skip
    finer = torch.finfo(torch.float32).eps / torch.finfo(case["dtype"]).eps
    weights = weights * (1 + finer * torch.where(lse.isfinite(), lse, 0).abs()[..., None])
    k, v = (t.repeat_interleave(heads // groups, 2) for t in (k, v))
    terms = weights * (torch.einsum("bthv,bshv->bths", dy.abs(), v.abs()) + case["lse"] * dlse.abs()[..., None])
    scale = case["scale"] or case["widths"][0] ** -0.5
    ends = (where.get("q_positions"), where.get("k_positions"))
    distance = reference.distances(queries, keys, *ends, q.device).abs()
    dq = scale * torch.einsum("bths,bshk->bthk", terms, k.abs())
    dk, dv = scale * torch.einsum("bths,bthk->bshk", terms, q.abs()), torch.einsum("bths,bthv->bshv", weights, dy.abs())
    dk, dv = (t.unflatten(2, (groups, -1)).sum(3) for t in (dk, dv))
    dslopes = (terms * distance[:, :, None]).sum((0, 1, 3))
    return {"dq": dq.amax(), "dk": dk.amax(), "dv": dv.amax(), "dalibi_slopes": dslopes.amax()}


def random_inputs(case):
    """q, k, v, slopes, sinks, dy and dlse in float64, whose first three and dy the case's dtype holds exactly."""
    torch.manual_seed(0)
    (queries, keys), (heads, groups), (width, values) = case["lengths"], case["heads"], case["widths"]
    shapes = (queries, heads, width), (keys, groups, width), (keys, groups, values), (queries, heads, values)
    q, k, v, dy = (torch.randn(2, *s).to(case["dtype"]).double().to(DEVICE) for s in shapes)
    slopes = 2.0 ** -torch.arange(1.0, heads + 1) if case["slopes"] else None
    sinks = torch.randn(heads) if case["sinks"] else None
    dlse = torch.randn(2, queries, heads)
    rest = [t if t is None else t.double().to(DEVICE) for t in (slopes, sinks, dlse)]
    return q, k, v, rest[0], rest[1], dy, rest[2]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(v).replace("torch.", "") for v in case.values()))
def test_error_is_within_twice_that_of_the_definition_in_the_same_precision(case):
    inputs = random_inputs(case)
    truth = results(case, inputs, torch.float64, "reference")
    plain = results(case, inputs, case["dtype"], "reference")
    got = results(case, inputs, case["dtype"], "triton")
    summed = magnitudes(case, inputs)
    for name, right in truth.items():
        rounding = torch.finfo(case["dtype"]).eps * max(right.abs().amax(), summed.get(name, 0))
        allowed = 2 * (plain[name] - right).abs().amax() + rounding
        assert (got[name] - right).abs().amax() <= allowed, name
