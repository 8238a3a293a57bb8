"""What convolution and pooling share: cuts, needed rows and output boundaries of an op that slides a window."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch.nn.functional as F
from torch import Tensor

from fullframe.geometry.extents import Extents, overlap
from fullframe.geometry.window import RowMap, TransposedWindow, Window
from fullframe.ranks.adjoint import linear
from fullframe.spatial.halo import Cut, Ranges, borrow, give_back, part_of
from fullframe.spatial.rules.registry import TooSmall
from fullframe.spatial.spec import Spec


@dataclass(frozen=True, eq=False)
class WindowPlan:
    """How a window op runs on this rank."""

    cuts: tuple[Cut, ...]
    needs: Ranges  # input rows read, one range a cut, with those outside the image but for transposed windows
    outs: Ranges  # output rows of this rank, one range a cut
    spec: Spec  # of the result

    @cached_property
    def borrows(self) -> bool:
        """Whether any rank along any cut borrows a row."""
        return any(cut.borrows for cut in self.cuts)

    @cached_property
    def outside(self) -> tuple[tuple[int, int], ...]:
        """How many needed rows lie before and behind the image, one pair a cut."""
        pairs = []
        for cut, need in zip(self.cuts, self.needs, strict=True):
            rows = cut.rows
            pairs.append((rows.start - need.start, need.stop - rows.stop) if rows else (len(need), 0))
        return tuple(pairs)


def plan_windows(
    spec: Spec, dims: Sequence[int], windows: Sequence[RowMap], sizes: Sequence[int], shape: Sequence[int]
) -> WindowPlan:
    """Plan a window op over tensor dims `dims` with output `sizes` there; `shape` is that of the whole result.

    Raises TooSmall where the result has fewer rows than ranks.
    """
    cuts, needs, outs, small = [], [], [], []
    placements = {p.axis: p for p in spec.placements}
    for dim, window, size in zip(dims, windows, sizes, strict=True):
        if _stays(window) and size == spec.shape[dim]:
            continue
        placement = spec.of(dim)
        if placement is None:
            continue
        extents = placement.extents
        out = nonempty(window.output_extents(extents, size))
        if out is None:
            small.append(placement.axis)
            continue
        axis = spec.spatial.axis(placement.axis)
        wanted = tuple(extents.clipped(window.reads(rows)) for rows in out.ranges)
        need = window.reads(out.ranges[axis.coordinate])
        if isinstance(window, TransposedWindow):  # what lies outside the image adds nothing, and is not made
            wanted = tuple(rows or range(extents.size - 1, extents.size) for rows in wanted)
            need = wanted[axis.coordinate]
        cuts.append(Cut(dim, extents, wanted, axis))
        needs.append(need)
        outs.append(out.ranges[axis.coordinate])
        placements[placement.axis] = placement.recut(out)
    if small:
        raise TooSmall(small, spec)
    result = spec.with_(shape, tuple(placements.values()))
    return WindowPlan(tuple(cuts), tuple(needs), tuple(outs), result)


def _stays(window: RowMap) -> bool:
    """Whether each output row is made of the input row of its number, however the dim is cut."""
    return isinstance(window, Window) and (window.kernel, window.stride, window.padding) == (1, 1, 0)


def nonempty(natural: Extents) -> Extents | None:
    """`natural` boundaries, or even ones where a part would be empty, or None where there are too few rows."""
    if not natural.has_empty and natural.size > 1:
        return natural
    return Extents.even(natural.size, natural.parts) if natural.size >= max(2, natural.parts) else None


def region(local: Tensor, plan: WindowPlan, fill: float = 0.0) -> Tensor:
    """The rows this rank's outputs read, joined, `fill` outside the image; differentiable."""
    if plan.borrows:
        there = partial(_joined, plan=plan, fill=fill)
        return linear(local, there, partial(region_gradient, plan=plan), partial(_joined, plan=plan))
    return padded(borrow(local, plan.cuts)[0], plan, fill)


def _joined(local: Tensor, plan: WindowPlan, fill: float = 0.0) -> Tensor:
    joined = padded(borrow(local, plan.cuts)[0], plan, fill)
    return joined.clone() if joined._base is not None or joined is local else joined


def padded(rows: Tensor, plan: WindowPlan, fill: float = 0.0, last: bool = True) -> Tensor:
    """The wanted rows of each cut with `fill` for those that outputs read outside the image.

    Those of the last cut are there already where it is not `last`.
    """
    for cut, (before, after) in zip(plan.cuts if last else plan.cuts[:-1], plan.outside, strict=last):
        if before or after:
            behind = rows.dim() - cut.dim - 1
            rows = F.pad(rows, (0, 0) * behind + (before, after), value=fill)
    return rows


def region_gradient(gradient: Tensor, plan: WindowPlan) -> Tensor:
    """The gradient of a local part, from that of its `region`."""
    for cut, (before, after) in zip(plan.cuts, plan.outside, strict=True):
        if before or after:
            gradient = gradient.narrow(cut.dim, before, gradient.shape[cut.dim] - before - after)
    return give_back(gradient, plan.cuts)


def embedded(gradient: Tensor, held: Ranges, wanted: Ranges, cuts: tuple[Cut, ...]) -> Tensor:
    """A new tensor over rows `wanted`: `gradient`, which lies over rows `held`, and zero elsewhere."""
    shared = tuple(overlap(a, b) for a, b in zip(held, wanted, strict=True))
    shape = list(gradient.shape)
    for cut, rows in zip(cuts, wanted, strict=True):
        shape[cut.dim] = len(rows)
    if shared == wanted:
        return part_of(gradient, held, wanted, cuts).clone()
    result = gradient.new_zeros(shape)
    if all(shared):
        part_of(result, wanted, shared, cuts).copy_(part_of(gradient, held, shared, cuts))
    return result


def ints(value: int | Sequence[int], count: int) -> tuple[int, ...]:
    """An option that torch takes as one number or one a dim, as one a dim."""
    if type(value) is int:
        return (value,) * count
    if type(value) is tuple and len(value) == count and all(type(each) is int for each in value):
        return value
    if not isinstance(value, Sequence):
        return (int(value),) * count  # numpy's integers too; what is made from it is kept
    return tuple(map(int, value)) if len(value) == count else tuple(map(int, value)) * count
