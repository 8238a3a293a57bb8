"""Short messages through memory: by rank, in turn, between ranks that lag behind; who waits for the gone learns it."""

import mmap
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from fullframe.horovod import board
from fullframe.horovod.board import BLOCK, Board, board_between
from fullframe.ranks.shared_file import can_share_memory, life_of
from tests.rank_group import rank_group

HERE = os.getpid(), life_of(os.getpid()) or ""


def boards(*lives: tuple[int, str], seconds: float = 60.0) -> list[Board]:
    """Those of ranks that all are threads of this process."""
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    return [Board(rank, list(lives), memory, seconds) for rank in range(len(lives))]


def in_thread(run: Callable[[], Any]) -> Callable[[], str]:
    """Begins; waits for the error that it ends in."""
    said: list[str] = []

    def guarded() -> None:
        try:
            run()
        except dist.DistNetworkError as error:
            said.append(str(error))

    thread = threading.Thread(target=guarded)
    thread.start()

    def joined() -> str:
        thread.join(60)
        return said[0]

    return joined


def padded(text: str) -> bytes:
    return text.encode().ljust(BLOCK, b"\0")


def talk(seed: int, count: int) -> bool:
    rank, size = dist.get_rank(), dist.get_world_size()
    made = board_between(rank, size, 60.0, over_gloo)
    assert made is not None
    lag, right = random.Random(seed + rank), True
    for number in range(count):
        if lag.random() < 0.02:
            time.sleep(lag.random() * 0.01)
        found = made.exchange(padded(f"{number} of {rank}"), eager=number % 3 > 0)
        right &= found == [padded(f"{number} of {other}") for other in range(size)]
    return right


def over_gloo(message: bytes) -> list[bytes]:
    found: list[bytes] = [b""] * dist.get_world_size()
    dist.all_gather_object(found, message)
    return found


@pytest.mark.skipif(not can_share_memory(), reason="only on x86-64 with /dev/shm")
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_hears_all_in_turn(ranks: int, seed: int) -> None:
    assert all(rank_group(ranks).run(talk, seed, 600))


def refuse(which: str) -> tuple[bool, int]:
    """One rank cannot map the file, or sees another process where one of them should be."""
    rank, size, kept = dist.get_rank(), dist.get_world_size(), (board.mapped, board.life_of)
    if rank == 1 and which == "memory":
        board.mapped = lambda name, length: None
    elif rank == 1:
        board.life_of = lambda pid: "another"
    try:
        return board_between(rank, size, 60.0, over_gloo) is None, len(over_gloo(b""))
    finally:
        board.mapped, board.life_of = kept


@pytest.mark.parametrize("which", ["memory", "lives"])
def test_where_one_cannot_none_does(which: str) -> None:
    assert rank_group(2).run(refuse, which) == [(True, 2), (True, 2)]


def test_who_waits_for_one_that_leaves_learns_it() -> None:
    one, other = boards(HERE, HERE)
    said = in_thread(lambda: one.exchange(b"", eager=True))
    time.sleep(0.01)
    other.close()
    assert said() == "rank 1 of 2 has left"


def test_what_was_said_before_leaving_is_heard() -> None:
    one, other = boards(HERE, HERE)
    said = in_thread(lambda: other.exchange(padded("last"), eager=False))
    assert one.exchange(padded("first"), eager=False) == [padded("first"), padded("last")]
    with pytest.raises(IndexError):  # nothing was raised there
        said()
    other.close()
    with pytest.raises(dist.DistNetworkError, match="rank 1 of 2 has left"):
        one.exchange(b"", eager=False)


def test_a_thread_that_waits_ends_when_its_own_rank_leaves() -> None:
    one, _ = boards(HERE, HERE)
    said = in_thread(lambda: one.exchange(b"", eager=False))
    time.sleep(0.01)
    one.close()
    assert said() == "this rank has left"


def test_who_waits_for_the_dead_learns_it() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    lives = HERE, (process.pid, life_of(process.pid) or "")
    said = in_thread(lambda: boards(*lives)[0].exchange(b"", eager=True))
    process.communicate(b"\n")
    assert said().startswith("rank 1 died")


def test_who_waits_too_long_learns_it() -> None:
    with pytest.raises(dist.DistNetworkError, match="rank 1 died or said nothing"):
        boards(HERE, HERE, seconds=0.05)[0].exchange(b"", eager=False)
