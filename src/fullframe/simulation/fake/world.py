"""One rank of a job that does not exist: a process group of any size whose messages go nowhere."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

_TABLES = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg")
_FIRST = 1_000_000  # names are counted from here, so that no group is called like one of a real job


def _world() -> Any:
    """A record of process groups, as torch keeps one, apart from the real job's."""
    return type("World", (c10d._World,), {"group_count": _FIRST, **{name: {} for name in _TABLES}})()


@contextmanager
def fake_job(rank: int, ranks: int) -> Iterator[None]:
    """Inside, this process is `rank` of a job of `ranks`; a real process group waits untouched."""
    real, real_group, real_backend, excepthook = c10d._world, c10d.GroupMember.WORLD, c10d._backend, sys.excepthook
    c10d._world = _world()
    try:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        yield
    finally:
        for group in c10d._world.pg_names:
            c10d._unregister_process_group(group.group_name)
        c10d._world, c10d._backend, sys.excepthook = real, real_backend, excepthook
        c10d._update_default_pg(real_group)
