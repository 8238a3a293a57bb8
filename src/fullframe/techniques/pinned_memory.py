"""Page-locked host memory in pieces: torch rounds each block of its own up to a power of two, and keeps it for good."""

import weakref
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

SLAB_BYTES = 1 << 28
_ALIGNMENT = 512


class _Piece(NamedTuple):
    """Bytes `start` to `stop` of a slab."""

    slab: int
    start: int
    stop: int


class PinnedMemory:
    """Slabs of which pieces are handed out; a piece that nobody holds any longer is handed out again.

    Its next holder must not write to it before what was queued by the last one has read it: all copies from and to the
    pieces go by one stream.
    """

    def __init__(self, pin: bool = True, slab_bytes: int = SLAB_BYTES):
        self._pin, self._slab_bytes = pin, slab_bytes
        self._slabs: list[Tensor] = []
        self._free: list[_Piece] = []  # in order, no two of them side by side
        self._returned: deque[_Piece] = deque()  # by whatever thread, at any time

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.numel() for slab in self._slabs)

    def take(self, nbytes: int) -> Tensor:
        """(nbytes,) uint8, whose contents are whatever was there."""
        self._sweep()
        size = max(-(-nbytes // _ALIGNMENT), 1) * _ALIGNMENT
        place = next((n for n, gap in enumerate(self._free) if gap.stop - gap.start >= size), None)
        if place is None:
            place = len(self._free)
            bytes_ = max(size, self._slab_bytes)
            self._slabs.append(torch.empty(bytes_, dtype=torch.uint8, device="cpu", pin_memory=self._pin))
            self._free.append(_Piece(len(self._slabs) - 1, 0, bytes_))
        slab, start, stop = self._free[place]
        self._free[place : place + 1] = [_Piece(slab, start + size, stop)] if stop - start > size else []
        piece = self._slabs[slab][start : start + nbytes]
        weakref.finalize(piece, self._returned.append, _Piece(slab, start, start + size)).atexit = False
        return piece

    def _sweep(self) -> None:
        """Put what was returned among the gaps, and make one of those that lie side by side."""
        if not self._returned:
            return
        gaps = self._free
        while self._returned:
            gaps.append(self._returned.popleft())
        gaps.sort()
        self._free = gaps[:1]
        for gap in gaps[1:]:
            last = self._free[-1]
            if (gap.slab, gap.start) == (last.slab, last.stop):
                self._free[-1] = last._replace(stop=gap.stop)
            else:
                self._free.append(gap)
