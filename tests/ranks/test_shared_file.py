"""Files that processes share: mapped by name, refused where there is no room; and whether a process still runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fullframe.ranks import shared_file
from fullframe.ranks.shared_file import can_share_memory, life_of, mapped, reserve


@pytest.mark.skipif(not can_share_memory(), reason="only on x86-64 with /dev/shm")
def test_what_one_writes_another_reads() -> None:
    name = reserve(4096)
    assert name is not None
    one, other = mapped(name, 4096), mapped(name, 4096)
    os.unlink(name)
    assert one is not None and other is not None and mapped(name, 4096) is None
    one[100:104] = b"here"
    assert other[100:104] == b"here"


KILLED = """
import os
from fullframe.ranks.shared_file import reserve
print(reserve(4096), flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.skipif(not can_share_memory(), reason="only on x86-64 with /dev/shm")
def test_what_a_killed_process_has_left_is_removed_and_no_other() -> None:
    mine = reserve(4096)
    left = subprocess.run([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True).stdout.strip()
    assert mine is not None and Path(mine).exists() and Path(left).exists()
    other = reserve(4096)
    assert other is not None and not Path(left).exists() and Path(mine).exists()
    for name in (mine, other):
        os.unlink(name)


def test_a_full_shared_memory_is_noticed_before_it_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(descriptor: int, start: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shared_file, "_FOLDER", tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", full)
    assert reserve(4096) is None
    assert not list(tmp_path.iterdir())


def test_a_process_lives_until_it_ends() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    began = life_of(process.pid)
    assert began is not None and began == life_of(process.pid)
    process.communicate(b"\n")
    assert life_of(process.pid) is None
