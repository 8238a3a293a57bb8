"""Two gloo ranks of their own, for torch has one device made in Python a process, and for good."""

import atexit

from tests.cuda_like.device import register
from tests.rank_group import RankGroup

RANKS = 2
_group: list[RankGroup] = []


def device_ranks() -> RankGroup:
    """The ranks, started on first use; the device is known there."""
    if not _group or not _group[-1].alive:
        _group.append(RankGroup(RANKS))
        _group[-1].run(register)
    return _group[-1]


@atexit.register
def _close() -> None:
    for group in _group:
        if group.alive:
            group.close()
