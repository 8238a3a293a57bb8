"""Messages between CPU ranks of one machine, through shared memory in place of gloo's sockets.

Each ordered pair of ranks has a few slots. Both sides count their messages in program order, so a message's slot is
known without a word; a flag in the slot says whether it is there. What does not fit a slot goes by gloo, its head here.
Only where `shared_file` can.

A slot holds a head (see `tags`) that the receiver compares with the one it expects. Each rank has a cell where it says
what it waits for, which errors it has met, and that the ranks run apart; whoever waits or sends looks there.
"""

import mmap
import os
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fullframe.errors import DivergenceError
from fullframe.ranks.groups import timeout_of_job
from fullframe.ranks.shared_file import can_share_memory, life_of, mapped, reserve
from fullframe.ranks.tags import HEAD_BYTES, padded, text_of
from fullframe.ranks.waiting import ALONE_RULE, LostRank, waiting_for_ranks

SLOTS = 4
SLOT_BYTES = 512 * 1024
_FLAG_BYTES = 64 * SLOTS  # a flag in a cache line of its own for each slot
_PAIR_BYTES = _FLAG_BYTES + SLOTS * (HEAD_BYTES + SLOT_BYTES)
_MOST_VIEWS = 4096
_SPIN_SECONDS = 0.01
_LOOKS = 20  # at the flag alone, before one at what the other ranks say
_NAP_SECONDS = 0.0002
_PATIENCE_SECONDS = 1800.0  # as gloo's, where the job does not say
_LEFT_SECONDS = 5.0  # in which a rank that has raised an error takes what was sent to it before, if it goes on at all
_QUIET_SECONDS = 60.0  # after which a rank that still waits says so, once
_LOOK_SECONDS = 0.02  # between looks whether the other rank runs, each of which takes as long as half a nap

# A rank's cell: words of 8 bytes, then texts. The first word of the first cell's line, `_APART`, is for all ranks.
_APART = 0  # number (from 1) of the rank that found that the ranks run apart, for good
_CELLS = 64  # bytes before the first cell
_CELL_BYTES = 2048
_ERRORS, _FLAG, _STATE, _PEER = range(4)  # words of a cell; `_FLAG` is 0 where the rank waits for nobody
_ERROR, _WAITED, _VERDICT = 64, 512, 1024  # where the texts begin, each up to the next

APART_RULE = (
    "Every rank of a replica must run every op on a split tensor, on the same line and in the same order: take it out "
    "of what one rank alone does (`if rank == 0:`), draws, skips or catches"
)


class Place(NamedTuple):
    """Where a message lies: its flag is `full` when it is there, then `full + 1`."""

    rank: int  # whom to wait for
    number: int  # of this pair's messages
    head: int  # where its head starts; the contents follow
    flag: int
    full: int


class Mailboxes:
    """The slots between this rank and the other `ranks` of one machine; made by `mailboxes_between`."""

    def __init__(self, ranks: Sequence[int], pids: Sequence[int], memory: mmap.mmap, patience: float):
        self.patience = patience  # seconds that it waits for another rank
        self._me = ranks.index(dist.get_rank())
        self._ranks = tuple(ranks)
        self._index = {rank: index for index, rank in enumerate(ranks)}
        self._pids = dict(zip(ranks, pids, strict=True))
        self._memory = memory
        self._flags = memoryview(memory).cast("q")
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._views: dict[tuple[int, torch.dtype, torch.Size, bool], Tensor] = {}  # of slots, as tensors that lay there
        self._words = [(_CELLS + index * _CELL_BYTES) // 8 for index in range(len(ranks))]
        self._sent = [0] * len(ranks)
        self._expected = [0] * len(ranks)
        self._abandoned: list[Place] = []
        self.errors = 0  # that this rank has announced
        self.has_warned = False  # that it has waited for long
        _alive.add(self)

    def send(self, rank: int, head: bytes, tensor: Tensor | None = None) -> Place:
        """Put a head, and `tensor` with it, into the next slot towards `rank`; waits while that slot is full.

        Raises DivergenceError once the ranks run apart, as all that wait here do.
        """
        if self._flags[_APART]:
            self._raise_apart()
        peer = self._index[rank]
        place = self._place(rank, self._me, peer, self._sent[peer])
        self._sent[peer] += 1
        self._wait_for(place, place.full - 1, head)
        self._memory[place.head : place.head + HEAD_BYTES] = head
        if tensor is not None:
            self._contents(place, tensor).copy_(tensor)
        self._flags[place.flag] = place.full
        return place

    def expect(self, rank: int) -> Place:
        """The place of the next message from `rank`, for `receive` or `abandon`."""
        peer = self._index[rank]
        self._expected[peer] += 1
        return self._place(rank, peer, self._me, self._expected[peer] - 1)

    def is_there(self, place: Place) -> bool:
        """Whether `receive` would not wait."""
        return self._flags[place.flag] >= place.full

    def receive(self, place: Place, head: bytes, into: Tensor | None = None) -> None:
        """Compare the head of the message at `place`, once it is there, and fill `into`.

        Raises DivergenceError when it is another message, and when its sender raised an error that this rank did not.
        """
        self._wait_for(place, place.full, head)
        self._compare(place, head)
        if into is not None:
            into.copy_(self._contents(place, into))
        self._flags[place.flag] = place.full + 1

    def together(
        self, ranks: Sequence[int], head: bytes, value: Tensor, op: Callable[[list[Tensor]], Tensor]
    ) -> Tensor:
        """`op` of the `value` of each of `ranks`, in their order; it makes a new tensor.

        This rank is one of them, and all of them call it. Values are read where they lie, not copied before. Raises as
        `receive` does.
        """
        me = self._ranks[self._me]
        for rank in ranks:
            if rank != me:
                self.send(rank, head, value)
        values, places = [], []
        for rank in ranks:
            if rank == me:
                values.append(value)
                continue
            place = self.expect(rank)
            self._wait_for(place, place.full, head)
            self._compare(place, head)
            places.append(place)
            values.append(self._contents(place, value))
        result = op(values)
        for place in places:
            self._flags[place.flag] = place.full + 1
        return result

    def was_read(self, place: Place, head: bytes) -> None:
        """Wait until the receiver has taken what was sent to `place`."""
        self._wait_for(place, place.full + 1, head)

    def abandon(self, place: Place) -> None:
        """Nobody will read this message (an error came between); its slot is emptied once it is full."""
        self._abandoned.append(place)

    def announce(self, text: str) -> None:
        """This rank has met an error that others may not meet."""
        self.errors += 1
        self._write(self._me, _ERROR, _WAITED, text)
        self._flags[self._words[self._me] + _ERRORS] = self.errors

    def part(self, text: str) -> None:
        """Tell all ranks that they run apart, in these words: whoever waits or sends raises them."""
        self._write(self._me, _VERDICT, _CELL_BYTES, text)
        if not self._flags[_APART]:
            self._flags[_APART] = self._me + 1

    def _place(self, rank: int, sender: int, receiver: int, number: int) -> Place:
        base = _CELLS + len(self._ranks) * _CELL_BYTES + (sender * len(self._ranks) + receiver) * _PAIR_BYTES
        turn, slot = divmod(number, SLOTS)
        head = base + _FLAG_BYTES + slot * (HEAD_BYTES + SLOT_BYTES)
        return Place(rank, number, head, (base + slot * 64) // 8, 2 * turn + 1)

    def _contents(self, place: Place, like: Tensor) -> Tensor:
        key = place.head, like.dtype, like.shape, torch.is_inference_mode_enabled()  # whose views only it may write to
        found = self._views.get(key)
        if found is None:
            if len(self._views) > _MOST_VIEWS:
                self._views.clear()
            start = place.head + HEAD_BYTES
            with _disable_current_modes():  # not always made, so a selective checkpoint must not count it
                found = self._bytes[start : start + like.nbytes].view(like.dtype).view(like.shape)
            self._views[key] = found
        return found

    def _compare(self, place: Place, head: bytes) -> None:
        found = self._memory[place.head : place.head + HEAD_BYTES]
        if found != head:
            self._part(place.rank, text_of(found), text_of(head))

    def _wait_for(self, place: Place, state: int, head: bytes) -> None:
        if self._flags[place.flag] < state:
            with waiting_for_ranks():
                _Wait(self, place, state, head).until_there()

    def _empty_abandoned(self) -> None:
        for place in list(self._abandoned):
            if self._flags[place.flag] == place.full:
                self._flags[place.flag] = place.full + 1
                self._abandoned.remove(place)

    def _write(self, index: int, start: int, stop: int, text: str) -> None:
        cell = _CELLS + index * _CELL_BYTES
        self._memory[cell + start : cell + stop] = padded(text, stop - start)

    def _read(self, index: int, start: int, stop: int) -> str:
        cell = _CELLS + index * _CELL_BYTES
        return text_of(self._memory[cell + start : cell + stop])

    def _errors_of(self, index: int) -> int:
        return int(self._flags[self._words[index] + _ERRORS])

    def _part(self, rank: int, theirs: str, mine: str) -> None:
        """Tell all ranks that this one and `rank` run apart, and raise."""
        peer, me = self._index[rank], self._me
        if self._errors_of(peer) != self.errors:
            erring = peer if self._errors_of(peer) > self.errors else me
            text = (
                f"rank {self._ranks[erring]} raised {self._read(erring, _ERROR, _WAITED)}; "
                f"rank {self._ranks[me + peer - erring]} did not, and is at: {mine if erring == peer else theirs}. "
                "An error that one rank alone meets must end the job, or be caught on no rank"
            )
        else:
            first, second = sorted([(rank, theirs), (self._ranks[me], mine)])
            text = (
                f"the ranks do not run the same program: rank {first[0]} is at: {first[1]}; "
                f"rank {second[0]} is at: {second[1]}. {APART_RULE}"
            )
        self.part(text)
        raise DivergenceError(text, self._errors_of(peer) > self.errors)

    def _raise_apart(self) -> None:
        finder = self._flags[_APART] - 1
        others = (self._errors_of(index) for index in range(len(self._ranks)))
        raise DivergenceError(self._read(finder, _VERDICT, _CELL_BYTES), max(others) > self.errors)


class _Wait:
    """A wait until a flag has reached `state`, with an eye on what the other ranks say."""

    def __init__(self, boxes: Mailboxes, place: Place, state: int, head: bytes):
        self._boxes, self._place, self._state, self._head = boxes, place, state, head
        self._flags = boxes._flags
        self._peer = boxes._index[place.rank]
        self._mine = boxes._words[boxes._me]
        self._circle: list[tuple[int, int, int]] = []  # as it was at the last look
        self._looked_at = 0.0  # after how many seconds of waiting

    def until_there(self) -> None:
        """Return when it has; raises DivergenceError, or RankError when the other rank died or does not come."""
        flags, flag, state, boxes = self._flags, self._place.flag, self._state, self._boxes
        start = time.perf_counter()
        try:
            while flags[flag] < state:
                if flags[_APART]:
                    boxes._raise_apart()
                if state == self._place.full and boxes._errors_of(self._peer) > boxes.errors and flags[flag] < state:
                    boxes._part(self._place.rank, "", text_of(self._head))  # it will never send this
                boxes._empty_abandoned()
                waited = time.perf_counter() - start
                if waited >= _SPIN_SECONDS:
                    self._nap(waited)
                    continue
                for _ in range(_LOOKS):
                    os.sched_yield()
                    if flags[flag] >= state:
                        return
        finally:
            flags[self._mine + _FLAG] = 0

    def _nap(self, waited: float) -> None:
        if not self._flags[self._mine + _FLAG]:
            self._say_for_whom()
        time.sleep(_NAP_SECONDS)
        circle = self._found_circle()
        if circle and circle == self._circle:  # nobody in it has moved since, so nobody ever will
            theirs = self._boxes._read(self._peer, _WAITED, _VERDICT)
            self._boxes._part(self._place.rank, theirs, text_of(self._head))
        self._circle = circle
        if waited < self._looked_at + _LOOK_SECONDS:
            return
        self._looked_at = waited
        rank, boxes = self._place.rank, self._boxes
        if waited > _LEFT_SECONDS and boxes._errors_of(self._peer) > boxes.errors:
            boxes._part(rank, "", text_of(self._head))
        where = f"rank {boxes._ranks[boxes._me]} waits for it at: {text_of(self._head)}"
        is_gone = life_of(boxes._pids[rank]) is None
        if is_gone or waited > boxes.patience:
            what = "died or left (its own last words say why)" if is_gone else f"did not come for {waited:.0f} s"
            raise LostRank(f"rank {rank} {what}, and {where}. {ALONE_RULE}")
        if waited > _QUIET_SECONDS and not boxes.has_warned:
            boxes.has_warned = True
            so_long = f"rank {rank} has not come for {waited:.0f} s, and {where}, for up to {boxes.patience:.0f} s"
            warnings.warn(f"{so_long}. It may be busy. {ALONE_RULE}", stacklevel=2)

    def _say_for_whom(self) -> None:
        words, mine = self._flags, self._mine
        self._boxes._write(self._boxes._me, _WAITED, _VERDICT, text_of(self._head))
        words[mine + _STATE], words[mine + _PEER] = self._state, self._peer
        words[mine + _FLAG] = self._place.flag  # never 0, which is `_APART`

    def _found_circle(self) -> list[tuple[int, int, int]]:
        """Ranks that wait for one another, each with what it waits for, from this one on and back; else none."""
        flags, index = self._flags, self._boxes._me
        found: list[tuple[int, int, int]] = []
        while len(found) < len(self._boxes._ranks):
            words = self._boxes._words[index]
            flag, state, peer = flags[words + _FLAG], flags[words + _STATE], flags[words + _PEER]
            if not flag or flags[flag] >= state:
                return []
            found.append((index, flag, state))
            if peer == self._boxes._me:
                return found
            index = peer
        return []


def fits(tensor: Tensor) -> bool:
    """Whether a tensor of this shape and dtype travels by mailbox; both sides decide alike."""
    return prod(tensor.shape) * tensor.element_size() <= SLOT_BYTES


_alive: "weakref.WeakSet[Mailboxes]" = weakref.WeakSet()


def announce(text: str) -> None:
    """Tell all ranks that this one has met an error, which others may not meet: whoever waits in vain for it raises.

    An error that all ranks meet is announced by all, and does no harm.
    """
    for boxes in _alive:
        boxes.announce(text)


def mailboxes_between(ranks: tuple[int, ...], group: dist.ProcessGroup) -> Mailboxes | None:
    """New mailboxes for the `ranks` of a gloo group if they share a machine, else None; all of them call it."""
    name: list[str | None] = [None]
    if len(ranks) == 1 or dist.get_backend(group) != "gloo":
        return None
    possible = can_share_memory()
    size = _CELLS + len(ranks) * _CELL_BYTES + len(ranks) ** 2 * _PAIR_BYTES
    if possible and dist.get_rank() == ranks[0]:
        name = [reserve(size)]
    with waiting_for_ranks():
        dist.broadcast_object_list(name, src=ranks[0], group=group)
    memory = mapped(name[0], size) if possible and name[0] else None
    pids = [0] * len(ranks)  # 0: could not map it
    with waiting_for_ranks():
        dist.all_gather_object(pids, os.getpid() if memory is not None else 0, group=group)
    if name[0] and dist.get_rank() == ranks[0]:
        os.unlink(name[0])  # it lives as long as it is mapped, and no longer
    timeout = timeout_of_job()
    patience = _PATIENCE_SECONDS if timeout is None else timeout.total_seconds()
    return Mailboxes(ranks, pids, memory, patience) if memory is not None and all(pids) else None
