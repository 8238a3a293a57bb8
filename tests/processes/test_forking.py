"""Workers that are forked while another thread enters the interpreter, which may leave them stuck before 3.12."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fullframe.processes import forking
from fullframe.processes.forking import worker_context
from tests.rank_group import rank_group

# The hook below is run where a child of Python 3.11 gets stuck, and sticks where the real fault would.
STUCK_ONCE = """
import os, sys, time
from pathlib import Path
stuck = Path(sys.argv[1])

def stick():
    if len(list(stuck.iterdir())) < int(sys.argv[2]):
        (stuck / str(os.getpid())).touch()
        time.sleep(600)

os.register_at_fork(after_in_child=stick)  # after-fork hooks run in the order in which they were registered
from fullframe.processes import forking
from fullframe.processes.forking import worker_context
forking._PATIENCE_SECONDS = 0.5

if __name__ == "__main__":
    context = worker_context(None)
    queue = context.SimpleQueue()
    worker = context.Process(target=queue.put, args=("alive",))
    worker.start()
    print(queue.get())
    worker.join()
    print(worker.exitcode, len(os.listdir("/proc/self/fd")))
"""


def test_a_child_that_does_not_begin_is_forked_again(tmp_path) -> None:
    found = {}
    for times in (0, 2):
        folder = tmp_path / str(times)
        folder.mkdir()
        job = subprocess.run(
            [sys.executable, "-c", STUCK_ONCE, str(folder), str(times)], capture_output=True, text=True, timeout=200
        )
        assert job.returncode == 0, job.stderr
        found[times] = job.stdout
        gone = [int(path.name) for path in folder.iterdir()]
        assert len(gone) == times
        for pid in gone:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
    assert found[0].splitlines()[0] == "alive"
    assert found[2] == found[0], "the same answer, and no file left open"


class Group:
    """What keeps a process group of two ranks until Python collects it."""

    def __init__(self) -> None:
        self.itself, self.group = self, dist.new_group([0, 1])
        dist.all_reduce(torch.ones(3), group=self.group)
        dist.destroy_process_group(self.group)


def _child_that_collects() -> int | None:
    gc.disable()
    Group()
    child = worker_context(multiprocessing.get_context("fork")).Process(target=gc.collect)
    child.start()
    child.join(20)
    gc.enable()
    code = child.exitcode
    child.kill()
    return code


def test_a_child_leaves_alone_what_its_parent_has_left() -> None:
    assert rank_group(2).run(_child_that_collects) == [0, 0]


def test_a_child_that_ends_at_once_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forking, "_PATIENCE_SECONDS", 1000.0)  # longer than a test may take
    context = worker_context(multiprocessing.get_context("fork"))
    worker = context.Process(target=os._exit, args=(7,))
    worker.start()
    worker.join()
    assert worker.exitcode == 7


def test_other_contexts_are_left_alone() -> None:
    spawn = multiprocessing.get_context("spawn")
    assert worker_context(spawn) is spawn


def _stay() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(os.environ["READY_OF_THE_TEST"]).touch()
    time.sleep(1000)


def test_who_ends_a_worker_that_ignores_signals_does_not_wait(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("READY_OF_THE_TEST", str(tmp_path / "ready"))
    context = worker_context(multiprocessing.get_context("fork"))
    worker = context.Process(target=_stay)
    worker.start()
    while not (tmp_path / "ready").exists():
        time.sleep(0.01)
    worker.terminate()
    worker.join(60)
    assert worker.exitcode == -signal.SIGKILL
