"""Ranks that ask for different meshes. What is warned of hashing is tested where launchers set it."""

import torch.distributed as dist

from fullframe.errors import MeshError
from fullframe.ranks.same_meshes import require_one_mesh
from tests.rank_group import _forget_meshes, rank_group


def asked_for_another() -> str:
    """Rank 0 has asked for its mesh before rank 1 does; a number that no test comes to."""
    said = ""
    for rank in range(2):
        if dist.get_rank() == rank:
            try:
                require_one_mesh(1000, f"height 1 x width {1 + rank}")
                require_one_mesh(1001, "height 1 x width 1")
            except MeshError as error:
                said = str(error)
        dist.barrier()
    return said


def test_ranks_that_ask_for_different_meshes_are_refused() -> None:
    first, second = rank_group(2).run(asked_for_another)
    assert not first
    assert "rank 1 asks for a mesh of height 1 x width 2, another rank for height 1 x width 1; make the same" in second
    rank_group(2).run(_forget_meshes)
