"""One rank of a job that does not exist: a process group of any size whose messages go nowhere.

What torch does once for each rank of a real job is left out here, where it changes nothing for the one rank there is.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import device_mesh
from torch.distributed import distributed_c10d as c10d
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.testing._internal.distributed.fake_pg import FakeStore

from fullframe.simulation.fake.replaced import replaced

_TABLES = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg")
_FIRST = 1_000_000  # names are counted from here, so that no group is called like one of a real job

_make_group = c10d.new_group


def _world() -> Any:
    """A record of process groups, as torch keeps one, apart from the real job's."""
    return type("World", (c10d._World,), {"group_count": _FIRST, **{name: {} for name in _TABLES}})()


@contextmanager
def fake_job(rank: int, ranks: int) -> Iterator[None]:
    """Inside, this process is `rank` of a job of `ranks`; a real process group waits untouched."""
    real, real_group, real_backend, excepthook = c10d._world, c10d.GroupMember.WORLD, c10d._backend, sys.excepthook
    c10d._world = _world()
    try:
        with _as_large_as_one_rank():
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
            yield
    finally:
        for group in c10d._world.pg_names:
            c10d._unregister_process_group(group.group_name)
        c10d._world, c10d._backend, sys.excepthook = real, real_backend, excepthook
        c10d._update_default_pg(real_group)


@contextmanager
def _as_large_as_one_rank() -> Iterator[None]:
    """Inside, the cost of setting up a job does not grow with its ranks."""
    with ExitStack() as parts:
        for owner in (dist, c10d, device_mesh):
            parts.enter_context(replaced(owner, "new_group", _own_group))
        for owner in (dist, c10d):
            parts.enter_context(replaced(owner, "all_gather_object", _all_say_the_same))
        parts.enter_context(replaced(_fsdp_param, "_chunk_with_empty", _Chunks))
        yield


def _own_group(ranks: list[int] | None = None, *args: Any, **kwargs: Any) -> Any:
    """`dist.new_group`, but for groups without this rank, of which it would only learn the names.

    A fake group takes no options of NCCL's.
    """
    kwargs.pop("pg_options", None)
    if ranks is not None and dist.get_rank() not in ranks:
        return c10d.GroupMember.NON_GROUP_MEMBER
    return _make_group(ranks, *args, **kwargs)


def _all_say_the_same(found: list[Any], mine: Any, group: Any = None) -> None:
    """`dist.all_gather_object`, as the fake group answers: each rank has what this one has."""
    found[:] = [mine] * len(found)


class _Chunks:
    """FSDP2's list of a parameter's parts, one for each rank, of which it reads the first and its own."""

    def __init__(self, tensor: Tensor, count: int, dim: int):
        self._tensor, self._dim, self._rows = tensor, dim, -(-tensor.shape[dim] // count)

    def __getitem__(self, number: int) -> Tensor:
        first, size = number * self._rows, self._tensor.shape[self._dim]
        if first >= size > 0:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, first, min(self._rows, size - first))
