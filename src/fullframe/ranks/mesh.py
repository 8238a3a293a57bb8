"""The mesh ("data", "height", "width") and the few facts about it that every op needs."""

import os
import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property, lru_cache, wraps
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fullframe.errors import MeshError
from fullframe.ranks import device
from fullframe.ranks.channel import Channel, channel_of, forget_channels, share_channel
from fullframe.ranks.groups import groups_of

AXES = ("data", "height", "width")
BOTH = "height and width"  # the two as one axis, of which the replica's ranks are the coordinates

P = ParamSpec("P")
R = TypeVar("R")


def drawn_seed(generator: torch.Generator | None = None) -> int:
    """A number drawn from a generator, the default CPU one where none is given; it moves on, as with any draw."""
    device = "cpu" if generator is None else generator.device
    return int(torch.randint(2**48, (), generator=generator, device=device).item())


@dataclass(frozen=True, eq=False)
class Axis:
    """One spatial axis of the mesh as this rank sees it."""

    name: str
    size: int
    coordinate: int  # of this rank
    ranks: tuple[int, ...]  # the job's ranks along the axis, by coordinate
    channel: Channel
    _group: "ref[dist.ProcessGroup]"

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of the axis; raises MeshError once the job has ended."""
        return _still_there(self._group)


@dataclass(frozen=True, eq=False)
class Spatial:
    """The spatial axes of one replica; one object per mesh, so `is` compares.

    It does not keep the process groups, whose threads end with the job; what is remembered for the mesh
    (`kept_with_mesh`) ends with it.
    """

    mesh: DeviceMesh
    axes: tuple[Axis, ...]  # height and width; the last one's coordinate changes fastest from rank to rank
    replica_ranks: tuple[int, ...]  # height x width ranks that hold one sample
    channel: Channel  # between them
    _replica: "ref[dist.ProcessGroup]"
    draw_seed: Callable[[torch.Generator | None], int] = drawn_seed  # alike on all ranks of the replica
    caches: dict[Any, Any] = field(default_factory=dict)

    @property
    def replica(self) -> dist.ProcessGroup:
        """The process group of `replica_ranks`; raises MeshError once the job has ended."""
        return _still_there(self._replica)

    def axis(self, name: str) -> Axis:
        """The axis called `name`; raises MeshError for a name that is none."""
        for axis in self.axes:
            if axis.name == name:
                return axis
        if name == BOTH:
            return self.both
        raise MeshError(f"a mesh has the spatial axes height and width, none called {name!r}")

    @cached_property
    def both(self) -> Axis:
        """The ranks of the replica as one axis, for what lies on them in no order of rows and columns."""
        return Axis(BOTH, self.size, self.coordinate, self.replica_ranks, self.channel, self._replica)

    def group(self, names: Collection[str]) -> dist.ProcessGroup:
        """The ranks over which a value split along the named axes is spread."""
        alone = {self.axis(name).name for name in names}
        return self.axis(*alone).group if len(alone) == 1 else self.replica

    def coordinate_along(self, names: Collection[str]) -> int:
        """This rank's number among the ranks of `group(names)`."""
        number = 0
        for axis in self.axes:
            if axis.name in names or BOTH in names:
                number = number * axis.size + axis.coordinate
        return number

    @property
    def size(self) -> int:
        """Ranks in one replica."""
        return len(self.replica_ranks)

    @property
    def coordinate(self) -> int:
        """This rank's number within its replica."""
        return self.coordinate_along(AXES)


def axes_in(name: str) -> tuple[str, ...]:
    """The axes of the mesh that an axis is made of: itself, or height and width."""
    return AXES[1:] if name == BOTH else (name,)


def init_mesh(height: int = 1, width: int = 1, *, timeout_seconds: float = 600.0) -> DeviceMesh:
    """The mesh ("data", "height", "width") over all ranks; data = world / (height * width).

    Under torchrun it starts the process group (nccl with GPUs, else gloo), in which a rank waits `timeout_seconds` for
    the others before it gives up; without torchrun it is one process; a group that is already there is used. Every rank
    of the job calls it. The same call gives the same mesh: each new one would bring process groups, whose threads gloo
    wakes a hundred times a second for as long as the job lasts.

    Raises MeshError when `height * width` does not divide the world, or the ranks have not a GPU each or none at all;
    DeviceError when there is a GPU that torch cannot use.
    """
    if height < 1 or width < 1:
        raise MeshError(f"a mesh needs height >= 1 and width >= 1, got height={height}, width={width}")
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if world % (height * width):
        raise MeshError(
            f"height {height} x width {width} = {height * width} does not divide the {world} ranks of this job; "
            f"start a multiple of {height * width} ranks or choose a mesh whose product divides {world}"
        )
    _start_process_group(timedelta(seconds=timeout_seconds))
    made = _made.setdefault(dist.group.WORLD, {})  # type: ignore[arg-type]
    if (height, width) not in made:
        ranks = torch.arange(world).view(world // (height * width), height, width)
        mesh = made[height, width] = DeviceMesh(device.kind_of_job(), ranks, mesh_dim_names=AXES)
        # From torch 2.13 on it keeps the groups too, and their threads would outlive the job; it finds them by name.
        getattr(mesh, "_pg_registry", {}).clear()
        if height * width > 1:
            _compare_hashing(ranks)
    return made[height, width]


def _compare_hashing(ranks: torch.Tensor) -> None:
    """Warn where the ranks of a replica hash strings differently, and so walk through sets of them in another order."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, hash("fullframe"))
    if dist.get_rank() == 0 and any(
        len({everyone[rank] for rank in replica}) > 1 for replica in ranks.flatten(1).tolist()
    ):
        warnings.warn(
            "the ranks hash strings differently, so a loop over a set of names (`a.keys() & b.keys()`, `set(losses)`) "
            "has another order on each, and what it adds up or sends is mixed up; set PYTHONHASHSEED=0 for all ranks "
            "(PYTHONHASHSEED=0 torchrun ...), or sort such sets",
            stacklevel=3,
        )


_made: "WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, int], DeviceMesh]]" = WeakKeyDictionary()


def forget_meshes() -> None:
    """Make new ones from now on, on all ranks, and end the old ones' groups, whose threads cost time.

    After an error a message may lie between ranks of the old ones.
    """
    groups = {group for meshes in _made.values() for mesh in meshes.values() for group in _groups_of(mesh)}
    _made.clear()
    forget_channels()
    for group in groups - {dist.group.WORLD}:
        dist.destroy_process_group(group)


def _groups_of(mesh: DeviceMesh) -> Iterator[dist.ProcessGroup]:
    yield from map(mesh.get_group, AXES)
    known: Spatial | None = getattr(mesh, "_fullframe_spatial", None)
    if known is not None:
        yield known.replica
        yield from (axis.group for axis in known.axes)


def _start_process_group(timeout: timedelta) -> None:
    if dist.is_initialized():
        return
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        store, rank, ranks = next(dist.rendezvous("env://", timeout=timeout))
        store.set_timeout(timeout)
        store = _of_attempt(store)
    else:
        store, rank, ranks = dist.HashStore(), 0, 1
    device.take(store, rank, ranks)
    dist.init_process_group(device.backends(), timeout=timeout, store=store, rank=rank, world_size=ranks)


def _of_attempt(store: dist.Store) -> dist.Store:
    """A fresh store when torchrun starts ranks again: its own still has the dead ranks' addresses."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or os.environ.get("GROUP_WORLD_SIZE") != "1":  # nodes count their attempts apart
        return store
    return dist.PrefixStore(f"attempt-{attempt}", store)


def spatial_of(mesh: DeviceMesh, draw_seed: Callable[[torch.Generator | None], int] = drawn_seed) -> Spatial:
    """The spatial axes of `mesh`, made at the first call (which every rank must make) and kept with the mesh.

    `draw_seed` counts at the first call alone.
    """
    known: Spatial | None = getattr(mesh, "_fullframe_spatial", None)
    if known is None:
        if mesh.mesh_dim_names != AXES:
            raise MeshError(f"a mesh with axes {AXES} is needed, got {mesh.mesh_dim_names}; make it with ff.init_mesh")
        known = _spatial(mesh, draw_seed)
        mesh._fullframe_spatial = known  # type: ignore[attr-defined]
    return known


def _spatial(mesh: DeviceMesh, draw_seed: Callable[[torch.Generator | None], int]) -> Spatial:
    groups = groups_of(mesh)
    mine = tuple(next(ranks for ranks in mesh.mesh.flatten(1).tolist() if dist.get_rank() in ranks))
    channel = channel_of(groups.replica)
    axes = tuple(_axis(mesh, name, group, channel) for name, group in groups.axes.items())
    return Spatial(mesh, axes, mine, channel, ref(groups.replica), draw_seed)


def _axis(mesh: DeviceMesh, name: str, group: dist.ProcessGroup, replica: Channel) -> Axis:
    channel = share_channel(group, replica)
    return Axis(name, len(channel.ranks), mesh.get_local_rank(name), channel.ranks, channel, ref(group))


def _still_there(group: "ref[dist.ProcessGroup]") -> dist.ProcessGroup:
    there = group()
    if there is None:
        raise MeshError("the job of this mesh has ended (its process group was destroyed); make a mesh in the new one")
    return there


def kept_with_mesh(maxsize: int) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """`functools.lru_cache` whose memory is the mesh's: the first argument is a `Spatial` or has one as `.spatial`.

    What is remembered ends with the mesh. Of what says that it is `fleeting` nothing is remembered.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def remembered(*args: P.args, **kwargs: P.kwargs) -> R:
            first: Any = args[0]
            if getattr(first, "fleeting", False):
                return function(*args, **kwargs)
            caches = (first if type(first) is Spatial else first.spatial).caches
            cache: Any = caches.get(function)
            if cache is None:
                cache = caches[function] = lru_cache(maxsize)(function)
            return cache(*args, **kwargs)  # type: ignore[no-any-return]

        return remembered

    return decorate
