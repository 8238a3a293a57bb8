"""A lock that the kernel takes back."""

import os
import signal
import time

from fullframe.processes.lock import ProcessLock, is_held


def test_one_process_holds_it_until_it_ends(tmp_path):
    path = tmp_path / "lock"
    assert not is_held(path) and not path.exists()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        lock = ProcessLock(path)
        os.write(write, b"1" if lock.is_held else b"0")
        time.sleep(60)
        os._exit(0)
    assert os.read(read, 1) == b"0"
    assert is_held(path)
    mine = ProcessLock(path)
    assert mine.is_held
    mine.release()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert not is_held(path)
    mine = ProcessLock(path)
    assert not mine.is_held
    mine.release()
    mine.release()
    assert not is_held(path)


def test_a_forked_child_does_not_hold_its_parents(tmp_path):
    """Workers of a loader outlive a killed rank for a moment."""
    lock = ProcessLock(tmp_path / "lock")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(read, 1)
        os._exit(0)
    lock.release()
    again = ProcessLock(tmp_path / "lock")
    assert not again.is_held
    again.release()
    os.write(write, b"1")
    os.waitpid(child, 0)
