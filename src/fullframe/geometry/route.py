"""Who sends which rows to whom, when every rank owns one interval and wants one.

Both are known to all ranks, so no rank asks another.
"""

from functools import lru_cache
from typing import NamedTuple

from fullframe.geometry.extents import Extents, overlap

Wanted = tuple[range, ...]  # by rank, global rows, inside the dim


class Transfer(NamedTuple):
    """Rows, in global coordinates, that go to or come from one peer."""

    peer: int
    rows: range


class Route(NamedTuple):
    """One rank's messages: what it sends, and what it receives, each ordered by peer."""

    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]

    @property
    def back(self) -> "Route":
        """The messages that bring home what these brought."""
        return Route(self.receives, self.sends)


@lru_cache(maxsize=65536)
def route(extents: Extents, wanted: Wanted, rank: int) -> Route:
    """The messages of `rank` when rank `r` owns `extents.ranges[r]` and wants `wanted[r]`."""
    peers = [peer for peer in range(extents.parts) if peer != rank]
    sends = [Transfer(peer, overlap(extents.ranges[rank], wanted[peer])) for peer in peers]
    receives = [Transfer(peer, overlap(extents.ranges[peer], wanted[rank])) for peer in peers]
    return Route(tuple(t for t in sends if t.rows), tuple(t for t in receives if t.rows))


@lru_cache(maxsize=65536)
def borrows(extents: Extents, wanted: Wanted) -> bool:
    """Whether any rank wants a row of another."""
    return any(r and (r.start < own.start or r.stop > own.stop) for own, r in zip(extents.ranges, wanted, strict=True))
