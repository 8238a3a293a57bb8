"""The mesh ("data", "height", "width"), with "depth" where volumes are split, and the few facts that every op needs.

With "stage" between "data" and the spatial axes where parts of a model lie on different ranks: to all that splits
images the stages are so many replicas, which happen to get the same samples.
"""

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property, lru_cache, wraps
from itertools import combinations, product
from math import prod
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fullframe.arguments import checked
from fullframe.errors import MeshError
from fullframe.processes.place import launched_place, require_alone, restarts
from fullframe.ranks import device
from fullframe.ranks.channel import Channel, channel_of, forget_channels, share_channel
from fullframe.ranks.groups import forget_groups_of_all, groups_of, open_groups
from fullframe.ranks.last_words import speak_last
from fullframe.ranks.same_meshes import compare_hashing, require_one_mesh
from fullframe.ranks.torch_parts import require_parts
from fullframe.ranks.waiting import naming_lost_ranks

AXES = ("data", "depth", "height", "width")  # of a mesh; "depth" where that has more than one rank along it
STAGE = "stage"  # the axis along which ranks hold consecutive parts of a model, and the same samples
_AND = " and "  # in the name of several axes as one: "height and width"

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
        return self._group() or _still_there(self._group)


@dataclass(frozen=True, eq=False)
class Spatial:
    """The spatial axes of one replica; one object per mesh, so `is` compares.

    It does not keep the process groups, whose threads end with the job; what is remembered for the mesh
    (`kept_with_mesh`) ends with it.
    """

    mesh: DeviceMesh
    axes: tuple[Axis, ...]  # (depth,) height and width; the last one's coordinate changes fastest from rank to rank
    replica_ranks: tuple[int, ...]  # (depth x) height x width ranks that hold one sample
    channel: Channel  # between them
    _replica: "ref[dist.ProcessGroup]"
    _pairs: tuple[Axis, ...] = ()  # each two of three axes as one, where these ranks are neither one axis nor all
    draw_seed: Callable[[torch.Generator | None], int] = drawn_seed  # alike on all ranks of the replica
    caches: dict[Any, Any] = field(default_factory=dict)

    @property
    def replica(self) -> dist.ProcessGroup:
        """The process group of `replica_ranks`; raises MeshError once the job has ended."""
        return _still_there(self._replica)

    def axis(self, name: str) -> Axis:
        """The axis called `name`; raises MeshError for a name that is none."""
        found = self._by_name.get(name)
        if found is None:
            names = _AND.join(axis.name for axis in self.axes)
            raise MeshError(f"the mesh has the spatial axes {names}, none called {name!r}")
        return found

    @cached_property
    def _by_name(self) -> dict[str, Axis]:
        """The axes, and several of them as one, for what lies on their ranks in no order of rows and columns."""
        found = {axis.name: axis for axis in self.axes}
        for count in range(2, len(self.axes) + 1):
            for several in combinations(self.axes, count):
                name = _AND.join(axis.name for axis in several)
                found[name] = self._as_one(name, [axis for axis in several if axis.size > 1] or list(several[:1]))
        return found

    def _as_one(self, name: str, axes: Sequence[Axis]) -> Axis:
        """The axis `name`, whose ranks are those along `axes`: all of the replica's, or of one axis, or of a pair."""
        size, number = 1, 0
        for axis in axes:
            size, number = size * axis.size, number * axis.size + axis.coordinate
        if size == self.size:
            return Axis(name, size, number, self.replica_ranks, self.channel, self._replica)
        alike = axes[0] if len(axes) == 1 else next(pair for pair in self._pairs if pair.name == name)
        return replace(alike, name=name)

    def joint(self, names: Collection[str]) -> str:
        """The name of the axis that the named ones are together."""
        parts = {part for name in names for part in axes_in(self.axis(name).name)}
        return _AND.join(axis.name for axis in self.axes if axis.name in parts)

    def group(self, names: Collection[str]) -> dist.ProcessGroup:
        """The ranks over which a value split along the named axes is spread."""
        return self.axis(self.joint(names)).group if names else self.replica

    def coordinate_along(self, names: Collection[str]) -> int:
        """This rank's number among the ranks of `group(names)`."""
        return self.axis(self.joint(names)).coordinate if names else 0

    def coordinate_at(self, name: str, place: Mapping[str, int]) -> int:
        """The coordinate along an axis, or several as one, of the rank with these coordinates along each axis."""
        number = 0
        for own in axes_in(name):
            number = number * self.axis(own).size + place[own]
        return number

    @cached_property
    def coordinates(self) -> dict[str, int]:
        """This rank's part along each axis, and along several as one."""
        return {name: axis.coordinate for name, axis in self._by_name.items()}

    @cached_property
    def places(self) -> tuple[dict[str, int], ...]:
        """Of each rank of the replica its part along each axis."""
        names = [axis.name for axis in self.axes]
        parts = product(*(range(axis.size) for axis in self.axes))
        return tuple(dict(zip(names, numbers, strict=True)) for numbers in parts)

    @cached_property
    def channels(self) -> tuple[Channel, ...]:
        """Between the replica's ranks and along its axes, each once, in one order on all ranks."""
        found = [self.channel, *(axis.channel for axis in (*self.axes, *self._pairs))]
        return tuple({id(channel): channel for channel in found}.values())

    @property
    def groups(self) -> dict[str, dist.ProcessGroup]:
        """All process groups of the replica's ranks, by the name of the axis; "replica" is that of all of them."""
        return {axis.name: axis.group for axis in (*self.axes, *self._pairs)} | {"replica": self.replica}

    @property
    def size(self) -> int:
        """Ranks in one replica."""
        return len(self.replica_ranks)

    @property
    def coordinate(self) -> int:
        """This rank's number within its replica."""
        return self.coordinate_along([axis.name for axis in self.axes])


def axes_of(count: int) -> tuple[str, ...]:
    """The names of a mesh's 3 axes, or of 4 with depth; without stages."""
    return AXES if count == len(AXES) else (AXES[0], *AXES[2:])


def axes_in(name: str) -> tuple[str, ...]:
    """The axes of the mesh that an axis is made of: itself, or "height" and "width" of "height and width"."""
    return tuple(name.split(_AND))


@checked
@naming_lost_ranks()
def init_mesh(
    height: int = 1, width: int = 1, *, depth: int = 1, stages: int = 1, timeout_seconds: float = 600.0
) -> DeviceMesh:
    """The mesh ("data", "height", "width") over all ranks; data = world / (height * width).

    With `depth` > 1 it is ("data", "depth", "height", "width"), and volumes (..., D, H, W) are cut along D too. With
    `stages` > 1 an axis "stage" follows "data": along it ranks get the same samples, for `ff.unroll` to run some of its
    iterations on each.

    Under torchrun it starts the process group (nccl with GPUs, else gloo), in which a rank waits `timeout_seconds` for
    the others before it gives up; without torchrun it is one process; a group that is already there is used. Every rank
    of the job calls it. The same call gives the same mesh: each new one would bring process groups, whose threads gloo
    wakes a hundred times a second for as long as the job lasts.

    Raises MeshError when RANK and WORLD_SIZE are no place in a job, or srun started several processes without them, the
    product of the axes does not divide the world, another rank asks for another mesh, or the ranks have not a GPU each
    or none at all; DeviceError when there is a GPU that torch cannot use; RankError when another rank does not come.
    """
    sizes = {"stages": stages} if stages != 1 else {}
    sizes |= ({"depth": depth} if depth != 1 else {}) | {"height": height, "width": width}
    asked, parts = " x ".join(f"{name} {size}" for name, size in sizes.items()), prod(sizes.values())
    if min(sizes.values()) < 1:
        raise MeshError(f"a mesh needs at least one rank along each axis, got {asked}")
    world = _world()
    if world % parts:
        raise MeshError(
            f"{asked} = {parts} does not divide the {world} ranks of this job; "
            f"start a multiple of {parts} ranks or choose a mesh whose product divides {world}"
        )
    start_process_group(timeout_seconds)
    made = _made.setdefault(dist.group.WORLD, {})  # type: ignore[arg-type]
    shape = tuple(sizes.items())
    if shape not in made:
        within = init_mesh(height, width, depth=depth) if stages > 1 else None
        require_one_mesh(len(made), asked)  # with that of one stage among those before
        ranks = torch.arange(world).view(-1, *sizes.values())
        names = ("data", *(STAGE if name == "stages" else name for name in sizes))
        mesh = DeviceMesh(device.kind_of_job(), ranks, mesh_dim_names=names)
        made[shape] = mesh
        if within is not None:
            mesh._fullframe_within = within  # type: ignore[attr-defined]
        # From torch 2.13 on it keeps the groups too, and their threads would outlive the job; it finds them by name.
        getattr(mesh, "_pg_registry", {}).clear()
        if parts > 1 and within is None:
            compare_hashing(ranks)
    return made[shape]


def _world() -> int:
    """How many ranks the job has."""
    if dist.is_initialized():
        return dist.get_world_size()
    place = launched_place()
    if place is None and os.environ.get("WORLD_SIZE", "1") != "1":  # each would train alone, on all samples
        raise MeshError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']!r} is set, and RANK is not: which rank is this? Unset it for a "
            "process of its own, or start the ranks by torchrun, which sets both"
        )
    if place is None:
        require_alone()
    return 1 if place is None else place.world


_made: "WeakKeyDictionary[dist.ProcessGroup, dict[tuple[tuple[str, int], ...], DeviceMesh]]" = WeakKeyDictionary()


def forget_meshes() -> None:
    """Make new ones from now on, on all ranks, and end the old ones' groups, whose threads cost time.

    After an error a message may lie between ranks of the old ones.
    """
    world = dist.group.WORLD  # groups of an earlier one ended with it, whoever may still hold it
    meshes = {} if world is None else _made.get(world, {})
    groups = {*forget_groups_of_all(), *(group for mesh in meshes.values() for group in _groups_of(mesh))}
    _made.clear()
    forget_channels()
    for group in groups - {dist.group.WORLD}:
        dist.destroy_process_group(group)


def _groups_of(mesh: DeviceMesh) -> Iterator[dist.ProcessGroup]:
    yield from mesh.get_all_groups()
    known: Spatial | None = getattr(mesh, "_fullframe_spatial", None)
    if known is not None:
        yield from known.groups.values()


def start_process_group(timeout_seconds: float) -> None:
    """That of all ranks, as `init_mesh` says, where there is none yet."""
    timeout = timedelta(seconds=timeout_seconds)
    if dist.is_initialized():
        speak_last()
        return
    if launched_place() is not None:
        store, rank, ranks = next(dist.rendezvous("env://", timeout=timeout))
        store.set_timeout(timeout)
        store = _of_attempt(store)
    else:
        store, rank, ranks = dist.HashStore(), 0, 1
    device.take(store, rank, ranks)
    dist.init_process_group(device.backends(), timeout=timeout, store=store, rank=rank, world_size=ranks)
    speak_last()


def _of_attempt(store: dist.Store) -> dist.Store:
    """A fresh store when torchrun starts ranks again: its own still has the dead ranks' addresses."""
    if not restarts() or os.environ.get("GROUP_WORLD_SIZE") != "1":  # nodes count their attempts apart
        return store
    return dist.PrefixStore(f"attempt-{restarts()}", store)


def spatial_of(
    mesh: DeviceMesh, draw_seed: Callable[[torch.Generator | None], int] = drawn_seed, own_groups: bool | None = None
) -> Spatial:
    """The spatial axes of `mesh`, made at the first call (which every rank must make) and kept with the mesh.

    `draw_seed` and `own_groups`, whether the axes share none with the job, count at the first call alone.
    """
    known: Spatial | None = getattr(mesh, "_fullframe_spatial", None)
    within: DeviceMesh | None = getattr(mesh, "_fullframe_within", None)
    if known is None and within is not None:
        known = mesh._fullframe_spatial = spatial_of(within, draw_seed, own_groups)  # type: ignore[attr-defined]
    if known is None:
        require_parts()
        if mesh.mesh_dim_names != axes_of(mesh.ndim):
            raise MeshError(
                f"a mesh with axes {axes_of(3)} or {AXES} is needed, got {mesh.mesh_dim_names}; "
                "make it with ff.init_mesh"
            )
        # In threads of its own autograd would run a GPU's nodes, and the host's, in an order that ranks need not share:
        # each thread numbers the nodes that it makes, as those of a gradient that has one itself, by its own count.
        torch.autograd.set_multithreading_enabled(False)
        known = _spatial(mesh, draw_seed, device.sends_between_devices() if own_groups is None else own_groups)
        mesh._fullframe_spatial = known  # type: ignore[attr-defined]
    return known


def has_stages(mesh: DeviceMesh) -> bool:
    """Whether the mesh has an axis "stage"."""
    return STAGE in (mesh.mesh_dim_names or ())


def stage_axis(mesh: DeviceMesh) -> Axis:
    """The axis "stage" as this rank sees it, made at the first call, which every rank must make.

    Raises MeshError for a mesh without it.
    """
    known: Axis | None = getattr(mesh, "_fullframe_stages", None)
    if known is None:
        if not has_stages(mesh):
            raise MeshError(
                f"the mesh has the axes {mesh.mesh_dim_names}, and no stages; make it with ff.init_mesh(stages=2)"
            )
        group = mesh.get_group(STAGE)
        if device.sends_between_devices():  # else an error before a rank's first message would have the others wait
            open_groups([group], mesh.device_type)
        channel = channel_of(group)
        known = Axis(STAGE, len(channel.ranks), mesh.get_local_rank(STAGE), channel.ranks, channel, ref(group))
        mesh._fullframe_stages = known  # type: ignore[attr-defined]
    return known


def _spatial(mesh: DeviceMesh, draw_seed: Callable[[torch.Generator | None], int], own_groups: bool) -> Spatial:
    groups = groups_of(mesh, own_groups)
    mine = tuple(next(ranks for ranks in mesh.mesh.flatten(1).tolist() if dist.get_rank() in ranks))
    channel = channel_of(groups.replica)
    axes = tuple(_axis(mesh, name, group, channel) for name, group in groups.axes.items())
    pairs = tuple(_pair(axes, names, group, channel) for names, group in groups.pairs.items())
    return Spatial(mesh, axes, mine, channel, ref(groups.replica), pairs, draw_seed)


def _pair(axes: tuple[Axis, ...], names: tuple[str, str], group: dist.ProcessGroup, replica: Channel) -> Axis:
    """Two of three axes as one: a value may be split over them alone."""
    first, second = (axis for axis in axes if axis.name in names)
    channel = share_channel(group, replica)
    part = first.coordinate * second.size + second.coordinate
    return Axis(_AND.join(names), len(channel.ranks), part, channel.ranks, channel, ref(group))


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
