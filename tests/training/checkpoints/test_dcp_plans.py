"""What all ranks hold is written by one of them; what one rank cannot plan or read stops all."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from fullframe.errors import CheckpointError
from fullframe.training.checkpoints.dcp_plans import copy_to_host, read_into
from fullframe.training.checkpoints.manifest import Chunk, Manifest, StoredTensor
from tests.rank_group import rank_group


def shares():
    """Every rank holds `a` and `b`, and each a tensor of its own."""
    rank = dist.get_rank()
    held = {"a": torch.arange(6.0), "b": torch.ones(5, dtype=torch.int64), f"own {rank}": torch.full((2, 3), rank)}
    with torch.device("meta"):  # the default one is not asked
        copies = copy_to_host(held)
    return {name: value.tolist() for name, value in copies.tensors.items()}, copies.stored


def test_each_tensor_is_copied_by_one_rank_and_all_know_which():
    (first, stored), (second, again) = rank_group(2).run(shares)
    assert first.keys() | second.keys() == {"a", "b", "own 0", "own 1"} == stored.keys() and stored == again
    assert not first.keys() & second.keys() and first["own 0"] == [[0, 0, 0]] * 2
    for rank, tensors in enumerate((first, second)):
        assert all(stored[name].chunks[0].file == f"rank-{rank}.safetensors" for name in tensors)
    assert stored["own 1"] == StoredTensor(torch.int64, (2, 3), (Chunk((0, 0), (2, 3), "rank-1.safetensors"),))


def fails_on(rank, what):
    """What this rank is told when `rank` alone cannot plan, or cannot read."""
    planner = dcp.DefaultSavePlanner
    kept = planner.create_local_plan
    try:
        if what == "plan":
            if dist.get_rank() == rank:
                planner.create_local_plan = lambda self: 1 / 0
            copy_to_host({"a": torch.ones(2)})
        else:
            targets = {"a": torch.ones(2)} if dist.get_rank() == rank else {}
            read_into(targets, Path("/nowhere"), Manifest(step=0, facts={}, tensors={}, files={}))
    except CheckpointError as error:
        return str(error)
    finally:
        planner.create_local_plan = kept
    return ""


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_cannot_do_stops_all(rank):
    for said in rank_group(2).run(fails_on, rank, "plan"):
        assert said == "the state cannot be copied for a checkpoint: division by zero"
    for said in rank_group(2).run(fails_on, rank, "read"):
        assert said.startswith("/nowhere cannot be read") and "Missing key" in said
