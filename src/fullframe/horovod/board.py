"""Short messages that ranks of one machine tell each other through memory: a question by gloo takes many times as long.

Each rank has a cell with a count of what it has said, and room for two messages in turn. It says the next but one only
once all have said the next, and they do that after they have read this one.
"""

import mmap
import os
import time
from collections.abc import Callable

import torch.distributed as dist

from fullframe.ranks.shared_file import can_share_memory, life_of, mapped, reserve

BLOCK = 256  # bytes of a message
_LINE = 64  # bytes: the cell's words, in a cache line of their own
_CELL = _LINE + 2 * BLOCK
_SAID, _LEFT = 0, 1  # words of a cell: how many messages, and that no more will come
_SPIN_SECONDS = 0.002
_LOOKS = 20  # before another thread of this process may go on: `sched_yield` lets other processes alone
_SHORTEST_NAP, _LONGEST_NAP = 0.00002, 0.001
_LOOK_SECONDS = 0.02  # between looks whether the other rank runs


class Board:
    """The cells of the ranks whose processes are `lives`, of which this one is `rank`; made by `board_between`."""

    def __init__(self, rank: int, lives: list[tuple[int, str]], memory: mmap.mmap, timeout_seconds: float):
        self._rank, self._lives, self._memory = rank, lives, memory
        self._words = memoryview(memory).cast("q")
        self._others = [other for other in range(len(lives)) if other != rank]
        self._said = 0
        self._closed = False
        self._timeout = timeout_seconds

    def exchange(self, block: bytes, eager: bool) -> list[bytes]:
        """The blocks of all ranks, by rank. `eager`: spin before sleeping, as a caller waits.

        Raises DistNetworkError where a rank has died or left, or this one has closed.
        """
        number = self._said = self._said + 1
        start = _start(self._rank, number)
        self._memory[start : start + len(block)] = block
        self._words[_word(self._rank, _SAID)] = number
        for other in self._others:
            if self._words[_word(other, _SAID)] < number:
                self._wait(other, number, eager)
        starts = [_start(rank, number) for rank in range(len(self._lives))]
        return [self._memory[start : start + BLOCK] for start in starts]

    def close(self) -> None:
        """Say no more: a rank that waits for this one gets an error, and so does a thread that waits here."""
        self._closed = True
        self._words[_word(self._rank, _LEFT)] = 1

    def _wait(self, other: int, number: int, eager: bool) -> None:
        words, said, left = self._words, _word(other, _SAID), _word(other, _LEFT)
        begin, looked = time.perf_counter(), 0.0
        spin = _SPIN_SECONDS if eager else 0.0
        while words[said] < number:
            waited = time.perf_counter() - begin
            if self._closed:
                raise dist.DistNetworkError("this rank has left")
            if words[left] and words[said] < number:
                raise dist.DistNetworkError(f"rank {other} of {len(self._lives)} has left")
            if waited >= looked + _LOOK_SECONDS:
                looked, (pid, began) = waited, self._lives[other]
                if waited > self._timeout or life_of(pid) != began:
                    raise dist.DistNetworkError(f"rank {other} died or said nothing for {waited:.1f} s")
            if waited >= spin:
                time.sleep(min(max(waited / 8, _SHORTEST_NAP), _LONGEST_NAP))
                continue
            for _ in range(_LOOKS):
                os.sched_yield()
                if words[said] >= number:
                    return
            time.sleep(0)


def board_between(
    rank: int, size: int, timeout_seconds: float, exchange: Callable[[bytes], list[bytes]]
) -> Board | None:
    """A board for these ranks if they share a machine, else None; all call it, and `exchange` is the slow way."""
    length, possible = size * _CELL, can_share_memory()
    name = reserve(length) if rank == 0 and possible else None
    said = exchange((name or "").encode())[0].decode()
    memory = mapped(said, length) if said and possible else None
    mine = f"{os.getpid()} {life_of(os.getpid())}" if memory is not None else ""
    told = (life.decode().partition(" ") for life in exchange(mine.encode()))
    lives = [(int(pid or 0), began) for pid, _, began in told]
    if name:
        os.unlink(name)  # it lives as long as it is mapped, and no longer
    sees_all = all(pid and life_of(pid) == began for pid, began in lives)  # containers may share memory alone
    if not all(exchange(b"yes" if sees_all else b"")) or memory is None:
        return None
    return Board(rank, lives, memory, timeout_seconds)


def _word(rank: int, which: int) -> int:
    return rank * _CELL // 8 + which


def _start(rank: int, number: int) -> int:
    return rank * _CELL + _LINE + number % 2 * BLOCK
