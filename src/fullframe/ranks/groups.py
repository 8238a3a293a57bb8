"""The process groups of a replica's ranks and of its axes.

On GPUs a group is a communicator, whose messages queue up behind each other. So there the axes have their own, apart
from the job's, in which gradients travel in large buckets; before those in the device's queue; and open before the
first message, as NCCL wants all ranks of a group to take part in that. By gloo a group costs threads: the mesh's do.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fullframe.ranks import device


class Groups(NamedTuple):
    """Process groups of this rank; one may stand for several."""

    replica: dist.ProcessGroup
    axes: dict[str, dist.ProcessGroup]  # the spatial axes, by name
    pairs: dict[tuple[str, str], dist.ProcessGroup]  # each two of three axes that all have several ranks

    @property
    def distinct(self) -> list[dist.ProcessGroup]:
        """Each of them once, in the same order on all ranks."""
        return list(dict.fromkeys([*self.axes.values(), *self.pairs.values(), self.replica]))


def groups_of(mesh: DeviceMesh, own: bool) -> Groups:
    """The groups of the mesh's spatial axes, which are all but the first; all ranks of the job call it.

    With `own` none of them is the job's. Where one axis alone is split it is the whole replica, and one group serves
    for both.
    """
    names, ranks = (mesh.mesh_dim_names or ())[1:], mesh.mesh
    split = [name for dim, name in enumerate(names, start=1) if ranks.size(dim) > 1]
    axes = {name: mesh.get_group(name) for name in names}
    if own:
        axes |= {name: _new(_along(ranks, 1 + names.index(name)), f"fullframe {name}") for name in split}
    if len(split) < 2:
        replica = axes[(*split, *names)[0]]
    elif len(ranks) == 1 and not own:
        replica = dist.group.WORLD  # type: ignore[assignment]
    else:
        replica = _new(ranks.flatten(1).tolist(), "fullframe replica")
    pairs: dict[tuple[str, str], dist.ProcessGroup] = {}
    if len(split) > 2:
        for number, name in enumerate(split, start=1):
            first, second = (other for other in split if other != name)
            lines = ranks.movedim(number, 1).flatten(2).flatten(0, 1).tolist()
            pairs[first, second] = _new(lines, f"fullframe {first} and {second}")
    groups = Groups(replica, axes, pairs)
    if own:
        open_groups(groups.distinct, mesh.device_type)
    return groups


_of_all: "WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup]" = WeakKeyDictionary()  # by the job's group
_opened: "WeakSet[dist.ProcessGroup]" = WeakSet()


def group_of_all() -> dist.ProcessGroup:
    """All ranks, apart from the job's group: for what they send in another order than buckets of gradients there.

    All ranks make the first call. On GPUs it takes no memory before its first message.
    """
    job: Any = dist.group.WORLD
    if job not in _of_all:
        _of_all[job] = _new([range(dist.get_world_size())], "fullframe all")
    return _of_all[job]


def open_group_of_all(kind: str) -> None:
    """All ranks make the first call, while no buckets are under way."""
    open_once(group_of_all(), kind)


def open_once(group: dist.ProcessGroup, kind: str) -> None:
    """Open it where it is not; NCCL may not do that while buckets of gradients are under way."""
    if group not in _opened:
        _opened.add(group)
        open_groups([group], kind)


_of_models: "WeakKeyDictionary[dist.ProcessGroup, dict[int, dist.ProcessGroup]]" = WeakKeyDictionary()


def group_of_model(number: int) -> dist.ProcessGroup:
    """All ranks, for the gradients of a model that shares no group with others; all ranks make the first call."""
    job: Any = dist.group.WORLD
    groups = _of_models.setdefault(job, {})
    if number not in groups:
        groups[number] = dist.new_group(timeout=timeout_of_job(), group_desc=f"fullframe model {number}")
    return groups[number]


def forget_groups_of_all() -> list[dist.ProcessGroup]:
    """Make others from now on; those of all ranks that there were, but for the job's, to be ended."""
    job: Any = dist.group.WORLD
    if job is None:
        return []
    own = [_of_all.pop(job)] if job in _of_all else []
    return [*own, *_of_models.pop(job, {}).values()]


def _along(ranks: torch.Tensor, dim: int) -> list[list[int]]:
    """The ranks of each line of the mesh along `dim`."""
    lines: list[list[int]] = ranks.movedim(dim, -1).flatten(0, -2).tolist()
    return lines


def _new(everyone: Sequence[Sequence[int]], name: str) -> dist.ProcessGroup:
    """A group of each of some sets of ranks; this rank's. Every rank makes every group, in one order."""
    timeout = timeout_of_job()
    mine: dist.ProcessGroup | None = None
    for ranks in everyone:
        group = dist.new_group(list(ranks), timeout=timeout, pg_options=urgent(timeout), group_desc=name)
        mine = group if dist.get_rank() in ranks else mine
    assert mine is not None
    return mine


def timeout_of_job() -> timedelta | None:
    """How long a message of the job's group may take; None where its backend does not say."""
    group: Any = dist.group.WORLD
    options = getattr(group._get_backend(device.place_of_numbers()), "options", None)  # a job may have NCCL alone
    return getattr(options, "_timeout", None)


def urgent(timeout: timedelta | None) -> Any:
    """NCCL's options for messages that go before others on the device; None for other backends, which have none."""
    if device.own_backend() != "nccl" or not device.sends_between_devices():
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if timeout is not None:
        options._timeout = timeout
    return options


def open_groups(groups: Sequence[dist.ProcessGroup], kind: str) -> None:
    """Have all ranks of each group send something."""
    for group in groups:
        if dist.get_world_size(group) > 1:
            dist.all_reduce(torch.zeros(1, device=device.current(kind)), group=group)
