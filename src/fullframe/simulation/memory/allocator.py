"""A model of PyTorch's CUDA caching allocator (c10/cuda/CUDACachingAllocator.cpp, default settings).

Segments are asked from the driver, each for one stream and one sort of request, and kept; where the driver has no more,
those that are unused as a whole are given back, and it is asked again. A request is served by the smallest free block
that is large enough, cut where what is left is worth keeping; freed neighbours join.
"""

import math
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fullframe.simulation.memory.trace import Block
from fullframe.wording import amount

_UNIT = 512  # every request is a multiple of it
_SMALL = 2**20  # requests up to here share segments of _SMALL_SEGMENT
_SMALL_SEGMENT = 2 * 2**20
_LARGE = 10 * 2**20  # requests below share segments of _LARGE_SEGMENT, from here on have their own
_LARGE_SEGMENT = 20 * 2**20
_SEGMENT_UNIT = 2 * 2**20


@dataclass(eq=False, slots=True)
class Piece:
    """A part of a segment, in use or free, between its neighbours."""

    address: int
    bytes: int
    pool: tuple[str, bool]  # the stream, and whether it is of small requests
    free: bool = False
    before: "Piece | None" = None
    after: "Piece | None" = None


class CachingAllocator:
    """`malloc` and `free`; what is allocated and reserved, and the most there was of each.

    The driver has `limit_bytes`; `malloc` raises MemoryError where they do not do. `segments` were asked for in all,
    and `returns` times what was unused went back.
    """

    def __init__(self, limit_bytes: float = math.inf) -> None:
        self.segments = self.returns = 0
        self._limit_bytes = limit_bytes
        self.allocated_bytes = self.reserved_bytes = self.most_allocated_bytes = self.most_reserved_bytes = 0
        # (bytes, address, piece), sorted
        self._free: defaultdict[tuple[str, bool], list[tuple[int, int, Piece]]] = defaultdict(list)
        self._next_address = 0

    def malloc(self, bytes: int, stream: str = "") -> Piece:
        """A piece for `bytes`, of the stream's segments."""
        wanted = max(-(-bytes // _UNIT), 1) * _UNIT
        small = wanted <= _SMALL
        pool = self._free[stream, small]
        at = bisect_left(pool, (wanted, -1))
        piece = pool.pop(at)[2] if at < len(pool) else self._segment(wanted, (stream, small))
        left = piece.bytes - wanted
        if left >= _UNIT if small else left > _SMALL:
            self._cut(piece, wanted)
        piece.free = False
        self.allocated_bytes += piece.bytes
        self.most_allocated_bytes = max(self.most_allocated_bytes, self.allocated_bytes)
        return piece

    def free(self, piece: Piece) -> None:
        """Give back what `malloc` gave."""
        self.allocated_bytes -= piece.bytes
        for other in (piece.before, piece.after):
            if other is not None and other.free:
                pool = self._free[other.pool]
                pool.pop(bisect_left(pool, (other.bytes, other.address)))
                self._join(piece, other)
        piece.free = True
        insort(self._free[piece.pool], (piece.bytes, piece.address, piece))

    def _segment(self, wanted: int, pool: tuple[str, bool]) -> Piece:
        size = _SMALL_SEGMENT if pool[1] else _LARGE_SEGMENT
        if wanted >= _LARGE:
            size = -(-wanted // _SEGMENT_UNIT) * _SEGMENT_UNIT
        if self.reserved_bytes + size > self._limit_bytes:
            self._give_back()
            if self.reserved_bytes + size > self._limit_bytes:
                raise MemoryError(
                    f"{self.reserved_bytes} bytes are reserved of {self._limit_bytes}; {size} more are wanted"
                )
        piece = Piece(self._next_address, size, pool)
        self._next_address += size
        self.segments += 1
        self.reserved_bytes += size
        self.most_reserved_bytes = max(self.most_reserved_bytes, self.reserved_bytes)
        return piece

    def _give_back(self) -> None:
        """What is free and a whole segment."""
        self.returns += 1
        for pool in self._free.values():
            whole = [piece for *_, piece in pool if piece.before is None and piece.after is None]
            self.reserved_bytes -= sum(piece.bytes for piece in whole)
            pool[:] = [entry for entry in pool if entry[2].before or entry[2].after]

    def _cut(self, piece: Piece, bytes: int) -> None:
        rest = Piece(piece.address + bytes, piece.bytes - bytes, piece.pool, True, piece, piece.after)
        if rest.after is not None:
            rest.after.before = rest
        piece.bytes, piece.after = bytes, rest
        insort(self._free[rest.pool], (rest.bytes, rest.address, rest))

    @staticmethod
    def _join(piece: Piece, other: Piece) -> None:
        """Make `other`, a free neighbour, part of `piece`."""
        if other is piece.before:
            piece.address, piece.before = other.address, other.before
            if piece.before is not None:
                piece.before.after = piece
        else:
            piece.after = other.after
            if piece.after is not None:
                piece.after.before = piece
        piece.bytes += other.bytes


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """An allocator after a trace.

    wanted_bytes: what it would reserve at most, if it could
    returns, segments: how often it gives back in the last step what is unused, and what it asks for anew
    """

    allocator: CachingAllocator
    wanted_bytes: int
    returns: int = 0
    segments: int = 0

    @property
    def said(self) -> str:
        """A sentence about the returns."""
        return (
            f"torch's allocator would reserve {amount(self.wanted_bytes)} if it could; it fits, as what is unused goes "
            f"back to the driver, {self.returns} time{'s' * (self.returns > 1)} in a step, for which the device waits"
        )


def replay(events: Sequence[Block], limit_bytes: float = math.inf, before: Sequence[int] = ()) -> Replayed:
    """The allocator after the events of a trace; raises MemoryError where `limit_bytes` do not do.

    The last step begins after `before` events, if that is given.
    """
    allocator = CachingAllocator(limit_bytes)
    pieces: dict[Block, Piece] = {}
    returns = segments = 0
    for number, block in enumerate(events):
        if number in before:
            returns, segments = allocator.returns, allocator.segments
        if number == block.born:
            pieces[block] = allocator.malloc(block.bytes, block.stream)
        else:
            allocator.free(pieces.pop(block))
    return Replayed(
        allocator=allocator,
        wanted_bytes=allocator.most_reserved_bytes,
        returns=allocator.returns - returns,
        segments=allocator.segments - segments,
    )


def replay_within(events: Sequence[Block], usable_bytes: int, before: Sequence[int] = ()) -> Replayed:
    """`replay` with all the memory that is asked for; where that is more than may be used, with that, if it does."""
    free = replay(events)
    if free.wanted_bytes <= usable_bytes:
        return free
    try:
        return replace(replay(events, usable_bytes, before), wanted_bytes=free.wanted_bytes)
    except MemoryError:
        return free
