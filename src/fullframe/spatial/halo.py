"""A rank's part and the strips it borrowed, addressed by global rows and never joined unless a region is asked for.

So a halo costs its own bytes, not a second feature map: ops keep the local tensor that others keep too, and the strips.
Split dims are served one after the other. The strips of a later cut are as long as what is held by then, and so hold
the corners, which no rank has to ask its diagonal neighbour for:

    cut 0 (rows)       cut 1 (columns)          0: strips of cut 0, one from above, one from below
      . 0 0 0 .          1 0 0 0 1              1: strips of cut 1, one from either side; their ends, beside the 0s,
      . L L L .          1 L L L 1                 are corners: the neighbour has them as its own strips of cut 0
      . 0 0 0 .          1 0 0 0 1

Gradients go home in the other order, cut 1 first, as its strips hold gradients of strips of cut 0.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from fullframe.geometry.extents import Extents, overlap
from fullframe.geometry.route import Route, Wanted, borrows, route
from fullframe.ranks.exchange import InFlight, Trip, assembled, borrowed, brought_back, post, trip
from fullframe.ranks.memory_format import memory_format_of
from fullframe.ranks.mesh import Axis

Ranges = tuple[range, ...]  # global rows, one range a cut


@dataclass(frozen=True, eq=False)
class Cut:
    """One split dim of an op's input: who owns which rows, and which each rank wants."""

    dim: int
    extents: Extents
    wanted: Wanted
    axis: Axis

    @cached_property
    def own(self) -> range:
        """The global rows that this rank owns."""
        return self.extents.ranges[self.axis.coordinate]

    @cached_property
    def rows(self) -> range:
        """The global rows that this rank wants, own ones among them."""
        return self.wanted[self.axis.coordinate]

    @cached_property
    def route(self) -> Route:
        """What this rank sends and receives."""
        return route(self.extents, self.wanted, self.axis.coordinate)

    @cached_property
    def trip(self) -> Trip:
        """The same, counted in rows of what it holds."""
        return trip(self.extents, self.wanted, self.axis.coordinate)

    @cached_property
    def borrows(self) -> bool:
        """Whether any rank wants a row of another, so that all take part in an exchange."""
        return borrows(self.extents, self.wanted)


def borrow(local: Tensor, cuts: tuple[Cut, ...], around: tuple[int, int] = (0, 0)) -> tuple[Tensor, list[Tensor]]:
    """The wanted rows of each cut joined, and the strips that were borrowed for it, in the order of `Halo`.

    `around`: so many rows of zeros come before and behind along the last cut.
    """
    strips: list[Tensor] = []
    for cut in cuts:
        new = borrowed(local, cut.dim, cut.trip, cut.axis) if cut.borrows else []
        local = _along(local, cut, new, around if cut is cuts[-1] else (0, 0))
        strips += new
    return local, strips


def joined_again(local: Tensor, cuts: tuple[Cut, ...], strips: Sequence[Tensor], around: tuple[int, int]) -> Tensor:
    """What `borrow` returned with these strips."""
    first = 0
    for cut in cuts:
        end = first + len(cut.trip.receives)
        local = _along(local, cut, strips[first:end], around if cut is cuts[-1] else (0, 0))
        first = end
    return local


def _along(local: Tensor, cut: Cut, strips: Sequence[Tensor], around: tuple[int, int]) -> Tensor:
    start, count, _ = cut.trip.kept
    if any(around):
        return assembled(local, strips, cut.dim, cut.trip, around)
    if strips:
        return assembled(local, strips, cut.dim, cut.trip)
    return local if count == local.shape[cut.dim] else local.narrow(cut.dim, start, count)


def give_back(gradient: Tensor, cuts: tuple[Cut, ...]) -> Tensor:
    """The gradient of the local part, from that of the wanted rows joined; that of borrowed ones goes home."""
    for cut in reversed(cuts):
        if cut.borrows or cut.trip.kept[1] != cut.trip.own:
            gradient = brought_back(gradient, cut.dim, cut.trip, cut.axis, cut.borrows)
    return gradient


class Piece(NamedTuple):
    """A tensor and the global rows it holds along each cut."""

    tensor: Tensor
    ranges: Ranges


class Halo:
    """`local` with the strips that other ranks lend; asked for by the constructor, there after `wait`."""

    def __init__(self, local: Tensor, cuts: tuple[Cut, ...]):
        self.cuts = cuts
        self.pieces = [Piece(local, tuple(cut.own for cut in cuts))]
        self._posted = 0
        self._flight: InFlight | None = None
        self._post_next()

    @classmethod
    def of(cls, tensors: Iterable[Tensor], cuts: tuple[Cut, ...]) -> "Halo":
        """A halo whose pieces are there already: the local part and the strips, as a forward pass had them."""
        halo = cls.__new__(cls)
        halo.cuts, halo._posted, halo._flight = cuts, len(cuts), None
        held = [tuple(cut.own for cut in cuts)]
        held += [halo._ranges(number, t.rows) for number, cut in enumerate(cuts) for t in cut.route.receives]
        halo.pieces = [Piece(tensor, ranges) for tensor, ranges in zip(tensors, held, strict=False)]
        return halo

    def wait(self, after: Sequence[Tensor] = ()) -> "Halo":
        """Block until every strip is there; a captured graph computes `after` meanwhile."""
        while self._flight is not None:
            strips = self._flight.wait(after)
            cut = self._posted - 1
            for transfer, strip in zip(self.cuts[cut].route.receives, strips, strict=True):
                self.pieces.append(Piece(strip, self._ranges(cut, transfer.rows)))
            self._flight = None
            self._post_next()
        return self

    def _post_next(self) -> None:
        while self._posted < len(self.cuts) and self._flight is None:
            number, self._posted = self._posted, self._posted + 1
            cut = self.cuts[number]
            if cut.borrows:
                blocks = [self.region(self._ranges(number, t.rows)) for t in cut.route.sends]
                self._flight = self._post(number, cut.route, blocks, "rows")

    def _post(self, number: int, plan: Route, blocks: list[Tensor], kind: str) -> InFlight:
        cut = self.cuts[number]
        shapes = [self.shape(self._ranges(number, t.rows)) for t in plan.receives]
        return post(cut.axis, plan, blocks, shapes, self.pieces[0].tensor, cut.extents.size, kind)

    def _ranges(self, number: int, rows: range) -> Ranges:
        """The rows of a message of cut `number`: earlier cuts with their strips already, later ones without."""
        earlier = tuple(cut.rows for cut in self.cuts[:number])
        return (*earlier, rows, *(cut.own for cut in self.cuts[number + 1 :]))

    def shape(self, ranges: Ranges) -> list[int]:
        """The shape of the tensor that holds the rows `ranges`, one range a cut, and all of the other dims."""
        shape = list(self.pieces[0].tensor.shape)
        for cut, rows in zip(self.cuts, ranges, strict=True):
            shape[cut.dim] = len(rows)
        return shape

    def region(self, ranges: Ranges, fill: float = 0.0) -> Tensor:
        """The rows `ranges`, copied together from what is held, `fill` elsewhere; a view if one piece covers them."""
        return put_together(self.pieces, self.cuts, ranges, self.shape(ranges), fill)

    def start_return(self, gradients: list[Tensor]) -> "Return":
        """Send the strips' gradients home; `gradients` are those of `pieces`, the local one not needed yet."""
        return Return(self, gradients)


class Return:
    """The gradients of a halo's strips on their way home, later cuts first."""

    def __init__(self, halo: Halo, gradients: list[Tensor]):
        self._halo, self._gradients = halo, gradients
        self._remaining = len(halo.cuts)
        self._kept: list[tuple[Ranges, Tensor]] = []  # what belongs to the local part, added at the end
        self._flight: InFlight | None = None
        self._post_next()

    def add_to(self, local_gradient: Tensor) -> Tensor:
        """Wait, and add what came back to the gradient of the local part, in place."""
        while self._flight is not None:
            returned = self._flight.wait([local_gradient])
            number = self._remaining
            for transfer, gradient in zip(self._halo.cuts[number].route.sends, returned, strict=True):
                self._distribute(self._halo._ranges(number, transfer.rows), gradient)
            self._flight = None
            self._post_next()
        own = self._halo.pieces[0].ranges
        for ranges, gradient in self._kept:
            part_of(local_gradient, own, ranges, self._halo.cuts).add_(gradient)
        return local_gradient

    def _post_next(self) -> None:
        while self._remaining and self._flight is None:
            self._remaining -= 1
            number, halo = self._remaining, self._halo
            cut = halo.cuts[number]
            if cut.borrows:
                by_ranges = {piece.ranges: g for piece, g in zip(halo.pieces, self._gradients, strict=True)}
                gradients = [by_ranges[halo._ranges(number, t.rows)] for t in cut.route.receives]
                self._flight = halo._post(number, cut.route.back, gradients, "gradient of rows")

    def _distribute(self, ranges: Ranges, gradient: Tensor) -> None:
        """Add what came back to the strips that it belongs to; keep what belongs to the local part for the end."""
        for index, piece in enumerate(self._halo.pieces):
            shared = tuple(overlap(a, b) for a, b in zip(piece.ranges, ranges, strict=True))
            if not all(shared):
                continue
            part = part_of(gradient, ranges, shared, self._halo.cuts)
            if index == 0:
                self._kept.append((shared, part))
            else:
                part_of(self._gradients[index], piece.ranges, shared, self._halo.cuts).add_(part)


def put_together(
    pieces: Sequence[Piece], cuts: tuple[Cut, ...], ranges: Ranges, shape: list[int], fill: float = 0.0
) -> Tensor:
    """The rows `ranges` copied together from those `pieces` that hold them; a view if one piece covers all."""
    shared = [(piece, tuple(overlap(a, b) for a, b in zip(piece.ranges, ranges, strict=True))) for piece in pieces]
    shared = [(piece, part) for piece, part in shared if all(part)]
    if len(shared) == 1 and shared[0][1] == ranges:
        return part_of(shared[0][0].tensor, shared[0][0].ranges, ranges, cuts)
    volume = sum(prod(map(len, part)) for _, part in shared)
    like = pieces[0].tensor
    result = torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=memory_format_of(like))
    if volume < prod(map(len, ranges)):
        result.fill_(fill)
    for piece, part in shared:
        part_of(result, ranges, part, cuts).copy_(part_of(piece.tensor, piece.ranges, part, cuts))
    return result


def part_of(tensor: Tensor, held: Ranges, wanted: Ranges, cuts: tuple[Cut, ...]) -> Tensor:
    """The view of the rows `wanted` in a tensor that holds the rows `held`."""
    for cut, have, want in zip(cuts, held, wanted, strict=True):
        if have != want:
            tensor = tensor.narrow(cut.dim, want.start - have.start if want else 0, len(want))
    return tensor
