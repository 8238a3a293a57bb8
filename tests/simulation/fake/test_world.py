"""A job that does not exist, beside the real one."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from fullframe.simulation.fake.world import fake_job


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
