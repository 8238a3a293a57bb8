"""Where the ranks meet, and which this process is: by horovodrun, torchrun, Slurm, or a process group that is there."""

import datetime
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from fullframe.processes.place import launched_place, require_alone

_NUMBERS = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
_START_SECONDS = 600.0  # ranks may start minutes after one another


@dataclass(frozen=True)
class Place:
    """This process among those of the job, and where all meet."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str = ""  # of the store; "" where a process group or nothing is needed
    port: int = 0
    hosts_store: bool = False  # whether this rank must serve it


def place_from(environment: Mapping[str, str]) -> Place:
    """The place that a launcher has put into the environment; alone without one.

    Raises MeshError where RANK and WORLD_SIZE are no numbers that belong together.
    """
    if "HOROVOD_RANK" in environment:
        rank, size, local_rank, local_size = (int(environment[f"HOROVOD_{name}"]) for name in _NUMBERS)
        address, port = (environment[f"HOROVOD_GLOO_RENDEZVOUS_{name}"] for name in ("ADDR", "PORT"))
        return Place(rank, size, local_rank, local_size, address, int(port))
    launched = launched_place(environment)
    if launched is not None:
        rank, size = launched
        return Place(
            rank,
            size,
            int(environment.get("LOCAL_RANK", rank)),
            int(environment.get("LOCAL_WORLD_SIZE", size)),
            environment.get("MASTER_ADDR", ""),
            int(environment.get("MASTER_PORT", "0")),
            rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        )
    if "SLURM_PROCID" in environment and "SLURM_STEP_NUM_TASKS" in environment:
        rank = int(environment["SLURM_PROCID"])
        return Place(
            rank,
            int(environment["SLURM_STEP_NUM_TASKS"]),
            int(environment["SLURM_LOCALID"]),
            _tasks_here(environment["SLURM_STEP_TASKS_PER_NODE"], int(environment["SLURM_NODEID"])),
            environment.get("MASTER_ADDR") or first_host(environment["SLURM_STEP_NODELIST"]),
            int(environment.get("MASTER_PORT") or 20000 + int(environment["SLURM_JOB_ID"]) % 20000),
            rank == 0,
        )
    return Place(0, 1, 0, 1)


def first_host(nodes: str) -> str:
    """The first of Slurm's list of nodes: "gpu[07-09,12]-ib,login" -> "gpu07-ib"."""
    found = re.match(r"(?:\[[^\]]*\]|[^\[,])*", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", found.group()) if found else nodes


def _tasks_here(tasks: str, node: int) -> int:
    """Of Slurm's "2(x3),1": 2 on the first three nodes, then 1."""
    for part in tasks.split(","):
        count, _, times = part.rstrip(")").partition("(x")
        if node < int(times or 1):
            return int(count)
        node -= int(times or 1)
    raise ValueError(f"there is no node {node} in SLURM_STEP_TASKS_PER_NODE={tasks}")


def find_place() -> Place:
    """This process's place: that of the default process group where there is one.

    Raises MeshError for one of several processes that mpirun started without a RANK.
    """
    place = place_from(os.environ)
    if dist.is_initialized() and "HOROVOD_RANK" not in os.environ:
        rank, size = dist.get_rank(), dist.get_world_size()
        known = (place.rank, place.size) == (rank, size)
        return Place(rank, size, *((place.local_rank, place.local_size) if known else (rank, size)))
    if place == Place(0, 1, 0, 1):
        require_alone()
    return place


def connect(place: Place) -> Any:
    """The store where the ranks meet."""
    if place.size == 1 and not place.address:
        return dist.HashStore()
    timeout = datetime.timedelta(seconds=float(os.environ.get("HOROVOD_START_TIMEOUT", str(_START_SECONDS))))
    if not place.address:
        return dist.distributed_c10d._get_default_store()
    address = "127.0.0.1" if place.address in ("localhost", socket.gethostname()) else place.address
    store = dist.TCPStore(address, place.port, is_master=place.hosts_store, timeout=timeout, wait_for_workers=False)
    if place.hosts_store and "MASTER_PORT" in os.environ:  # or `init_process_group` would try to serve the port again
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    return store
