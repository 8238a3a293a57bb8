"""The random states that a user's program draws from, which must be equal on all ranks of a replica.

What is drawn for whole values (stochastic depth, a size, a mix of two samples) is drawn on each rank by itself.
"""

import random
import sys
import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fullframe.ranks.mesh import Spatial

NAMES = ("torch", "random", "numpy.random", "torch.cuda")


def share_random_states(spatial: Spatial) -> None:
    """Torch's, Python's and numpy's (where it is loaded) on the ranks of a replica become those of its first rank."""
    if spatial.size == 1:
        return
    numpy: Any = sys.modules.get("numpy")
    states: list[Any] = [
        torch.get_rng_state(),
        random.getstate(),
        numpy.random.get_state() if numpy else None,
        torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    ]
    device = torch.device(spatial.mesh.device_type)
    dist.broadcast_object_list(states, spatial.replica_ranks[0], group=spatial.replica, device=device)
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    if numpy and states[2] is not None:
        numpy.random.set_state(states[2])
    if torch.cuda.is_available() and states[3] is not None:
        torch.cuda.set_rng_state(states[3])


def digests() -> tuple[int, ...]:
    """A number for each of `NAMES`: the same on two ranks where they would draw the same."""
    _, numbers, gauss = random.getstate()
    numpy: Any = sys.modules.get("numpy")
    found = [_checksum(torch.get_rng_state()), hash((numbers, gauss or 0.0)), 0, 0]
    if numpy:
        _, key, position, *rest = numpy.random.get_state()
        found[2] = zlib.crc32(key, position) ^ hash(tuple(rest))
    if torch.cuda.is_initialized():
        found[3] = _checksum(torch.cuda.get_rng_state())
    return tuple(found)


def _checksum(state: Tensor) -> int:
    return zlib.crc32(state.numpy().data)
