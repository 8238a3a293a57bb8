"""One exchange by itself: its values, what it takes the host and the device, and whether a convolution hides it.

On one GPU NCCL sends to the very rank that receives. On the CPU messages go nowhere, so values are not compared.
"""

import weakref
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import fullframe as ff
from benchmarks.gpu.found import Found, device_of, seconds_of
from fullframe.ranks.channel import channel_of
from fullframe.ranks.exchange import InFlight, Message
from fullframe.ranks.mesh import Axis
from fullframe.simulation.fake.world import fake_job

_SIZES = (2**10, 2**16, 2**20, 2**26)  # bytes


def loopback(kind: str) -> Found:
    """Two strips to and from a neighbour that is this rank, in both memory formats and several sizes."""
    found, device = Found(), device_of(kind)
    if kind != "cpu":
        ff.init_mesh()
    with fake_job(0, 2) if kind == "cpu" else nullcontext():
        peer = dist.get_world_size() - 1
        group: Any = dist.group.WORLD
        axis = Axis("width", 2, 0, (0, peer), channel_of(group), weakref.ref(group))
        for layout in (torch.contiguous_format, torch.channels_last):
            strip = torch.randn(2, 16, 40, 3, device=device).to(memory_format=layout)
            into = [torch.empty_like(strip) for _ in range(2)]
            received = _sent(axis, [strip, 2 * strip], into)
            same = kind == "cpu" or all(torch.equal(a, b) for a, b in zip(received, (strip, 2 * strip), strict=True))
            found.require(same, f"strips in {layout} do not arrive as they were sent")
        for size in _SIZES if kind != "cpu" else _SIZES[:2]:
            strips = [torch.zeros(size // 4, device=device) for _ in range(2)]
            into = [torch.empty_like(strip) for strip in strips]
            both, host = seconds_of(lambda strips=strips, into=into: _sent(axis, strips, into), device)  # type: ignore[misc]
            found.note(bytes=size, microseconds=1e6 * both, host_microseconds=1e6 * host)
        _overlap(found, axis, device, 128 if kind != "cpu" else 8)
    return found


def _sent(axis: Axis, strips: list[Tensor], into: list[Tensor]) -> list[Tensor]:
    return InFlight(axis, [_to_peer(axis, s) for s in strips], [_to_peer(axis, s) for s in into]).wait()


def _to_peer(axis: Axis, strip: Tensor) -> Message:
    return Message(axis.ranks[-1], strip)  # the job's only axis: a rank's coordinate is its number


def _overlap(found: Found, axis: Axis, device: torch.device, side: int) -> None:
    """A convolution of some milliseconds beside 64 MiB: together they should take little longer than the longer."""
    x, weight = torch.randn(8, 2 * side, side, side, device=device), torch.randn(256, 2 * side, 3, 3, device=device)
    strips = [torch.zeros(2**10 * side**2, device=device)]
    into = [torch.empty_like(strips[0])]

    def together() -> None:
        flight = InFlight(axis, [_to_peer(axis, strips[0])], [_to_peer(axis, into[0])])
        F.conv2d(x, weight, padding=1)
        flight.wait()

    alone, _ = seconds_of(lambda: F.conv2d(x, weight, padding=1), device)
    message, _ = seconds_of(lambda: _sent(axis, strips, into), device)
    both, _ = seconds_of(together, device)
    hidden = (alone + message - both) / min(alone, message)
    found.note(convolution_ms=1e3 * alone, message_ms=1e3 * message, both_ms=1e3 * both, hidden_share=hidden)
