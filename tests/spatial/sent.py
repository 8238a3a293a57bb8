"""How much an op sends to other ranks: bytes of whatever kind, or elements of exchanged rows."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

import fullframe as ff
from benchmarks.communication.traffic import by_process_groups
from fullframe.ranks.exchange import InFlight
from tests.exactness import mesh
from tests.spatial.cases import Op


def bytes_sent(op: Op, whole: Tensor) -> tuple[int, int]:
    """What this rank of two sends for `op(x)`, x split over the width, and for its backward; heads included.

    None goes through shared memory, so that all can be counted.
    """
    x = ff.shard(whole, mesh(1, 2))
    x = x.requires_grad_() if whole.is_floating_point() else x
    with by_process_groups() as forward:
        y = op(x)
    with by_process_groups() as backward:
        if y.requires_grad:
            y.sum().backward()
    return forward.total(), backward.total()


def elements_sent(op: Callable[[], Any]) -> int:
    """The elements that this rank sends in exchanges while `op()` runs."""
    counted, begin = [0], InFlight.__init__

    def counting(self: InFlight, axis: Any, sends: Any, receives: Any, kind: str = "rows") -> None:
        counted[0] += sum(message.tensor.numel() for message in sends)
        begin(self, axis, sends, receives, kind)

    InFlight.__init__ = counting  # type: ignore[method-assign]
    try:
        op()
    finally:
        InFlight.__init__ = begin  # type: ignore[method-assign]
    return counted[0]
