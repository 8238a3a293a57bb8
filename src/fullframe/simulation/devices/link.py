"""What the link between two ranks really does, by the exchange and the all-reduce that a step uses."""

import dataclasses
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fullframe.errors import DeviceError
from fullframe.ranks.exchange import InFlight, Message
from fullframe.ranks.mesh import spatial_of
from fullframe.simulation.devices.calibration import Points, Rates

_SIZES = (2**10, 2**15, 2**18, 2**20, 2**24)


def with_link(rates: Rates, mesh: DeviceMesh) -> Rates:
    """`rates` with the link between the first two ranks; every rank of a mesh of width 2 calls it.

    The ranks send a fixed number of times, so that none waits for a message that never comes.
    """
    axis = spatial_of(mesh).axis("width")
    if axis.size != 2:
        raise DeviceError(f"the link is measured between 2 ranks, the mesh has width {axis.size}; start 2 ranks")
    device = torch.device(mesh.device_type)

    def exchange(size: int) -> Callable[[], object]:
        out, into = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
        peer = 1 - axis.coordinate
        return lambda: InFlight(axis, [Message(peer, out)], [Message(peer, into)]).wait()

    def reduce(size: int) -> Callable[[], object]:
        total = torch.zeros(size // 4, device=device)
        return lambda: dist.all_reduce(total, group=axis.group)

    return dataclasses.replace(rates, link=_timed(exchange, device), all_reduce=_timed(reduce, device))


def _timed(make: Callable[[int], Callable[[], object]], device: torch.device) -> Points:
    points = []
    for size in _SIZES:
        call = make(size)
        repeats = max(5, min(100, 2**24 // size))
        for counted in (False, True):
            dist.barrier()
            started = time.perf_counter()
            for _ in range(repeats if counted else 3):
                call()
            if device.type == "cuda":
                torch.cuda.synchronize()
            took = (time.perf_counter() - started) / repeats
        points.append((float(size), size / took))
    return tuple(points)
