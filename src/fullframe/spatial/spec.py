"""Spec: what all ranks know of a split tensor, one object for each set of facts."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from operator import mul
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from fullframe.geometry.extents import Extents
from fullframe.geometry.placement import Placement, Placements, local_shape
from fullframe.ranks.mesh import Axis, Spatial, axes_in, kept_with_mesh
from fullframe.spatial.rules.registry import Merged, Unsupported

_DEPTH = (
    "Depth cuts the third dim from the end, which is D in volumes (N, C, D, H, W) and C in images; split images over "
    "a mesh without depth, init_mesh(height=..., width=...)."
)


@dataclass(frozen=True, eq=False)
class Spec:
    """What all ranks know of a split tensor: its global shape and where it is cut. Compare with `is`."""

    spatial: Spatial
    shape: tuple[int, ...]
    placements: Placements
    gather: bool  # what has no rule is gathered rather than refused
    strides: tuple[int, ...] | None = None  # of the whole tensor as torch would have it; None: contiguous
    approved: dict[Any, Any] = field(default_factory=dict)  # calls that need no checking, and the spec of their result
    plans: dict[Any, Any] = field(default_factory=dict)  # what rules have worked out for calls of a form

    def of(self, dim: int) -> Placement | None:
        """The placement of a dim that is nothing but one split factor; None when the dim is whole.

        Raises Merged for a dim that is merged from several factors; the dispatch then brings it to runs of rows.
        """
        here = [p for p in self.placements if p.dim == dim % len(self.shape)]
        if not here:
            return None
        if len(here) > 1 or not here[0].is_plain:
            raise Merged(self, dim % len(self.shape))
        return here[0]

    def cuts(self, dim: int) -> Placements:
        """The placements that cut a dim: none of one that is whole, several of one that is merged from several."""
        dim %= len(self.shape)
        return tuple(p for p in self.placements if p.dim == dim)

    def held(self, dim: int) -> range:
        """The global rows of a dim that this rank holds; raises Merged for a dim that is merged."""
        placement = self.of(dim)
        return range(self.shape[dim]) if placement is None else self.rows(placement)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of what this rank holds."""
        return local_shape(self.shape, self.placements, [self.coordinates[p.axis] for p in self.placements])

    def shape_at(self, place: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of what the rank with these coordinates holds."""
        parts = [self.spatial.coordinate_at(p.axis, place) for p in self.placements]
        return local_shape(self.shape, self.placements, parts)

    @property
    def largest_shape(self) -> tuple[int, ...]:
        """That of the largest part, whichever rank holds it."""
        sizes = [p.extents.sizes for p in self.placements]
        return local_shape(self.shape, self.placements, [held.index(max(held)) for held in sizes])

    def rows(self, placement: Placement) -> range:
        """The global rows that this rank holds of what the placement cuts."""
        return placement.extents.ranges[self.spatial.axis(placement.axis).coordinate]

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks over which it is split."""
        axis = self._axis
        return self.spatial.replica if axis is None else axis.group

    @property
    def parts(self) -> int:
        """Over how many ranks it is split."""
        axis = self._axis
        return 1 if axis is None else axis.size

    @property
    def coordinate(self) -> int:
        """This rank's number among those of `group`; 0 where it is not split."""
        axis = self._axis
        return 0 if axis is None else axis.coordinate

    @cached_property
    def _axis(self) -> Axis | None:
        """The axes over which it is split, as one."""
        axes = [p.axis for p in self.placements]
        return self.spatial.axis(self.spatial.joint(axes)) if axes else None

    def require_plain(self, dims: Iterable[int]) -> None:
        """Raises Merged where one of the dims is merged from several factors."""
        for dim in dims:
            self.of(dim)

    def is_split(self, dim: int) -> bool:
        """Whether any part of the dim is split."""
        dim %= len(self.shape)
        for p in self.placements:  # noqa: SIM110  a generator takes twice the time, in each norm
            if p.dim == dim:
                return True
        return False

    def require_whole(self, reason: str, *dims: int) -> None:
        """Raises Unsupported, for `reason`, where any part of one of the dims is split."""
        here = [p for p in self.placements if p.dim in [dim % len(self.shape) for dim in dims]]
        if any("depth" in axes_in(p.axis) and p.dim == len(self.shape) - 3 for p in here):
            raise Unsupported(reason, _DEPTH)
        if here:
            raise Unsupported(reason)

    def require_in_order(self, dims: Collection[int] | None = None) -> None:
        """Raises Merged where a mask has picked the rows of one of the dims, all if None: they lie in another order."""
        for p in self.placements:
            if p.order is not None and (dims is None or p.dim in dims):
                raise Merged(self, p.dim)

    def require_filled(self) -> None:
        """Raises Merged where a mask has picked nothing on some rank; the dispatch then brings the dim to runs of rows.

        For rules that cannot do without a row.
        """
        for p in self.placements:
            if p.order is not None and p.extents.has_empty:
                raise Merged(self, p.dim)

    def with_(self, shape: Sequence[int], placements: Placements) -> "Spec":
        """The spec of a result with this shape and these placements."""
        return spec_of(self.spatial, tuple(shape), placements, self.gather, None)

    def recut(self, placement: Placement, other: Placement) -> "Spec":
        """The spec with `other` in the place of one of its placements."""
        return self.with_(self.shape, tuple(other if p is placement else p for p in self.placements))

    def resized(self, dim: int, size: int, extents: Extents | None = None) -> "Spec":
        """The spec of a result with `size` rows in one dim, cut at `extents` where they are given.

        Raises Merged for new boundaries of a dim that is merged from several factors.
        """
        dim %= len(self.shape)
        placements = self.placements
        if extents is not None:
            placement = self.of(dim)
            placements = tuple(p.recut(extents) if p is placement else p for p in placements)
        return self.with_((*self.shape[:dim], size, *self.shape[dim + 1 :]), placements)

    def whole_along(self, axes: Collection[str]) -> "Spec":
        """The spec without the cuts over the named mesh axes."""
        return self.with_(self.shape, tuple(p for p in self.placements if p.axis not in axes))

    def strided(self, strides: tuple[int, ...] | None) -> "Spec":
        """The same spec with these strides of the whole tensor."""
        return spec_of(self.spatial, self.shape, self.placements, self.gather, strides)

    @cached_property
    def fleeting(self) -> bool:
        """Whether it is of one batch alone, as a mask has picked some of its rows: nothing is kept about it."""
        return any(p.order is not None for p in self.placements)

    @cached_property
    def facts(self) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """What torch would know of the whole tensor beside its dtype."""
        return self.shape, self.strides

    @property
    def elementwise(self) -> "Spec":
        """The spec of the result of a pointwise function: torch keeps the order of strides, not their gaps."""
        return self if self.strides is None or self.strides == self._without_gaps else self.strided(self._without_gaps)

    @cached_property
    def _without_gaps(self) -> tuple[int, ...] | None:
        """The strides, for a spec that held itself would outlive its tensors, and the mask that picked them."""
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return strides_of(torch.empty_strided(self.shape, self.strides or (), device="meta") + 1)

    @property
    def coordinates(self) -> dict[str, int]:
        """This rank's part along each spatial axis, and along several as one."""
        return self.spatial.coordinates


def strides_of(whole: torch.Tensor) -> tuple[int, ...] | None:
    """The strides of a whole plain tensor as a spec has them.

    Those of dims of one row are kept too, of which a contiguous tensor may have any: a kernel tells by them in which
    order its result lies, and by that noise is drawn.
    """
    strides = whole.stride()
    return None if strides == _contiguous(whole.shape) else strides


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides that torch gives to what it makes anew."""
    steps = accumulate((max(size, 1) for size in shape[:0:-1]), mul, initial=1)
    return tuple(steps)[::-1] if shape else ()


def spec_of(
    spatial: Spatial, shape: tuple[int, ...], placements: Placements, gather: bool, strides: tuple[int, ...] | None
) -> Spec:
    """The one `Spec` object for these facts.

    It is kept with the mesh, or, where a mask has picked the rows, for as long as it is used: the mask's next batch
    picks others.
    """
    for p in placements:
        if p.order is not None:
            key = spatial, shape, placements, gather, strides
            found: Spec | None = p.order.specs.get(key)
            if found is None:
                p.order.specs[key] = found = Spec(*key)
            return found
    return _kept(spatial, shape, placements, gather, strides)


@kept_with_mesh(maxsize=16384)
def _kept(
    spatial: Spatial, shape: tuple[int, ...], placements: Placements, gather: bool, strides: tuple[int, ...] | None
) -> Spec:
    """In plain integers, as it is kept and others are made from it."""
    strides = None if strides is None else tuple(map(int, strides))
    return Spec(spatial, tuple(map(int, shape)), tuple(map(_in_integers, placements)), gather, strides)


def _in_integers(p: Placement) -> Placement:
    bounds = tuple(map(int, p.extents.bounds))
    return Placement(p.axis, int(p.dim), Extents(bounds), int(p.outer), int(p.inner))
