from __future__ import annotations

import pytest
import torch

from experiments import timing
from experiments.timing import Load, Reading, calls_needed, peak_flops, read

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch):
    """A clock that only stands still or is moved: clock["wall"], clock["cpu"]."""
    times = {"wall": 100.0, "cpu": 7.0}
    monkeypatch.setattr(timing.time, "perf_counter", lambda: times["wall"])
    monkeypatch.setattr(timing.time, "process_time", lambda: times["cpu"])
    return times


def working(clock, wall, cpu):
    """A call that takes the seconds of the lists, one after the other, then the last ones for ever."""
    def call():
        clock["wall"] += wall.pop(0) if len(wall) > 1 else wall[0]
        clock["cpu"] += cpu.pop(0) if len(cpu) > 1 else cpu[0]

    return call


def test_a_reading_is_the_mean_of_its_calls(clock):
    assert read(working(clock, [1.0, 2.0, 6.0], [0.5, 1.0, 1.5]), CPU, 3) == Reading(3.0, 1.0)


def test_the_device_has_finished_before_either_end_is_read(monkeypatch):
    # Case C21: a kernel that was only launched takes no time.
    told = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: told.append("synchronised"))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: told.append("clock") or 0.0)
    read(lambda: told.append("call"), torch.device("cuda"), 2)
    assert told == ["synchronised", "clock", "call", "call", "synchronised", "clock"]


def test_short_calls_are_read_together_and_slow_first_ones_do_not_count(clock):
    # 1 and 2 calls are too short, and so are 4 once they are warm; 8 take long enough.
    call = working(clock, [0.1, 0.05, 0.05, 0.03], [0.0])
    assert calls_needed(call, CPU) == 8
    assert calls_needed(working(clock, [timing.LEAST_SECONDS], [0.0]), CPU) == 1


def test_on_a_cpu_others_stretch_the_wall_but_not_the_work():
    assert Reading(3.0, 1.0).busy("cpu") == 1.0
    assert Reading(3.0, 1.0).busy("cuda") == 3.0


def test_the_peak_is_that_of_the_fastest_product(monkeypatch):
    seconds = iter([4.0, 2.0, 8.0, 5.0])
    monkeypatch.setattr(timing, "_CPU_SIZE", 10)
    monkeypatch.setattr(timing, "read", lambda call, device, calls: Reading(0.0, next(seconds)))
    assert peak_flops(CPU, 32) == 2 * 10**3 / 2.0


def test_a_real_product_is_within_its_own_peak():
    # Case C21: the same product again, the first call left out.
    size = timing._CPU_SIZE
    a = torch.ones(size, size)
    call = lambda: a @ a  # noqa: E731
    call()
    peak = max(peak_flops(CPU, 32) for _ in range(3))
    assert 2 * size**3 / read(call, CPU, 5).cpu < 2 * peak


def test_load_is_what_the_machine_did_beyond_our_own_work(clock, monkeypatch):
    machine = iter([1000.0, 1005.0, 2000.0, 2002.0])
    monkeypatch.setattr(timing, "_machine_seconds", lambda: next(machine))
    load = Load()
    for _ in range(2):
        load.start()
        clock["wall"] += 2.0
        clock["cpu"] += 1.0
        load.stop()
    # 5 - 1 in the first two seconds, 2 - 1 in the other two; what lies between is not looked at.
    assert load.cores() == pytest.approx((4.0 + 1.0) / 4.0)
    assert Load().cores() == 0.0


def test_without_proc_load_is_the_average_of_processes_less_our_own(clock, monkeypatch):
    monkeypatch.setattr(timing, "_machine_seconds", lambda: None)
    monkeypatch.setattr(timing.os, "getloadavg", lambda: (3.0, 0.0, 0.0))
    load = Load()
    load.start()
    clock["wall"] += 2.0
    clock["cpu"] += 2.0
    load.stop()
    assert load.cores() == pytest.approx(2.0)


def test_time_that_a_host_took_away_counts_as_others(monkeypatch, tmp_path):
    (tmp_path / "stat").write_text("cpu  100 20 30 4000 500 6 7 800 9 9\ncpu0 1 1 1 1 1 1 1 1 0 0\n")
    monkeypatch.setattr(timing, "Path", lambda _: tmp_path / "stat")
    monkeypatch.setattr(timing.os, "sysconf", lambda _: 100)
    assert timing._machine_seconds() == pytest.approx((100 + 20 + 30 + 6 + 7 + 800) / 100)
    monkeypatch.setattr(timing, "Path", lambda _: tmp_path / "missing")
    assert timing._machine_seconds() is None
