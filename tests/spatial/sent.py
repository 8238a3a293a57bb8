"""Bytes that an op sends: none through shared memory, so that all can be counted."""

from unittest import mock

from torch import Tensor

import fullframe as ff
from benchmarks.communication.traffic import Traffic
from fullframe.ranks import collectives, exchange
from tests.exactness import mesh
from tests.spatial.cases import Op


def bytes_sent(op: Op, whole: Tensor) -> tuple[int, int]:
    """What this rank of two sends for `op(x)`, x split over the width, and for its backward; heads included."""
    x = ff.shard(whole, mesh(1, 2))
    x = x.requires_grad_() if whole.is_floating_point() else x
    with mock.patch.object(exchange, "fits", _nothing_does), mock.patch.object(collectives, "fits", _nothing_does):
        with Traffic() as forward:
            y = op(x)
        with Traffic() as backward:
            if y.requires_grad:
                y.sum().backward()
    return forward.total(), backward.total()


def _nothing_does(tensor: Tensor) -> bool:
    return False
