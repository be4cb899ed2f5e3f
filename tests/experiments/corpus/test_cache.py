"""A folder of the cache is whole or not there."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from experiments.corpus.cache import once, place


def write(new: Path) -> None:
    (new / "first").write_text("1")
    (new / "second").write_text("2")


def left(folder: Path) -> list[str]:
    """What is in a folder, locks aside."""
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


def test_a_folder_is_made_once(tmp_path):
    calls = []

    def make(new):
        calls.append(new)
        write(new)

    for _ in range(3):
        assert once(tmp_path / "cache" / "x", make) == tmp_path / "cache" / "x"
    assert len(calls) == 1 and left(tmp_path / "cache") == ["x"]
    assert left(tmp_path / "cache" / "x") == ["first", "second"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_whatever_stops_the_making_nothing_half_written_stays(tmp_path, error):
    def stop(new):
        (new / "first").write_text("1")
        raise error

    with pytest.raises(error):
        once(tmp_path / "x", stop)
    assert left(tmp_path) == []
    once(tmp_path / "x", write)
    assert left(tmp_path) == ["x"]


def hang(new: Path) -> None:
    (new / "third").write_text("3")
    time.sleep(60)


def test_what_a_killed_process_left_is_no_folder_and_is_cleared_away(tmp_path):
    process = multiprocessing.get_context("fork").Process(target=once, args=(tmp_path / "x", hang))
    process.start()
    while not (tmp_path / ".x" / "third").exists():
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert left(tmp_path) == [".x"]
    once(tmp_path / "x", write)
    assert left(tmp_path) == ["x"] and left(tmp_path / "x") == ["first", "second"]


def slow(new: Path) -> None:
    with (new.parent / "log").open("a") as file:
        file.write("made\n")
    time.sleep(0.3)
    write(new)


def test_of_processes_at_once_one_makes_it_and_all_have_it(tmp_path):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=once, args=(tmp_path / "x", slow)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert (tmp_path / "log").read_text() == "made\n" and left(tmp_path) == ["log", "x"]


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cache='.*file' cannot be written: "):
        once(tmp_path / "file" / "x", write)


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path):
    def full(new):
        (new / "first").write_text("1")
        raise OSError(28, "No space left on device")

    with pytest.raises(ValueError, match=r"cache='.*' cannot be written: .*No space left on device"):
        once(tmp_path / "x", full)
    assert left(tmp_path) == []


def test_the_place_is_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert place(None) == tmp_path / "mixerlab" and place("here") == Path("here")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert place(None) == tmp_path / ".cache" / "mixerlab" and place("~/x") == tmp_path / "x"
