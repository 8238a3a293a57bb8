"""Which collectives are due: the ranks tell each other what they ask for, in any order, and all come to one answer.

Every rank keeps the same table, fed with the same messages, so no rank has to decide for the others. What has been
asked for before is said by a number, so that a message is short.
"""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fullframe.horovod.request import Request, mismatch

OTHERWISE_SET = (
    "the optimizer of one rank has another lr or another option, or has stepped more or less often since the last "
    "reduction; step and schedule on all ranks alike, by what all ranks know"
)
_REMEMBERED = 4096  # requests that have a number


class Key(NamedTuple):
    """What the ranks' requests for one collective have in common; `number` counts those without a name.

    Of those with one the number that is said is a checksum of what the ranks must have in common by then.
    """

    kind: str  # "" without a name: which collective is the `number`-th is part of what must fit
    name: str
    number: int


@dataclass(frozen=True)
class Due:
    """A collective that all ranks that have not joined ask for; None in `requests` stands for a rank that has."""

    key: Key
    requests: tuple[Request | None, ...]
    error: str | None = None

    @property
    def request(self) -> Request:
        """That of the first rank that has one."""
        return next(request for request in self.requests if request is not None)


def key_of(request: Request, number: int) -> Key:
    """Under which the ranks meet."""
    return Key(request.kind, request.name, 0) if request.name else Key("", "", number)


class Table:
    """What the ranks of a process set have asked for and is not yet done."""

    def __init__(self, size: int):
        self._size = size
        self._waiting: dict[Key, dict[int, Request]] = {}
        self._said: dict[Key, set[int]] = {}  # the numbers
        self._numbers: dict[Request, int] = {}
        self._remembered: list[Request] = []
        self._joined: list[int] = []  # in the order in which they did

    @property
    def is_empty(self) -> bool:
        """Whether no rank waits for anything, and none has joined."""
        return not self._waiting and not self._joined

    @property
    def is_waiting(self) -> bool:
        """Whether any rank has asked for what not all have."""
        return bool(self._waiting)

    def encode(self, news: Sequence[tuple[Request, int]], joins: bool) -> bytes:
        """What this rank asks for newly, as the message that `add` takes on every rank."""
        said = [(self._numbers.get(request, request), number) for request, number in news]
        return pickle.dumps((joins, said), protocol=pickle.HIGHEST_PROTOCOL) if said or joins else b""

    def short(self, request: Request, number: int) -> bytes | None:
        """The message of a rank that asks for this alone, where it has been asked for before."""
        known = self._numbers.get(request)
        return None if known is None else pickle.dumps((False, [(known, number)]), protocol=pickle.HIGHEST_PROTOCOL)

    def add(self, messages: Sequence[bytes]) -> tuple[list[Due], int | None]:
        """Take the messages of all ranks; what is due now, in order, and, once all ranks have joined, the last one."""
        for rank, message in enumerate(messages):
            joins, said = pickle.loads(message) if message else (False, [])
            for one, number in said:
                request = self._remembered[one] if isinstance(one, int) else one
                key = key_of(request, number)
                self._waiting.setdefault(key, {})[rank] = request
                self._said.setdefault(key, set()).add(number)
            if joins and rank not in self._joined:
                self._joined.append(rank)
        due = [*self._complete(), *self._at_cross_purposes()]
        for item in due:
            self._waiting.pop(item.key, None)
            self._said.pop(item.key, None)
            for request in filter(None, item.requests):
                self._remember(request)
        last = None
        if len(self._joined) == self._size:
            last, self._joined = self._joined[-1], []
        return due, last

    def missing(self, key: Key) -> list[int] | None:
        """The ranks that have yet to ask for it; None where no rank's request has been heard."""
        asked = self._waiting.get(key)
        return None if asked is None else [r for r in range(self._size) if r not in asked and r not in self._joined]

    def _complete(self) -> list[Due]:
        found = []
        for key, asked in self._waiting.items():
            if all(rank in asked or rank in self._joined for rank in range(self._size)):
                requests = tuple(asked.get(rank) for rank in range(self._size))
                said = [request for request in requests if request is not None]
                error = mismatch(said, len(said) < self._size)
                if error is None and len(self._said[key]) > 1:
                    error = f"{key.kind} '{key.name}' does not mean the same on all ranks: {OTHERWISE_SET}"
                found.append(Due(key, requests, error))
        return found

    def _at_cross_purposes(self) -> list[Due]:
        """A name that stands for different collectives on different ranks, and for one only on each: none will come."""
        names: dict[str, list[Key]] = {}
        for key in self._waiting:
            if key.name:
                names.setdefault(key.name, []).append(key)
        found = []
        for name, keys in names.items():
            asking = sorted(rank for key in keys for rank in self._waiting[key])
            active = [rank for rank in range(self._size) if rank not in self._joined]
            if len(keys) > 1 and asking == active:
                kinds = " and ".join(sorted(key.kind for key in keys))
                error = (
                    f"mismatched operations: '{name}' is {kinds} on different ranks; all ranks must ask for the same"
                )
                for key in keys:
                    asked = self._waiting[key]
                    found.append(Due(key, tuple(asked.get(rank) for rank in range(self._size)), error))
        return found

    def _remember(self, request: Request) -> None:
        if len(self._remembered) < _REMEMBERED and request not in self._numbers:
            self._numbers[request] = len(self._remembered)
            self._remembered.append(request)
