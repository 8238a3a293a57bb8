"""A job that does not exist, beside the real one."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.fsdp._fully_shard import _fsdp_param

import fullframe as ff
from fullframe.ranks.mesh import spatial_of
from fullframe.simulation.fake.world import _FIRST, fake_job


@pytest.fixture(autouse=True)
def no_job() -> None:
    """A test before may have made a mesh of one process."""
    if dist.is_initialized():
        dist.destroy_process_group()


def test_this_process_is_one_rank_of_any_job_for_a_while() -> None:
    assert not dist.is_initialized()
    with fake_job(5, 1000):
        assert (dist.get_rank(), dist.get_world_size()) == (5, 1000)
        some = dist.new_group([5, 7])
        assert dist.get_world_size(some) == 2
        dist.all_reduce(torch.ones(3), group=some)  # nobody answers, nobody waits
    assert not dist.is_initialized()
    with fake_job(0, 2):  # names are free again
        dist.new_group([0, 1])


def test_a_real_job_waits_untouched() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        world, group = c10d._world, dist.group.WORLD
        with pytest.raises(OSError), fake_job(1, 4):
            assert dist.get_world_size() == 4
            raise OSError
        assert c10d._world is world and dist.group.WORLD is group
        assert dist.get_world_size() == 1
        dist.all_reduce(torch.ones(1))
    finally:
        dist.destroy_process_group()


def test_a_large_job_makes_this_rank_s_groups_alone() -> None:
    with fake_job(2049, 4096):
        mesh = ff.init_mesh(height=2, width=2)
        spatial = spatial_of(mesh, draw_seed=lambda generator: 0)
        assert spatial.replica_ranks == (2048, 2049, 2050, 2051)
        assert [axis.ranks for axis in spatial.axes] == [(2049, 2051), (2048, 2049)]
        assert c10d._world.group_count - _FIRST < 10  # names are given to groups of other ranks too
        assert dist.new_group([0, 1]) is dist.GroupMember.NON_GROUP_MEMBER
        everyone = [None] * 4096
        dist.all_gather_object(everyone, {"a": 1})
        assert everyone == [{"a": 1}] * 4096
    assert dist.new_group is c10d.new_group and dist.new_group.__module__ == c10d.__name__


@pytest.mark.parametrize("rows", [0, 1, 2, 5, 6, 7, 8, 9, 16])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_sharded_parameter_is_cut_as_by_torch(rows: int, dim: int) -> None:
    parameter = torch.rand((rows, 3) if dim == 0 else (3, rows))
    expected = _fsdp_param._chunk_with_empty(parameter, 4, dim)
    with fake_job(0, 4):
        chunks = _fsdp_param._chunk_with_empty(parameter, 4, dim)
        for rank, chunk in enumerate(expected):
            assert torch.equal(chunks[rank], chunk) and chunks[rank].stride() == chunk.stride()
