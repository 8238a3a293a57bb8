"""DistributedDataParallel as `Averaging` makes it, in a group of its own where another model may send meanwhile."""

import inspect
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fullframe.ranks.agreement import largest_on_any_rank
from fullframe.ranks.groups import group_of_model, open_once

_SYNC_BUFFERS = "forward_sync_buffers"  # in each forward; torch before 2.13 calls it broadcast_buffers
if _SYNC_BUFFERS not in inspect.signature(DistributedDataParallel).parameters:
    _SYNC_BUFFERS = "broadcast_buffers"


class DataParallel:
    """Wraps one model on devices of this `kind`, by `make`, as often as it is called; all ranks make it.

    A backward pass may be of several models, and a replica that leaves a layer of one unused gives that one's DDP its
    zeros when the pass ends: after the other's buckets, where the rest send them before. So with several replicas each
    model that comes while others are there sends in another group; the first, and so most, in the job's.
    """

    def __init__(self, make: Callable[..., nn.Module], kind: str, replicas: bool):
        self._make, self._kind, self._number = make, kind, 0
        if replicas:  # which models are still there is told by the garbage collector, by each rank's at its own time
            self._number = largest_on_any_rank(max((1 + other._number for other in _all), default=0))
            _all.add(self)

    def __call__(self, door: nn.Module, sync_buffers: bool) -> nn.Module:
        """`door` wrapped; with `sync_buffers` each replica takes the first one's in each forward pass."""
        options: dict[str, Any] = {_SYNC_BUFFERS: sync_buffers}
        if self._number:
            options["process_group"] = group_of_model(self._number)
        return self._make(
            door,
            gradient_as_bucket_view=True,  # a gradient lies in its bucket, not beside it
            init_sync=False,  # `parallelize` has compared and shared what the ranks hold
            **options,
        )

    def open(self) -> None:
        """Before the first backward pass, on all ranks: not all models that are wrapped are trained."""
        if self._number:
            open_once(group_of_model(self._number), self._kind)


_all: "WeakSet[DataParallel]" = WeakSet()
