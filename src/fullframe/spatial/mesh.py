"""The mesh ("data", "height", "width") and the few facts about it that every op needs."""

import atexit
import os
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fullframe.errors import MeshError
from fullframe.spatial.mailbox import Mailboxes, forget_mailboxes, mailboxes_of

AXES = ("data", "height", "width")


@dataclass(frozen=True, eq=False)
class Axis:
    """One spatial axis of the mesh as this rank sees it."""

    name: str
    size: int
    part: int  # this rank's coordinate
    group: dist.ProcessGroup
    ranks: tuple[int, ...]  # the job's ranks along the axis, by coordinate
    staged: bool  # CUDA tensors travel through host memory: gloo carries no CUDA point-to-point
    boxes: Mailboxes | None  # for messages between CPU ranks of one machine


@dataclass(frozen=True, eq=False)
class Spatial:
    """The spatial axes of one replica; one object per mesh, so `is` compares."""

    mesh: DeviceMesh
    height: Axis
    width: Axis
    replica: dist.ProcessGroup  # height x width ranks that hold one sample
    replica_ranks: tuple[int, ...]

    def axis(self, name: str) -> Axis:
        """The axis called `name`."""
        return self.width if name == "width" else self.height

    def group(self, names: Collection[str]) -> dist.ProcessGroup:
        """The ranks over which a value split along the named axes is spread."""
        alone = [axis for axis in (self.height, self.width) if axis.name in names]
        return alone[0].group if len(alone) == 1 else self.replica

    def part_along(self, names: Collection[str]) -> int:
        """This rank's number among the ranks of `group(names)`."""
        height = self.height.part if "height" in names else 0
        return height * self.width.size + self.width.part if "width" in names else height

    @property
    def size(self) -> int:
        """Ranks in one replica."""
        return self.height.size * self.width.size

    @property
    def part(self) -> int:
        """This rank's number within its replica."""
        return self.height.part * self.width.size + self.width.part


def init_mesh(height: int = 1, width: int = 1) -> DeviceMesh:
    """The mesh ("data", "height", "width") over all ranks; data = world / (height * width).

    Under torchrun it starts the process group (nccl with GPUs, else gloo); without torchrun it is one process;
    a group that is already there is used. Every rank of the job calls it. The same call gives the same mesh: each new
    one would bring process groups, whose threads gloo wakes a hundred times a second for as long as the job lasts.

    Raises MeshError when `height * width` does not divide the world.
    """
    if height < 1 or width < 1:
        raise MeshError(f"a mesh needs height >= 1 and width >= 1, got height={height}, width={width}")
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if world % (height * width):
        raise MeshError(
            f"height {height} x width {width} = {height * width} does not divide the {world} ranks of this job; "
            f"start a multiple of {height * width} ranks or choose a mesh whose product divides {world}"
        )
    _start_process_group()
    made = _made_in(dist.group.WORLD)
    if (height, width) not in made:
        device = "cuda" if _backend_device() == "cuda" else "cpu"
        ranks = torch.arange(world).view(world // (height * width), height, width)
        made[height, width] = DeviceMesh(device, ranks, mesh_dim_names=AXES)
    return made[height, width]


_made: tuple[dist.ProcessGroup | None, dict[tuple[int, int], DeviceMesh]] = None, {}


def _made_in(job: dist.ProcessGroup | None) -> dict[tuple[int, int], DeviceMesh]:
    """The meshes of this job by height and width; those of an earlier job are let go."""
    global _made
    if _made[0] is not job:
        _made = job, {}
    return _made[1]


def forget_meshes() -> None:
    """Make new ones from now on, on all ranks: after an error a message may lie between ranks of the old ones."""
    global _made
    _made = None, {}
    forget_mailboxes()


@atexit.register
def _end_threads() -> None:
    """Let go of a destroyed job's groups, which ends gloo's threads: one that still ends a message aborts Python's end.

    Not of a job that was left standing: a thread may wait for a rank that never answers.
    """
    if dist.is_initialized():
        return
    for mesh in _made[1].values():
        vars(mesh).pop("_fullframe_spatial", None)  # which holds the mesh that holds it
    forget_meshes()


def _start_process_group() -> None:
    if dist.is_initialized():
        return
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, **_store_of_attempt())
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def _store_of_attempt() -> dict[str, Any]:
    """A store without the addresses of dead ranks, which torchrun keeps in its own when it starts ranks again."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or os.environ.get("GROUP_WORLD_SIZE") != "1":  # nodes count their attempts apart
        return {}
    store, rank, ranks = next(dist.rendezvous("env://"))
    return {"store": dist.PrefixStore(f"attempt-{attempt}", store), "rank": rank, "world_size": ranks}


def _backend_device() -> str:
    return "cuda" if torch.cuda.is_available() and "nccl" in dist.get_backend_config() else "cpu"


def spatial_of(mesh: DeviceMesh) -> Spatial:
    """The spatial axes of `mesh`, made at the first call (which every rank must make) and kept with the mesh."""
    known: Spatial | None = getattr(mesh, "_fullframe_spatial", None)
    if known is None:
        if mesh.mesh_dim_names != AXES:
            raise MeshError(f"a mesh with axes {AXES} is needed, got {mesh.mesh_dim_names}; make it with ff.init_mesh")
        known = _spatial(mesh)
        mesh._fullframe_spatial = known  # type: ignore[attr-defined]
    return known


def _spatial(mesh: DeviceMesh) -> Spatial:
    replicas = mesh.mesh.flatten(1).tolist()
    replica, mine = None, ()
    if len(replicas) == 1:
        replica, mine = dist.group.WORLD, tuple(replicas[0])
    else:
        for ranks in replicas:  # every rank makes every group, in one order
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                replica, mine = group, tuple(ranks)
    assert replica is not None
    return Spatial(mesh, _axis(mesh, "height"), _axis(mesh, "width"), replica, mine)


def _axis(mesh: DeviceMesh, name: str) -> Axis:
    group = mesh.get_group(name)
    backend = str(dist.get_backend_config(group))
    staged = torch.cuda.is_available() and "gloo" in backend and "nccl" not in backend
    ranks = tuple(dist.get_process_group_ranks(group))
    boxes = mailboxes_of(group) if mesh.device_type == "cpu" else None
    return Axis(name, len(ranks), mesh.get_local_rank(name), group, ranks, staged, boxes)
