"""Which rank of how many this process is, where a launcher (torchrun, srun by a script, ours) started it as one."""

import importlib.util
import os
import re
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import NamedTuple

from fullframe.errors import MeshError

TASKS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")  # how many processes srun or mpirun started


def restarts() -> int:
    """How many times the launcher (ours or torchrun) has started the ranks of this job again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


class Place(NamedTuple):
    """Rank `rank` of `world` ranks."""

    rank: int
    world: int


def launched_place(environment: Mapping[str, str] = os.environ) -> Place | None:
    """This process's place by RANK and WORLD_SIZE; None where they are not both set.

    Raises MeshError where they are no numbers that belong together.
    """
    said = {name: environment[name] for name in ("RANK", "WORLD_SIZE") if name in environment}
    if len(said) < 2:
        return None
    try:
        place = Place(int(said["RANK"]), int(said["WORLD_SIZE"]))
    except ValueError:
        place = Place(-1, 0)
    if not 0 <= place.rank < place.world:
        found = " and ".join(f"{name}={value!r}" for name, value in said.items())
        raise MeshError(
            f"the environment has {found}, which is no rank of a job; unset both for a process of its own, or let the "
            "launcher set them"
        )
    return place


def require_alone(environment: Mapping[str, str] = os.environ) -> None:
    """Raises MeshError where srun or mpirun has started several of this process, none of which has a RANK."""
    for name in TASKS:
        if (count := environment.get(name, "1")) != "1":
            raise MeshError(
                f"this is one of {count} processes ({name}), and RANK is not set: each would train alone. "
                "Start one on each machine, torchrun or fullframe train --nodes, which starts the ranks there, or set "
                f"RANK and WORLD_SIZE; where each is to be a run of its own, unset {name}"
            )


def is_cpu_build() -> bool:
    """Whether the torch that is installed knows of no kind of GPU; told without loading it, which takes seconds."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return False
    build = Path(found.origin).with_name("version.py").read_text()
    has_none = all(re.search(rf"^{kind}\b[^=\n]*= *None$", build, re.MULTILINE) for kind in ("cuda", "hip", "xpu"))
    return has_none and not entry_points(group="torch.backends")  # which torch loads, for devices it does not know
