"""Where this process stands among the others, and what there is, in Horovod's words."""

from pathlib import Path

import torch
import torch.distributed as dist

from fullframe.horovod.context import world


def rank() -> int:
    """This process's number among all."""
    return world().rank


def size() -> int:
    """How many processes there are."""
    return world().size


def local_rank() -> int:
    """This process's number on its node."""
    return world().local_rank


def local_size() -> int:
    """How many processes this node has."""
    return world().local_size


def cross_rank() -> int:
    """This process's node, counted among the nodes that have a process of its local rank."""
    return world().cross_rank


def cross_size() -> int:
    """How many nodes have a process of this local rank."""
    return world().cross_size


def is_homogeneous() -> bool:
    """Whether every node has the same number of processes."""
    return world().is_homogeneous


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Write from now on what the ranks do into a Chrome trace; rank 0 does."""
    if world().rank == 0:
        world().timeline.start(Path(file_path), mark_cycles)


def stop_timeline() -> None:
    """End the file of `start_timeline`."""
    world().timeline.stop()


def gloo_built() -> bool:
    """Whether torch has gloo."""
    return dist.is_gloo_available()


def gloo_enabled() -> bool:
    """Whether the ranks agree through gloo: they always do."""
    world()
    return True


def nccl_built() -> int:
    """The version of torch's NCCL as a number (2.27.3 -> 22703), 0 without it."""
    if not dist.is_nccl_available():
        return 0
    from torch.cuda import nccl

    major, minor, patch = nccl.version()[:3]
    return int(major * 10000 + minor * 100 + patch)


def mpi_built() -> bool:
    """False: there is no MPI."""
    return False


def mpi_enabled() -> bool:
    """False: there is no MPI."""
    return False


def mpi_threads_supported() -> bool:
    """Raises ValueError: there is no MPI."""
    raise ValueError("Horovod MPI is not enabled; Please make sure it's installed and enabled.")


def ddl_built() -> bool:
    """False: there is no DDL."""
    return False


def ccl_built() -> bool:
    """False: there is no oneCCL."""
    return False


def cuda_built() -> bool:
    """Whether torch is built for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether torch is built for ROCm."""
    return torch.version.hip is not None
