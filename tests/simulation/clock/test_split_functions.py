"""Functions on split tensors cost the host their Python."""

import dataclasses

import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

import fullframe as ff
from fullframe.ranks.mesh import spatial_of
from fullframe.simulation.clock.roofline import StepClock
from fullframe.simulation.clock.split_functions import functions_told_to
from fullframe.simulation.devices.host_costs import HostCosts
from fullframe.simulation.fake.world import fake_job
from fullframe.spatial.shard import even_spec
from fullframe.spatial.tensor import SpatialTensor, wrap
from tests.simulation.clock.test_roofline import Recorded, device


def test_each_function_that_issues_an_op_costs_its_python_once() -> None:
    costs, ours = HostCosts(function_seconds=100.0), vars(SpatialTensor)["__torch_function__"]
    clock = StepClock(dataclasses.replace(device(), launch_seconds=1.0, host=costs), mesh=(1, 1, 2))
    with fake_job(0, 2):
        mesh = ff.init_mesh(width=2)
        spatial_of(mesh, draw_seed=lambda generator: 0)
        x = wrap(torch.ones(1, 2, 4, 4), even_spec((1, 2, 4, 8), mesh))
        given: list[object] = []
        told = functions_told_to(clock, lambda func, args, made: given.append(made))
        with FakeTensorMode(allow_non_fake_inputs=True), Recorded(clock), told:
            y = F.relu(x)
            assert clock.host_seconds == 101
            y = F.normalize(y)  # which is made of other functions, and issues several ops
            assert len(given) == 2 and given[1] is y
            assert y.shape == (1, 2, 4, 8) and y.unsqueeze(0).dim() == 5 and y.requires_grad is False
    functions, ops = divmod(clock.host_seconds, 100)
    assert functions == 2 and ops > 3
    assert vars(SpatialTensor)["__torch_function__"] is ours
