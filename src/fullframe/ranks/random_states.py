"""The random states that a user's program draws from, which must be equal on all ranks of a replica.

What is drawn for whole values (stochastic depth, a size, a mix of two samples) is drawn on each rank by itself.
"""

import random
import zlib
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fullframe.ranks import device
from fullframe.ranks.mesh import Axis, Spatial
from fullframe.ranks.randomness import random_state, set_random_state
from fullframe.ranks.waiting import waiting_for_ranks

NAMES = ("torch", "random", "numpy.random", "torch's on the GPU")


def share_random_states(spatial: Spatial, stages: Axis | None = None) -> None:
    """Torch's, Python's and numpy's on the ranks of a replica, of all its stages, become those of the first rank."""
    place = torch.device(spatial.mesh.device_type)
    groups = [(spatial.replica, spatial.replica_ranks, spatial.channel)]
    groups += [(stages.group, stages.ranks, stages.channel)] if stages is not None else []
    for group, ranks, channel in groups:
        if len(ranks) == 1 or not channel.tagged:  # a simulation's other ranks send nothing
            continue
        device.begin()  # `random_state` leaves out a generator that is not there yet
        states = [random_state()]
        with waiting_for_ranks():
            dist.broadcast_object_list(states, ranks[0], group=group, device=place)
        set_random_state(states[0])


def digests() -> tuple[int, ...]:
    """A number for each of `NAMES`: the same on two ranks where they would draw the same."""
    _, numbers, gauss = random.getstate()
    of_numpy: Any = np.random.get_state()
    _, key, position, *rest = of_numpy
    of_numpy = zlib.crc32(key, position) ^ hash(tuple(rest))
    of_device = device.random_state()
    own = 0 if of_device is None else _checksum(of_device)
    return _checksum(torch.get_rng_state()), hash((numbers, gauss or 0.0)), of_numpy, own


def _checksum(state: Tensor) -> int:
    return zlib.crc32(state.numpy().data)
