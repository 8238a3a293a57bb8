"""What a data set offers so that a rank reads its part of a frame and nothing else."""

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class SliceReader(Protocol):
    """A map-style data set of dicts with these two methods besides; `ShardedLoader` finds them by their names.

    `read(i, rows, columns)` must be what `self[i]` is, cut: tensors (..., H, W) of the frame come as their `rows` and
    `columns`, everything else whole. Its random augmentation must draw the same numbers for any rows and columns,
    from torch, numpy.random or random, which are in the same state as before `self[i]`: draw a crop or a brightness,
    not one number for each pixel that was read. The ranks compare where their random states stand after the read.
    They cannot compare pixels that none of them has in common; `fullframe verify` compares a read with `self[i]`.

    A data set of volumes gives (D, H, W) as size and is called as `read(i, slices, rows, columns)`.
    """

    def size(self, index: int) -> tuple[int, ...]:
        """(H, W) of the frame that `self[index]` gives, or (D, H, W); draws nothing, and is quick."""

    def read(self, index: int, rows: slice, columns: slice) -> dict[str, Any]:
        """The part of `self[index]` in `rows` and `columns`, both with start and stop."""
