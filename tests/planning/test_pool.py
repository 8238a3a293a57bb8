"""Simulations in processes of their own."""

import os
import signal
import subprocess
import sys
import time
from typing import Any

import psutil
import pytest

from fullframe.errors import FullframeError
from fullframe.planning.pool import in_time, runner

PLANNING = """
import os, time
from fullframe.planning.pool import runner

def work(item):
    os.write(1, f"{os.getpid()}\\n".encode())
    time.sleep(600)

with runner(work, 2) as run:
    run([1, 2])
"""


def test_workers_end_with_a_planner_that_is_killed() -> None:
    """As the look for another strategy is, after an out-of-memory, when its minute is over."""
    planner = subprocess.Popen([sys.executable, "-c", PLANNING], stdout=subprocess.PIPE, text=True)
    assert planner.stdout is not None
    workers = [psutil.Process(int(planner.stdout.readline())) for _ in range(2)]
    planner.kill()
    planner.wait()
    planner.stdout.close()
    try:
        for worker in workers:
            for _ in range(100):
                if not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE:
                    break
                time.sleep(0.1)
            else:
                raise AssertionError(f"{worker} is still there")
    finally:
        for worker in workers:
            if worker.is_running():
                worker.kill()


def killed(item: int) -> Any:
    if item == 2:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_simulation_that_is_killed_says_what_may_have_killed_it() -> None:
    with pytest.raises(FullframeError, match="memory ran out"), runner(killed, 2) as run:
        run([1, 2, 3])


def test_nothing_is_begun_when_the_time_is_over() -> None:
    taken = list[int]()

    def run(items: Any) -> list[None]:
        taken.extend(items)
        return [None] * len(items)

    assert in_time(run, [1, 2, 3], 2, time.monotonic() + 600) == [None] * 3 and taken == [1, 2, 3]
    assert in_time(run, [4], 2, time.monotonic() - 1) == [] and taken == [1, 2, 3]
