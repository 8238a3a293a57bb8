"""Whose messages queue up behind whose: by gloo the mesh's own groups, between GPUs groups apart from the job's."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fullframe as ff
from fullframe.ranks import device, groups
from fullframe.ranks.mesh import forget_meshes, spatial_of
from fullframe.simulation.fake.data_parallel import FakeDataParallel
from fullframe.simulation.fake.world import fake_job
from tests.rank_group import rank_group


def made(height, width, between_devices):
    """Facts about the groups of a mesh, with gloo in the place of NCCL, and whether a convolution is right on them."""
    forget_meshes()
    before, real, all_reduce, opened = len(c10d._world.pg_map), device.sends_between_devices, dist.all_reduce, []

    def noted(tensor, *args, group=None, **kwargs):
        opened.append(group)
        return all_reduce(tensor, *args, group=group, **kwargs)

    device.sends_between_devices, dist.all_reduce = lambda group=None: between_devices, noted
    try:
        mesh = ff.init_mesh(height=height, width=width)
        spatial = spatial_of(mesh)
        found = [*(axis.group for axis in spatial.axes if axis.size > 1), spatial.replica]
        facts = {
            "distinct": len(set(found)),
            "the job's": sum(group is dist.group.WORLD for group in found),
            "the mesh's": sum(group in [mesh.get_group("height"), mesh.get_group("width")] for group in found),
            "open": set(found) <= set(opened),
            "ranks": [axis.ranks for axis in spatial.axes] + [spatial.replica_ranks],
        }
        whole, weight = torch.arange(210.0).reshape(1, 2, 7, 15).double(), torch.ones(3, 2, 3, 3).double()
        local = F.conv2d(ff.shard(whole, mesh), weight, padding=1)
        facts["exact"] = torch.equal(local.full(), F.conv2d(whole, weight, padding=1))
    finally:
        device.sends_between_devices, dist.all_reduce = real, all_reduce
    forget_meshes()
    facts["left"] = len(c10d._world.pg_map) - before
    return facts


@pytest.mark.parametrize(
    ("height", "width", "distinct", "of_the_job", "of_the_mesh"),
    [(1, 4, 1, 2, 2), (2, 2, 3, 1, 2), (1, 2, 1, 0, 2), (4, 1, 1, 2, 2), (1, 1, 1, 0, 1)],
)
def test_the_groups_of_a_mesh(height, width, distinct, of_the_job, of_the_mesh):
    for rank, facts in enumerate(rank_group(4).run(made, height, width, False)):
        assert facts["exact"] and facts["left"] == 0 and facts["distinct"] == distinct
        assert (facts["the job's"], facts["the mesh's"]) == (of_the_job, of_the_mesh)
        assert rank in facts["ranks"][-1] and len(facts["ranks"][-1]) == height * width
    for rank, facts in enumerate(rank_group(4).run(made, height, width, True)):
        assert facts["exact"] and facts["left"] == 0 and facts["distinct"] == distinct
        assert facts["the job's"] == 0 and facts["open"] is (height * width > 1)
        assert facts["the mesh's"] == (height * width == 1)
        assert all(rank in ranks for ranks in facts["ranks"])


def timeouts():
    return groups.timeout_of_job(), groups.urgent(None)


def test_a_group_has_the_jobs_timeout_and_goes_first(monkeypatch):
    assert rank_group(2).run(timeouts) == [(timedelta(minutes=30), None)] * 2
    monkeypatch.setattr(device, "own_backend", lambda: "nccl")
    monkeypatch.setattr(device, "sends_between_devices", lambda group=None: True)
    nccl = SimpleNamespace(Options=lambda is_high_priority_stream: SimpleNamespace(first=is_high_priority_stream))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
    options = groups.urgent(timedelta(seconds=5))
    assert options.first is True and options._timeout == timedelta(seconds=5)


class Calls(TorchDispatchMode):
    """What is sent, as (the group's name, the call)."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            boxes = [a for a in tree_leaves(args) if isinstance(a, torch.ScriptObject)]
            group = next(box for box in boxes if box._type().name().endswith("ProcessGroup"))
            self.made.append((dist.ProcessGroup.unbox(group).group_desc, func._opname))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("ranks", "height", "width"), [(4, 1, 4), (4, 2, 2), (8, 2, 2), (8, 4, 1)])
def test_between_gpus_gradients_and_rows_never_share_a_communicator(monkeypatch, ranks, height, width):
    """Each rank of a job in turn, with messages that go nowhere; the first call of a group is made by all its ranks."""
    monkeypatch.setattr(device, "sends_between_devices", lambda group=None: True)
    for rank in range(ranks):
        with fake_job(rank, ranks), Calls() as calls:
            mesh = ff.init_mesh(height=height, width=width)
            net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3, padding=1))
            model = ff.parallelize(net, mesh, data_parallel=FakeDataParallel)
            x = ff.shard(torch.ones(2, 3, 9, 14), mesh, check=False)
            before = len(calls.made)
            model(x).sum().backward()
        of_the_job = {call for name, call in calls.made[before:] if name == "default_pg"}
        assert "allreduce_" in of_the_job and not of_the_job & {"send", "recv_", "_allgather_base_", "allgather_"}
        others = dict.fromkeys(name for name, _ in calls.made if name != "default_pg")
        assert all("fullframe" in name for name in others)
        assert any(call == "send" for _, call in calls.made)
        for name in others:
            assert next(call for other, call in calls.made if other == name) == "allreduce_", "it is opened by all"


class OfNcclAlone:
    """The job's group after `init_process_group("nccl")`."""

    def _get_backend(self, place):
        if place.type == "cpu":
            raise RuntimeError("No backend type associated with device type cpu")
        return SimpleNamespace(options=SimpleNamespace(_timeout=timedelta(seconds=7)))


def test_a_job_may_have_no_backend_for_host_memory(monkeypatch):
    monkeypatch.setattr(device, "place_of_numbers", lambda: torch.device("cuda"))
    monkeypatch.setattr(groups, "dist", SimpleNamespace(group=SimpleNamespace(WORLD=OfNcclAlone())))
    assert groups.timeout_of_job() == timedelta(seconds=7)
