"""What the other ranks of a replica have of a step's split tensors: boundaries are known to all, from one rank's run.

Even parts of a frame need not stay even: a frame padded below to a square has all that was added on the last rank.
"""

from collections import Counter
from math import prod
from typing import Any

from fullframe.ranks.mesh import Spatial
from fullframe.spatial.spec import Spec
from fullframe.spatial.tensor import SpatialTensor

_UNEVEN = 0.02  # of what a rank has; less changes a prediction by less than it is off


class Shares:
    """The split tensors that functions gave, as `add` is told of them."""

    def __init__(self, spatial: Spatial):
        self._spatial = spatial
        self._bytes_an_element = Counter[Spec]()

    def add(self, result: Any) -> None:
        """A function's result; what is no split tensor, nor a few of them, is passed over."""
        for each in result if type(result) in (list, tuple) else (result,):
            if type(each) is SpatialTensor:
                self._bytes_an_element[each.spec] += each.dtype.itemsize

    def fuller(self) -> int | None:
        """The rank, counted within the replica, that has most more than this one; None where all have about as much."""
        own, here = 0, self._spatial.coordinate
        more = [0] * self._spatial.size
        for spec, bytes in self._bytes_an_element.items():
            held = [bytes * elements for elements in _elements(spec)]
            own += held[here]
            more = [total + max(other - held[here], 0) for total, other in zip(more, held, strict=True)]
        fullest = max(range(len(more)), key=lambda rank: more[rank])
        return fullest if more[fullest] > _UNEVEN * own else None


def _elements(spec: Spec) -> list[int]:
    """Of the tensor's elements those that each rank of the replica holds."""
    return [prod(spec.shape_at(place)) for place in spec.spatial.places]
