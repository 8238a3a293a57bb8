"""Whether the ranks of a job make the same meshes, and will walk through sets of names in one order."""

import warnings

import torch
import torch.distributed as dist

from fullframe.errors import MeshError
from fullframe.ranks.agreement import first_to_say, from_all_ranks
from fullframe.ranks.channel import generation


def require_one_mesh(number: int, asked: str) -> None:
    """Raises MeshError where another rank has asked for another mesh as its number `number`; waits for nobody."""
    first = first_to_say(f"mesh {number}, {generation()}", asked)
    if first != asked:
        raise MeshError(
            f"rank {dist.get_rank()} asks for a mesh of {asked}, another rank for {first}; make the same meshes, in "
            "one order, on all ranks"
        )


def compare_hashing(ranks: torch.Tensor) -> None:
    """Warn where the ranks of a replica hash strings differently, and so walk through sets of them in another order."""
    everyone = from_all_ranks(hash("fullframe"))
    replicas = ranks.flatten(1).tolist()
    if dist.get_rank() == 0 and any(len({everyone[rank] for rank in replica}) > 1 for replica in replicas):
        warnings.warn(
            "the ranks hash strings differently, so a loop over a set of names (`a.keys() & b.keys()`, `set(losses)`) "
            "has another order on each, and what it adds up or sends is mixed up; set PYTHONHASHSEED=0 for all ranks "
            "(PYTHONHASHSEED=0 torchrun ...), or sort such sets",
            stacklevel=5,
        )
