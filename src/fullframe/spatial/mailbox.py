"""Small messages between CPU ranks of one machine, through shared memory in place of gloo's sockets.

Each ordered pair of ranks has a few slots. Both sides count their messages in program order, so a message's slot is
known without a word; a flag in the slot says whether it is there. What does not fit a slot goes by gloo.
Only on x86-64, whose stores become visible in program order: Python has no memory fence.
"""

import mmap
import os
import platform
import tempfile
import time
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

SLOTS = 4
SLOT_BYTES = 512 * 1024
_HEAD_BYTES = 64 * SLOTS  # a flag in a cache line of its own for each slot
_PAIR_BYTES = _HEAD_BYTES + SLOTS * SLOT_BYTES
_FOLDER = Path("/dev/shm")
_SPIN_SECONDS = 0.01
_NAP_SECONDS = 0.0002
_TIMEOUT_SECONDS = 1800.0  # as gloo's


class Place(NamedTuple):
    """Where a message lies: its bytes start at `start`; its flag is `full` when it is there, then `full + 1`."""

    rank: int  # whom to wait for
    start: int
    flag: int
    full: int


class Mailboxes:
    """The slots between this rank and the other `ranks` of one machine; made by `mailboxes_of`."""

    def __init__(self, ranks: Sequence[int], pids: Sequence[int], memory: mmap.mmap):
        self._me = ranks.index(dist.get_rank())
        self._index = {rank: index for index, rank in enumerate(ranks)}
        self._pids = dict(zip(ranks, pids, strict=True))
        self._flags = memoryview(memory).cast("q")
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._sent = [0] * len(ranks)
        self._expected = [0] * len(ranks)
        self._abandoned: list[Place] = []

    def send(self, rank: int, tensor: Tensor) -> None:
        """Copy `tensor` into the next slot towards `rank`; waits while that slot is full."""
        peer = self._index[rank]
        place = self._place(rank, self._me, peer, self._sent[peer])
        self._sent[peer] += 1
        self._wait_for(place, place.full - 1)
        self._contents(place, tensor).copy_(tensor)
        self._flags[place.flag] = place.full

    def expect(self, rank: int) -> Place:
        """The place of the next message from `rank`, for `receive` or `abandon`."""
        peer = self._index[rank]
        self._expected[peer] += 1
        return self._place(rank, peer, self._me, self._expected[peer] - 1)

    def receive(self, place: Place, into: Tensor) -> None:
        """Fill `into` from the message at `place`, once it is there."""
        self._wait_for(place, place.full)
        into.copy_(self._contents(place, into))
        self._flags[place.flag] = place.full + 1

    def abandon(self, place: Place) -> None:
        """Nobody will read this message (an error came between); its slot is emptied once it is full."""
        self._abandoned.append(place)

    def _place(self, rank: int, sender: int, receiver: int, number: int) -> Place:
        base = (sender * len(self._index) + receiver) * _PAIR_BYTES
        turn, slot = divmod(number, SLOTS)
        return Place(rank, base + _HEAD_BYTES + slot * SLOT_BYTES, (base + slot * 64) // 8, 2 * turn + 1)

    def _contents(self, place: Place, like: Tensor) -> Tensor:
        return self._bytes[place.start : place.start + like.nbytes].view(like.dtype).view(like.shape)

    def _wait_for(self, place: Place, state: int) -> None:
        flags, flag = self._flags, place.flag
        if flags[flag] == state:
            return
        start = time.perf_counter()
        while flags[flag] != state:
            self._abandoned = [a for a in self._abandoned if not self._emptied(a)]
            waited = time.perf_counter() - start
            if waited < _SPIN_SECONDS:
                os.sched_yield()
            else:
                self._nap(place.rank, waited)

    def _nap(self, rank: int, waited: float) -> None:
        time.sleep(_NAP_SECONDS)
        if waited > _TIMEOUT_SECONDS or not _runs(self._pids[rank]):
            raise dist.DistNetworkError(f"rank {rank} died or sent nothing for {waited:.0f} s")

    def _emptied(self, place: Place) -> bool:
        full = self._flags[place.flag] == place.full
        if full:
            self._flags[place.flag] = place.full + 1
        return full


def _runs(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (OSError, IndexError):
        return False


def fits(tensor: Tensor) -> bool:
    """Whether a tensor of this shape and dtype travels by mailbox; both sides decide alike."""
    return prod(tensor.shape) * tensor.element_size() <= SLOT_BYTES


_made: dict[tuple[int, ...], Mailboxes | None] = {}


def mailboxes_of(group: dist.ProcessGroup) -> Mailboxes | None:
    """The mailboxes of a gloo group whose ranks share a machine, else None; all its ranks make the first call."""
    if "gloo" not in dist.get_backend_config(group):
        return None
    ranks = tuple(dist.get_process_group_ranks(group))
    if ranks not in _made:
        _made[ranks] = _make(ranks, group)
    return _made[ranks]


def forget_mailboxes() -> None:
    """Make new ones from now on, on all ranks."""
    _made.clear()


def _make(ranks: tuple[int, ...], group: dist.ProcessGroup) -> Mailboxes | None:
    name: list[str | None] = [None]
    if len(ranks) == 1 or dist.get_backend(group) != "gloo":
        return None
    possible = platform.machine() in ("x86_64", "AMD64") and _FOLDER.is_dir()
    size = len(ranks) ** 2 * _PAIR_BYTES
    if possible and dist.get_rank() == ranks[0]:
        name = [_reserved(size)]
    dist.broadcast_object_list(name, src=ranks[0], group=group)
    memory = _mapped(name[0], size) if possible and name[0] else None
    pids = [0] * len(ranks)  # 0: could not map it
    dist.all_gather_object(pids, os.getpid() if memory is not None else 0, group=group)
    if name[0] and dist.get_rank() == ranks[0]:
        os.unlink(name[0])  # it lives as long as it is mapped, and no longer
    return Mailboxes(ranks, pids, memory) if memory is not None and all(pids) else None


def _reserved(size: int) -> str | None:
    """A new file with room for everything: to write beyond a full /dev/shm would kill the process."""
    descriptor, name = tempfile.mkstemp(prefix="fullframe-", dir=_FOLDER)
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError:
        os.unlink(name)
        return None
    finally:
        os.close(descriptor)
    return name


def _mapped(name: str, size: int) -> mmap.mmap | None:
    """The file, if it is of this machine: its random name is nowhere else."""
    try:
        with open(name, "r+b") as file:
            return mmap.mmap(file.fileno(), size)
    except OSError:
        return None
