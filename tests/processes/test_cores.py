"""Seconds in which a process stood ready and others had the cores: the kernel's own account of it."""

import os
import time
from pathlib import Path

import pytest

from fullframe.processes import cores
from fullframe.processes.cores import apart, backward_threads, seconds_without_core, too_few


def test_two_that_share_a_core_stand_for_half_the_time() -> None:
    core = {min(os.sched_getaffinity(0))}
    other = os.fork()
    if other == 0:
        os.sched_setaffinity(0, core)
        until = time.perf_counter() + 5.0
        while time.perf_counter() < until:
            pass
        os._exit(0)
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, core)
        stood, began = seconds_without_core(), time.perf_counter()
        while time.perf_counter() - began < 1.0:
            pass
        share = (seconds_without_core() - stood) / (time.perf_counter() - began)
    finally:
        os.sched_setaffinity(0, allowed)
        os.kill(other, 9)
        os.waitpid(other, 0)
    assert share > 0.3, "more where still others want the core"
    stood = seconds_without_core()
    time.sleep(0.2)
    assert seconds_without_core() - stood < 0.1, "one that sleeps does not stand ready"


def test_another_threads_seconds_count_where_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main = tmp_path / "schedstat"
    monkeypatch.setattr(cores, "_MAIN", main)
    monkeypatch.setattr(cores, "_THREADS", tmp_path / "task")
    assert seconds_without_core(7) == 0.0 and backward_threads() == (), "a kernel that keeps no account"
    main.write_text("7 2000000000 1")
    for number, name, ran in ((7, "pt_autograd_0", 5), (8, "pt_autograd_1", 9), (9, "python", 99)):
        folder = tmp_path / "task" / str(number)
        folder.mkdir(parents=True)
        (folder / "comm").write_text(f"{name}\n")
        (folder / "schedstat").write_text(f"{ran} {number}000000000 1")
    assert backward_threads() == (8,), "that has run longest"
    assert seconds_without_core() == 2.0 and seconds_without_core(8) == 10.0
    assert seconds_without_core(8, 10) == 10.0, "a thread that has ended"


def test_little_of_a_step_is_not_worth_saying() -> None:
    assert apart(2.0, 0.1) == (2.0, 0.0)
    assert apart(2.0, 0.5) == (1.5, 0.5)
    assert apart(2.0, 1.9) == (1.0, 1.0)


def test_more_ranks_than_cores_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3})
    assert too_few(1) == ""
    assert too_few(4).startswith("the 4 ranks of this machine have 1 core between them")
