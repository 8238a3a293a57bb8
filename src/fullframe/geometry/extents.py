"""Boundaries along one dim: which rank owns which rows."""

from dataclasses import dataclass
from functools import cached_property

from fullframe.errors import ShapeError


@dataclass(frozen=True)
class Extents:
    """Boundaries `(0, b1, ..., size)`: part `i` owns rows `[bounds[i], bounds[i + 1])`. A part may be empty."""

    bounds: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.bounds) < 2 or self.bounds[0] != 0 or any(a > b for a, b in self._pairs()):
            raise ShapeError(f"boundaries must start at 0 and never fall, got {self.bounds}")

    @classmethod
    def even(cls, size: int, parts: int) -> "Extents":
        """`size` rows over `parts` ranks, sizes differing by at most one, the larger first."""
        rows, extra = divmod(size, parts)
        return cls(tuple(rows * part + min(part, extra) for part in range(parts + 1)))

    def _pairs(self) -> list[tuple[int, int]]:
        return list(zip(self.bounds, self.bounds[1:], strict=False))

    @property
    def size(self) -> int:
        """Rows of the whole dim."""
        return self.bounds[-1]

    @property
    def parts(self) -> int:
        """Number of ranks the dim is split over."""
        return len(self.bounds) - 1

    @cached_property
    def ranges(self) -> tuple[range, ...]:
        """The rows of each part."""
        return tuple(range(a, b) for a, b in self._pairs())

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of rows of each part."""
        return tuple(b - a for a, b in self._pairs())

    @property
    def has_empty(self) -> bool:
        """Whether some part owns nothing."""
        return 0 in self.sizes

    def clipped(self, rows: range) -> range:
        """`rows` without what lies outside the dim."""
        start = min(max(rows.start, 0), self.size)
        return range(start, max(start, min(rows.stop, self.size)))


def overlap(a: range, b: range) -> range:
    """The rows in both; empty (and starting at the later start) when there are none."""
    start = max(a.start, b.start)
    return range(start, max(start, min(a.stop, b.stop)))
