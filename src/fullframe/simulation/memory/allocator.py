"""A model of PyTorch's CUDA caching allocator (c10/cuda/CUDACachingAllocator.cpp, default settings).

Segments are asked from the driver and never given back, each for one stream and one sort of request. A request is
served by the smallest free block that is large enough, cut where what is left is worth keeping; freed neighbours join.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from fullframe.simulation.memory.trace import Block

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
    """`malloc` and `free`; what is allocated and reserved, and the most there was of each."""

    def __init__(self) -> None:
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
        piece = Piece(self._next_address, size, pool)
        self._next_address += size
        self.reserved_bytes += size
        self.most_reserved_bytes = max(self.most_reserved_bytes, self.reserved_bytes)
        return piece

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


def replay(events: Sequence[Block]) -> CachingAllocator:
    """The allocator after the events of a trace."""
    allocator = CachingAllocator()
    pieces: dict[Block, Piece] = {}
    for number, block in enumerate(events):
        if number == block.born:
            pieces[block] = allocator.malloc(block.bytes, block.stream)
        else:
            allocator.free(pieces.pop(block))
    return allocator
