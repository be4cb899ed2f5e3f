from __future__ import annotations

import pytest
import torch

from experiments import measure
from experiments.measure import Clock, PeakMemory

CPU = torch.device("cpu")


def test_the_clock_counts_only_between_start_and_stop(monkeypatch):
    now = iter([10.0, 11.5, 20.0, 21.0])
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(now))
    clock = Clock(CPU)
    # Stopping what stands still and starting what runs look at no time.
    clock.stop()
    clock.start()
    clock.start()
    clock.stop()
    clock.start()
    clock.stop()
    assert clock.seconds == pytest.approx(1.5 + 1.0)


def test_a_small_job_after_a_large_one_has_its_own_peak():
    # Case C30.
    def job(megabytes):
        peak = PeakMemory(CPU)
        block = torch.ones(megabytes * 250_000)
        assert block.sum() > 0
        return peak.bytes()

    small, large, again = job(1), job(400), job(1)
    assert large > small + 350e6
    assert again < small + 50e6


def test_without_a_reset_only_the_first_jobs_peak_is_told(monkeypatch):
    monkeypatch.setattr(measure, "_can_reset", False)
    monkeypatch.setattr(measure, "_resets", 0)
    assert PeakMemory(CPU).bytes() > 0
    assert PeakMemory(CPU).bytes() is None
