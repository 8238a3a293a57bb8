"""What a mask picks of split tensors: each rank's own elements stay where they are, and all know how many each has.

A mask over (N, H, W) = (1, 2, 4), split on W; 1 is true:

    1 0 | 1 1        rank 0 holds elements a d        torch's order is a b c d e:
    0 1 | 0 1        rank 1 holds elements b c e      runs a, bc, d, e, one for each row and rank

What treats all elements alike never needs torch's order. It is found when it is first asked for, from how many
elements each run has, which the ranks send each other once.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate, product
from math import prod
from typing import Any
from weakref import WeakValueDictionary, ref

import numpy as np
import torch
from torch import Tensor

from fullframe.geometry.extents import Extents
from fullframe.geometry.placement import Placement, local_factors
from fullframe.ranks.adjoint import linear
from fullframe.ranks.collectives import all_gather_no_grad
from fullframe.ranks.exchange import joined
from fullframe.ranks.mesh import Axis, axes_in
from fullframe.spatial.operands import has_values
from fullframe.spatial.spec import Spec

TAKEN_AS_FEW = (
    "what a mask picks is made whole on each rank somewhere, as where it is written at index tensors; a step whose "
    "masks pick more than a rank may hold is refused there, which a simulation does not see"
)
_REMEMBERED = 8  # the masks among which an equal one is looked for


class Selection:
    """The true elements of a mask of one spec; compare with `is`: equal masks that are still in use share one."""

    def __init__(self, spec: Spec, cells: Tensor, counts: tuple[int, ...], mask: Tensor | None = None):
        self.spec = spec  # of the mask
        self.mask = mask  # a copy of its local part, flattened, by which an equal one is known again; None: it is not
        self.cells = cells  # (own,) where the true elements stand in this rank's flattened part, ascending
        self.extents = Extents((0, *accumulate(counts)))  # of the elements, one rank's after another's
        self.specs: WeakValueDictionary[Any, Spec] = WeakValueDictionary()  # of the tensors it was picked from

    @property
    def axis(self) -> Axis:
        """The axis, or several as one, along which the elements lie on different ranks."""
        return self.spec.spatial.axis(_axis_of(self.spec))

    def placement(self, dim: int) -> Placement:
        """That of the picked elements, which become dim `dim`."""
        return Placement(self.axis.name, dim, self.extents, order=self)

    @cached_property
    def of_all(self) -> Tensor:
        """(all,) which of the elements, one rank's after another's, stands where in torch's order.

        All ranks that share the mask ask for it together; the first time they send how many elements their runs have.
        """
        spec, axis = self.spec, self.axis
        device = self.cells.device
        starts = [_starts(spec, coordinates).to(device) for coordinates in _coordinates(spec)]
        runs, most = len(starts[axis.coordinate]), max(map(len, starts))
        counts = self.cells.new_zeros(most)
        if runs and has_values(counts):
            here = _local_size(spec, spec.coordinates)
            counts = torch.bincount(self.cells // (here // runs), minlength=most)
        everyone = all_gather_no_grad(counts, axis.group, "runs of a mask")  # (ranks, runs)
        if not has_values(everyone):
            return torch.arange(self.extents.size, device=device)
        sizes = joined([counts[: len(begun)] for counts, begun in zip(everyone, starts, strict=True)], 0)
        first = sizes.cumsum(0) - sizes  # of each run, among the elements one rank's after another's
        order = joined(starts, 0).argsort()
        sizes, first = sizes[order], first[order]
        shift = first - (sizes.cumsum(0) - sizes)
        return torch.repeat_interleave(shift, sizes) + torch.arange(self.extents.size, device=device)

    @cached_property
    def own(self) -> Tensor:
        """(own,) where this rank's elements stand in torch's order; all ranks that share the mask ask for it."""
        places = torch.empty_like(self.of_all)
        places[self.of_all] = torch.arange(len(places), device=places.device)
        mine = self.extents.ranges[self.axis.coordinate]
        return places[mine.start : mine.stop]


def selected(mask: Tensor, spec: Spec) -> tuple[Selection, Tensor]:
    """The selection of a bool mask, whose local part is `mask`, and the rows (own,) that it picks of that, flattened.

    All ranks of the replica call it: one small message. Masks that are equal, `p[t > 0]` and `t[t > 0]`, give the same
    selection, as long as the first is still in use. A mask (rows,) of what a mask has picked selects of the first's
    tensor. A simulation takes all elements as true.
    """
    spatial, within = spec.spatial, next((p.order for p in spec.placements), None)
    recent: deque[ref[Selection]] = spatial.caches.setdefault(Selection, deque(maxlen=_REMEMBERED))
    held, flat = [known() for known in recent], mask.flatten()
    known_rows = _found_before(flat, spec, held) if within is None else None
    rows = cells = _true_places(flat) if known_rows is None else known_rows
    if within is not None:
        spec, cells = within.spec, within.cells[rows]
    told = [len(cells), *(int(_picks(known, spec, cells)) for known in held)]
    told += [0] * (1 + _REMEMBERED - len(told))
    message = torch.tensor(told, device=cells.device)
    gathered = all_gather_no_grad(message, spatial.replica, "mask")  # agreed by all, used or not
    agreed = [told] if not has_values(cells) else gathered.tolist()
    for number, known in enumerate(held):
        if known is not None and all(theirs[1 + number] for theirs in agreed):
            return known, rows if within is not None else known.cells
    if has_values(cells):
        ranks = spatial.axis(_axis_of(spec)).ranks
        counts = tuple(agreed[spatial.replica_ranks.index(rank)][0] for rank in ranks)
    else:  # a simulation, which takes all elements as true
        counts = tuple(_local_size(spec, where) for where in _coordinates(spec))
        spatial.caches.setdefault(may_be_fewer, set()).add(sum(counts))
    made = Selection(spec, cells, counts, flat.clone() if within is None and _is_quick(flat) else None)
    recent.append(ref(made))
    return made, rows


def may_be_fewer(shape: Sequence[int], spec: Spec) -> bool:
    """Whether, in a simulation, a tensor has as many rows as a mask there has elements: how many it picks is not known.

    By that number, as a mask's order is forgotten where its rows are sorted. `spec` is any on the same mesh, which
    remembers with `TAKEN_AS_FEW` that it was asked and so.
    """
    caches = spec.spatial.caches
    found = not caches.get(may_be_fewer, frozenset()).isdisjoint(shape)
    if found:
        caches[TAKEN_AS_FEW] = True
    return found


def _is_quick(flat: Tensor) -> bool:
    """Whether to compare a mask takes no message and little time: on the CPU, where it has values."""
    return type(flat) is Tensor and flat.device.type == "cpu"


def _found_before(flat: Tensor, spec: Spec, held: list[Selection | None]) -> Tensor | None:
    """The true places of a mask that equals that of a selection in use: to find them takes seven times as long.

    The contents are compared with a copy, as `.data` counts no versions.
    """
    if _is_quick(flat):
        for known in held:
            if known is None or known.spec is not spec or known.mask is None:
                continue
            if np.array_equal(known.mask.numpy(), flat.numpy()):  # in a tenth of torch.equal's time
                return known.cells
    return None


def _true_places(flat: Tensor) -> Tensor:
    if _is_quick(flat):  # NumPy takes a tenth of torch's time
        return torch.from_numpy(np.flatnonzero(flat.numpy()))
    return flat.nonzero().squeeze(1)


def _picks(known: Selection | None, spec: Spec, cells: Tensor) -> bool:
    """Whether a known selection is that of these cells, as far as this rank sees."""
    if known is None or known.spec is not spec or known.cells.device != cells.device:
        return False
    if known.cells is cells:
        return True
    if not has_values(cells):
        return known.cells.shape == cells.shape
    return torch.equal(known.cells, cells)


def picked(x: Tensor, dim: int, dims: int, cells: Tensor) -> Tensor:
    """(..., cells, ...) elements of the dims `dim` to `dim + dims`, counted as if flattened; differentiable."""
    shape = x.shape

    def take(x: Tensor) -> Tensor:
        merged = (*shape[:dim], prod(shape[dim : dim + dims]), *shape[dim + dims :])
        try:
            return x.view(merged).index_select(dim, cells)
        except RuntimeError:  # of a permuted tensor, which is not copied for this
            return x[(slice(None),) * dim + torch.unravel_index(cells, shape[dim : dim + dims])]

    def put(gradient: Tensor) -> Tensor:
        result = gradient.new_zeros(shape)
        flat = result.flatten(dim, dim + dims - 1)
        if dim == gradient.dim() - 1:  # three times as fast there
            flat.scatter_(dim, cells.expand(gradient.shape), gradient)
        else:
            flat.index_copy_(dim, cells, gradient)
        return result

    return linear(x, take, put)


def numbers_held(spec: Spec, dim: int, coordinates: dict[str, int]) -> Tensor:
    """The numbers, in the whole tensor, of what the rank with these coordinates holds along a dim, ascending."""
    held, cut = torch.arange(spec.shape[dim]), tuple[Placement, ...]()
    for p in spec.placements:
        if p.dim == dim:
            rows = p.extents.ranges[coordinates[p.axis]]
            parts = held.unflatten(0, local_factors(p, cut, coordinates))
            held, cut = parts.narrow(1, rows.start, len(rows)).flatten(), (*cut, p)
    return held


def _axis_of(spec: Spec) -> str:
    return spec.spatial.joint([p.axis for p in spec.placements])


def _coordinates(spec: Spec) -> Iterator[dict[str, int]]:
    """Those of the ranks among which the spec is split, in their order."""
    order = [axis.name for axis in spec.spatial.axes]
    names = sorted({p.axis for p in spec.placements}, key=lambda name: order.index(axes_in(name)[0]))
    for parts in product(*(range(spec.spatial.axis(name).size) for name in names)):
        yield dict(zip(names, parts, strict=True))


def _local_size(spec: Spec, coordinates: dict[str, int]) -> int:
    return prod(len(numbers_held(spec, dim, coordinates)) for dim in range(len(spec.shape)))


def _starts(spec: Spec, coordinates: dict[str, int]) -> Tensor:
    """(runs,) the first element's number, in the whole tensor flattened, of each run that the rank holds.

    A run is a row of the innermost split factor with all that lies within it.
    """
    last = min(spec.placements, key=lambda p: (-p.dim, p.inner))
    _, rows, inner = local_factors(last, spec.placements, coordinates)
    starts = torch.zeros(1, dtype=torch.int64)
    for dim in range(last.dim + 1):
        held = numbers_held(spec, dim, coordinates)
        held = held[:: max(rows * inner, 1)] if dim == last.dim else held
        starts = (starts[:, None] + held * prod(spec.shape[dim + 1 :])).flatten()
    return starts
