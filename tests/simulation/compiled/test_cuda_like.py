"""Inductor is told of a GPU for a while, and a graph that its tensors are there."""

from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fullframe.simulation.compiled.cuda_like import as_if_on_cuda, on_cuda
from tests.simulation.compiled.test_lowering import CPU, GPU


def test_nothing_is_left_behind() -> None:
    before = torch.cuda.get_device_properties, torch.cuda.current_device
    with as_if_on_cuda(GPU):
        assert torch.cuda.get_device_properties(0).major == 8
    assert (torch.cuda.get_device_properties, torch.cuda.current_device) == before
    with as_if_on_cuda(replace(GPU, has_bf16=False)):
        assert torch.cuda.get_device_properties(0).major == 7
    with as_if_on_cuda(CPU):
        assert torch.cuda.get_device_properties is before[0]


def test_a_graph_is_moved_with_what_it_makes() -> None:
    fake = FakeTensorMode()
    with fake:
        x = torch.ones(2, 3)
    graph = torch.fx.Graph()
    given = graph.placeholder("x")
    given.meta["val"] = x
    made = graph.call_function(torch.ops.aten.zeros.default, ([2, 3],), {"device": torch.device("cpu")})
    graph.output((graph.call_function(torch.ops.aten.add.Tensor, (given, made)),))
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    (moved,) = on_cuda(module, [x])
    assert moved.device == given.meta["val"].device == made.kwargs["device"] == torch.device("cuda", 0)
    assert moved.shape == x.shape and moved.fake_mode is fake and x.device.type == "cpu"
