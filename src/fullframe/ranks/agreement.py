"""What ranks must decide alike: one rank acts and all learn the outcome, or all act and all learn who failed.

Without a process group this process is the only rank.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count, zip_longest
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from fullframe.errors import FullframeError
from fullframe.processes.place import restarts
from fullframe.ranks.device import place_of_numbers
from fullframe.ranks.waiting import waiting_for_ranks

T = TypeVar("T")

_jobs: "WeakKeyDictionary[dist.ProcessGroup, int]" = WeakKeyDictionary()  # of this process, by their groups
_numbers = count()


def is_first_rank(group: dist.ProcessGroup | None = None) -> bool:
    """Whether this process is the group's first rank, the one that speaks for all."""
    return not dist.is_initialized() or dist.get_rank(group) == 0


def on_first_rank(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """The group's first rank runs `action`; every rank returns its result or raises its FullframeError or OSError."""
    outcome: list[Any] = [None, None]  # the result, the error
    if is_first_rank(group):
        try:
            outcome[0] = action()
        except (FullframeError, OSError) as error:
            outcome[1] = error
    if dist.is_initialized():
        with waiting_for_ranks():
            dist.broadcast_object_list(outcome, group=group, group_src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]  # type: ignore[no-any-return]


def on_all_ranks(action: Callable[[], T]) -> T:
    """Every rank runs `action` and returns its own result, or all raise the first FullframeError or OSError."""
    result: Any = None
    problem: Exception | None = None
    try:
        result = action()
    except (FullframeError, OSError) as error:
        problem = error
    for found in from_all_ranks(problem):
        if found is not None:
            raise found
    return result  # type: ignore[no-any-return]


def from_all_ranks(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """`value` of every rank of the group, in rank order, on every rank."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    with waiting_for_ranks():
        dist.all_gather_object(values, value, group=group)
    return values


def at_first_rank(value: T) -> list[T] | None:
    """`value` of every rank of the job, in rank order, on the first rank; None on the others."""
    values: list[Any] | None = [None] * dist.get_world_size() if is_first_rank() else None
    with waiting_for_ranks():
        dist.gather_object(value, values)
    return values


def first_difference(everyone: Sequence[Sequence[str]]) -> tuple[str, int, str]:
    """Where the lists of all ranks first differ: what rank 0 has there, another rank, and what that one has."""
    places = zip_longest(*everyone, fillvalue="nothing")
    first = next(place for place in places if len(set(place)) > 1)
    rank = next(rank for rank, one in enumerate(first) if one != first[0])
    return first[0], rank, first[rank]


def first_to_say(what: str, said: str) -> str:
    """What the first rank of the job has said of `what`, which this one perhaps is; nobody waits for another."""
    if dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return said
    store: Any = dist.distributed_c10d._get_default_store()
    return store.compare_set(_key(what), "", said).decode()  # type: ignore[no-any-return]


def leave_word(what: str, said: str) -> None:
    """In the job's store, for who looks; where that is gone, nobody does."""
    with suppress(RuntimeError):
        dist.distributed_c10d._get_default_store().set(_key(what), said)


def word_left(what: str) -> str:
    """What a rank has left by `leave_word`, "" where none has, or the store is gone."""
    with suppress(RuntimeError):
        store: Any = dist.distributed_c10d._get_default_store()
        return store.get(_key(what)).decode() if store.check([_key(what)]) else ""
    return ""


def _key(what: str) -> str:
    """A launcher's store may outlive the job, and ranks that are started again."""
    world: Any = dist.group.WORLD
    if world not in _jobs:
        _jobs[world] = next(_numbers)
    return f"fullframe: {what}, in job {_jobs[world]} of start {restarts()}"


def on_any_rank(flag: bool) -> bool:
    """Whether `flag` is set on any rank, on every rank."""
    return bool(_largest_on_any_rank([flag])[0])


def on_any_rank_each(flags: Sequence[bool], checksum: int) -> tuple[list[bool], bool]:
    """For each of some flags whether it is set on any rank, and whether all have the same `checksum`, of 32 bits.

    On every rank; one message.
    """
    signed = checksum - (1 << 31)
    *found, most, least = _largest_on_any_rank([*flags, signed, ~signed])
    return [bool(number) for number in found], most == ~least


def is_same_on_all(number: int, group: dist.ProcessGroup) -> bool:
    """Whether all ranks of the group have the same number, of 32 bits with its sign; on every one of them."""
    most, least = _largest_on_any_rank([number, ~number], group)
    return most == ~least


def largest_on_any_rank(number: int) -> int:
    """The largest of a number, of 32 bits with its sign, that a rank has, on every rank."""
    return _largest_on_any_rank([number])[0]


def _largest_on_any_rank(numbers: Sequence[int], group: dist.ProcessGroup | None = None) -> list[int]:
    """The largest of each of some numbers, of 32 bits with their sign, that a rank has, on every rank; one message."""
    if not dist.is_initialized():
        return list(numbers)
    found = torch.tensor(numbers, dtype=torch.int32, device=place_of_numbers(group))
    with waiting_for_ranks():
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
        return found.tolist()
