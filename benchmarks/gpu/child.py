"""One process of a part: `python -m benchmarks.gpu.child PART DEVICE FILE STORE`, with RANK and WORLD_SIZE among ranks.

Rank 0 writes what it found to FILE as it finds it, in the end the failures of all ranks with it.
"""

import importlib
import os
import sys
import warnings
from pathlib import Path

import torch.distributed as dist

from benchmarks.gpu.found import Found
from benchmarks.gpu.parts import PARTS, Part
from fullframe.ranks.mesh import init_mesh


def answer(part: Part, device: str) -> Found:
    """What the part finds on this rank."""
    found: Found = getattr(importlib.import_module(f"benchmarks.gpu.{part.module}"), part.function or part.name)(device)
    return found


def main(name: str, device: str, file: str, store: str) -> None:
    """Run the part and write what it found."""
    warnings.filterwarnings("ignore")
    part = next(part for part in PARTS if part.name == name)
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if ranks > 1 and part.by_nccl:
        init_mesh()  # starts the job as any training does
    elif ranks > 1:
        dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    Found.file = Path(file) if rank == 0 else None
    found = answer(part, device)
    if ranks > 1:
        everyone: list[list[str]] = [[] for _ in range(ranks)]
        dist.all_gather_object(everyone, found.failures)
        found.failures = sorted({failure for each in everyone for failure in each})
    found.write()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
