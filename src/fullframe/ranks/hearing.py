"""How a rank that waits by NCCL hears of an error that another one has met: through the job's store.

NCCL brings no heads, and a copy of what it is to bring cannot look anywhere: so the host waits by asking.
"""

import time

import torch
import torch.distributed as dist
from torch import Tensor

from fullframe.errors import DivergenceError
from fullframe.ranks.channel import Channel, errors_announced, word_of_error
from fullframe.ranks.tags import line
from fullframe.ranks.waiting import waiting_for_ranks

_NAP_SECONDS = 0.00005
_LOOK_SECONDS = 1.0  # between looks at the store
_LATE_SECONDS = 3.0  # for what was sent before an error, or before this rank meets it too, as many are met by all


def arrived(tensor: Tensor, channel: Channel) -> Tensor:
    """The tensor, once it is there for the host to read: what came, by NCCL, from other ranks of the channel.

    Raises DivergenceError where one of them has met an error that this rank has not, and the message does not come.
    """
    if channel.device is None:
        return tensor
    event = torch.Event(channel.device)
    event.record()
    begun, looked, heard = time.monotonic(), time.monotonic(), ""
    with waiting_for_ranks():
        while not event.query():
            time.sleep(_NAP_SECONDS)
            now = time.monotonic()
            if now < looked + _LOOK_SECONDS:
                continue
            looked, heard = now, heard or _heard(channel)
            if heard and now > begun + _LATE_SECONDS:
                raise DivergenceError(heard, True)
    return tensor


def _heard(channel: Channel) -> str:
    for rank in channel.others:
        word = word_of_error(rank, errors_announced() + 1)
        if word:
            return (
                f"rank {rank} raised {word}; rank {dist.get_rank()} did not, and is at: {line()}. An error that one "
                "rank alone meets must end the job, or be caught on no rank"
            )
    return ""
