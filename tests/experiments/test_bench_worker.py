from __future__ import annotations

import pytest
import torch

from experiments import bench_worker, cli
from experiments.bench_cell import DECODE, PREFILL, TRAIN, plan
from experiments.bench_worker import Session
from experiments.timing import Reading

TINY = ("model.d_model=16", "model.mlp=none", "accelerator=cpu", "threads=1")


@pytest.fixture
def session():
    """A session in this process."""
    threads = torch.get_num_threads()
    yield lambda *options: Session(plan(cli.composed("bench", [*TINY, *options])))
    torch.set_num_threads(threads)


def test_first_calls_are_left_out_and_each_thing_is_read_once_a_round(session, monkeypatch):
    # Case C21.
    calls, read = [], []

    def reading(call, device, number):
        read.append((call.__name__, number, calls.count(call.__name__)))
        for _ in range(number):
            call()
        return Reading(1.0, 1.0)

    monkeypatch.setattr(bench_worker, "read", reading)
    for name in ("_train", "_prefill", "_decode"):
        real = getattr(Session, name)

        def counted(self, *arguments, name=name, real=real):
            calls.append(name)
            return real(self, *arguments)

        counted.__name__ = name
        monkeypatch.setattr(Session, name, counted)
    # Two calls make a reading long enough.
    monkeypatch.setattr(bench_worker, "calls_needed", lambda call, device: call() or 2)
    monkeypatch.setattr(bench_worker, "peak_flops", lambda *_: 1.0)
    one = session("length=32")
    one.prepare()
    assert read == []
    found = one.round()
    assert set(found) == {TRAIN, PREFILL, DECODE}
    assert [(name, number) for name, number, _ in read] == [("_train", 2), ("_prefill", 2), ("_decode", 2)]
    assert all(before > 0 for *_, before in read)
    one.round()
    assert len(read) == 6


def test_decoding_goes_on_behind_the_whole_prompt(session):
    one = session("length=48", "batch_size=2")
    one.prepare()
    one._prefill()
    assert one.state.length == 48
    one._decode()
    assert one.state.length == 49 and one.state["0.mixer.k"].shape[0] == 2


def test_a_step_is_the_gradient_of_next_token_loss_without_an_update(session):
    one = session("length=32")
    before = {name: p.clone() for name, p in one.model.named_parameters()}
    one._train()
    logits = one.model(one.tokens)
    expected = torch.autograd.grad(torch.nn.functional.cross_entropy(logits[0], one.tokens[0]), one.model.parameters())
    for (name, p), grad in zip(one.model.named_parameters(), expected, strict=True):
        assert torch.equal(p, before[name])
        torch.testing.assert_close(p.grad, grad)


def test_peak_memory_has_what_autograd_keeps_and_a_small_cell_its_own(session):
    # Case C30. The logits of 512 tokens over 20,000 ids are 41 MB; the loss keeps their log-softmax, and the backward
    # writes its gradient beside it.
    large, small = ("length=512", "vocabulary=20000"), ("length=512", "vocabulary=200")
    first = session(*small)._memory()
    most = session(*large)._memory()
    again = session(*small)._memory()
    logits = 512 * 20_000 * 4
    assert 2 * logits < most < 5 * logits
    assert abs(again - first) < 0.1 * logits


def test_the_options_of_the_machine_are_used(session, monkeypatch):
    used = []
    monkeypatch.setattr(bench_worker.backend, "use", used.append)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: used.append(number))
    session("backend=portable", "threads=2", "length=16")
    session("threads=null", "length=16")
    assert used == [2, "portable", "auto"]
