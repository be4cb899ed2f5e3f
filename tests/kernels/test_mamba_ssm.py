"""mamba-ssm behind our ops. The package needs CUDA to build: a stand-in with its documented formulas is tested."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from kernels import backend
from kernels.attention.op import attention
from kernels.ssm.scan import IMPLEMENTATIONS, selective_scan
from kernels.ssm.ssd import ssd
from mixers import registry


def selective_scan_fn(
    u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False
):
    """u, delta [B, D, L], A [D, N], B, C [B, N, L], all fp32 and contiguous; the state's gradient is left out."""
    assert all(t.dtype == torch.float32 and t.is_contiguous() for t in (u, delta, A, B, C))
    assert not delta_softplus and z is delta_bias is None
    state, outputs = u.new_zeros(*u.shape[:2], A.shape[1]), []
    for i in range(u.shape[2]):
        taken = (delta[:, :, i] * u[:, :, i])[..., None] * B[:, None, :, i]
        state = torch.exp(delta[:, :, i, None] * A) * state + taken
        outputs.append(torch.einsum("bdn,bn->bd", state, C[:, :, i]))
    y = torch.stack(outputs, 2) + (0 if D is None else u * D[:, None])
    return (y, state.detach()) if return_last_state else y


def selective_state_update(state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False):
    """state [B, D, N], written in place; x, dt [B, D], B, C [B, N]."""
    assert not torch.is_grad_enabled() and not dt_softplus and z is dt_bias is None
    state.copy_(torch.exp(dt[..., None] * A) * state + (dt * x)[..., None] * B[:, None])
    return torch.einsum("bdn,bn->bd", state, C) + (0 if D is None else x * D)


def mamba_chunk_scan_combined(
    x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None, cu_seqlens=None,
    dt_softplus=False, dt_limit=(0.0, float("inf")), return_final_states=False,
):  # fmt: skip
    """x [B, L, H, P], dt [B, L, H], A [H], B, C [B, L, G, N], initial states [B, H, P, N]; gradients through both."""
    assert not dt_softplus and D is z is dt_bias is seq_idx is cu_seqlens is None and return_final_states
    B, C = (t.float().repeat_interleave(x.shape[2] // t.shape[2], 2) for t in (B, C))
    state, outputs = initial_states, []
    if state is None:
        state = x.new_zeros(*x.shape[:1], *x.shape[2:], B.shape[3], dtype=torch.float32)
    for i in range(x.shape[1]):
        taken = torch.einsum("bh,bhp,bhn->bhpn", dt[:, i], x[:, i].float(), B[:, i])
        state = torch.exp(dt[:, i] * A)[..., None, None] * state + taken
        outputs.append(torch.einsum("bhpn,bhn->bhp", state, C[:, i]))
    return torch.stack(outputs, 1).to(x.dtype), state


FUNCTIONS = {
    "mamba_ssm.ops.selective_scan_interface": selective_scan_fn,
    "mamba_ssm.ops.triton.selective_state_update": selective_state_update,
    "mamba_ssm.ops.triton.ssd_combined": mamba_chunk_scan_combined,
}


@pytest.fixture
def package(monkeypatch):
    """The stand-in, which also runs on a CPU; every other op runs as ever. Gives the names of what was called."""
    called = []
    names = {".".join(path.split(".")[:depth]) for path in FUNCTIONS for depth in range(1, 5)}
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, function in FUNCTIONS.items():

        def call(*arguments, _function=function, **options):
            called.append(_function.__name__)
            return _function(*arguments, **options)

        setattr(sys.modules[name], function.__name__, call)
    monkeypatch.setattr(backend, "_no_mamba_ssm", lambda like: None)
    torch.set_float32_matmul_precision("high")
    yield called
    torch.set_float32_matmul_precision("highest")


def gradients(mixer, x, name):
    with backend.using(name):
        y = mixer(x)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *mixer.parameters()])]


TRAINED = {"mamba": "selective_scan_fn", "mamba2": "mamba_chunk_scan_combined"}


@pytest.mark.parametrize("name", TRAINED)
def test_a_mixer_trains_on_it_with_the_same_results(package, name):
    torch.manual_seed(0)
    mixer, x = registry.build(name, 32), torch.randn(2, 19, 32, requires_grad=True)
    got, expected = gradients(mixer, x, "mamba_ssm"), gradients(mixer, x, "portable")
    assert package == [TRAINED[name]]
    for a, b in zip(got, expected, strict=True):
        assert (a - b).abs().max() < 1e-5 * b.abs().max()


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_a_mixer_decodes_on_it_with_the_same_results(package, name):
    """A prompt, then one token at a time; each step leaves the state before it alone."""
    torch.manual_seed(0)
    mixer, x, results = registry.build(name, 32), torch.randn(2, 9, 32), []
    for choice in ("mamba_ssm", "portable"):
        with torch.no_grad(), backend.using(choice):
            y, state = mixer.extend(x[:, :6], mixer.start(2, x))
            pieces = [y]
            for t in range(6, 9):
                before, kept = state["state"], state["state"].clone()
                y, state = mixer.extend(x[:, t : t + 1], state)
                pieces.append(y)
                assert torch.equal(before, kept)
        results.append((torch.cat(pieces, 1), state["state"]))
    expected = {"mamba": ["selective_scan_fn", *3 * ["selective_state_update"]]}
    assert package == expected.get(name, 4 * ["mamba_chunk_scan_combined"])
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(*results, strict=True))


def test_mamba_2_has_gradients_through_its_states(package):
    torch.manual_seed(0)
    x, state = torch.randn(1, 5, 2, 3, requires_grad=True), torch.randn(1, 2, 3, 4, requires_grad=True)
    dt, a, (b, c) = torch.rand(1, 5, 2), -torch.rand(2), torch.randn(2, 1, 5, 1, 4).unbind()
    results = []
    for choice in ("mamba_ssm", "portable"):
        with backend.using(choice):
            y, last = ssd(x, dt, a, b, c, d=torch.ones(2), state=state)
        results.append((y, last, *torch.autograd.grad(y.sum() + last.square().sum(), (x, state))))
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(*results, strict=True))


def test_nothing_of_it_is_imported_before_it_runs():
    assert not [name for name in sys.modules if name.split(".")[0] == "mamba_ssm"]


def scan_arguments(dtype=torch.float32, time=5, states=4):
    x, dt, a = torch.randn(1, time, 3, dtype=dtype), torch.rand(1, time, 3), -torch.rand(3, states)
    wide = torch.promote_types(dtype, torch.float32)
    return x, dt.to(wide), a.to(wide), *torch.randn(2, 1, time, states, dtype=dtype).unbind()


REFUSED = {
    "a state": (lambda: selective_scan(*scan_arguments(), state=torch.zeros(1, 3, 4)), "starts from a state of zero"),
    "a token's gradient": (
        lambda: selective_scan(*scan_arguments(time=1), state=torch.zeros(1, 3, 4)), "starts from a state of zero"
    ),
    "a wanted state": (lambda: selective_scan(*scan_arguments()), "no gradient through the state after"),
    "documents": (
        lambda: selective_scan(*scan_arguments(), documents=torch.ones(1, 5, dtype=torch.int32), return_state=False),
        "neither documents nor padding",
    ),
    "float64": (lambda: selective_scan(*scan_arguments(torch.float64), return_state=False), "dtype torch.float64"),
    "states": (lambda: selective_scan(*scan_arguments(states=257), return_state=False), "N=257 must be at most 256"),
    "no tokens": (lambda: selective_scan(*scan_arguments(time=0), return_state=False), "there are no tokens"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_it_does_not_have_is_named(package, what):
    run, message = REFUSED[what]
    with backend.using("mamba_ssm"), pytest.raises(ValueError, match=f"cannot run selective_scan here.*{message}"):
        run()
    assert not package
    run()  # auto takes what has it


def test_full_precision_is_not_rounded_unasked(package):
    x, dt, a, b = torch.randn(1, 5, 2, 3), torch.rand(1, 5, 2), -torch.rand(2), torch.randn(1, 5, 1, 4)
    torch.set_float32_matmul_precision("highest")
    with backend.using("mamba_ssm"), pytest.raises(ValueError, match="ssd here: it rounds products of float32 to TF32"):
        ssd(x, dt, a, b, b)
    with backend.using("mamba_ssm"):
        ssd(x.bfloat16(), dt, a, b.bfloat16(), b.bfloat16())
    assert package == ["mamba_chunk_scan_combined"]


@pytest.mark.parametrize(
    ("here", "refusal", "expected"), [(True, None, "mamba_ssm"), (True, "why", "portable"), (False, None, "portable")]
)
def test_auto_takes_it_on_a_gpu_where_it_is_there_and_has_all(monkeypatch, here, refusal, expected):
    monkeypatch.setattr(backend, "_MAMBA_SSM", here)
    table = {n: f for n, f in IMPLEMENTATIONS.items() if n != "triton"}
    found = [
        backend.implementation("selective_scan", table, SimpleNamespace(device=torch.device(d)), fused_refusal=refusal)
        for d in ("cuda", "cpu")
    ]
    assert found == [table[expected], table["portable"]]


def test_its_absence_is_an_error_only_when_asked_for(monkeypatch):
    monkeypatch.setattr(backend, "_MAMBA_SSM", False)
    selective_scan(*scan_arguments())
    with backend.using("mamba_ssm"), torch.no_grad():
        with pytest.raises(ValueError, match=r"mamba-ssm is not installed \(pip install -e '.\[mamba\]'"):
            selective_scan(*scan_arguments())
        # Ops that it has nothing for run as under auto.
        attention(*torch.randn(3, 1, 4, 2, 8).unbind())
    monkeypatch.setattr(backend, "_MAMBA_SSM", True)
    with backend.using("mamba_ssm"), torch.no_grad(), pytest.raises(ValueError, match="cpu must be on an NVIDIA GPU"):
        selective_scan(*scan_arguments())
