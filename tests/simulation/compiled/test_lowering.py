"""A graph lowered by inductor: a chain of pointwise ops is one kernel, which reads and writes what it must, no more."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch._guards
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fullframe.simulation.clock.roofline import StepClock
from fullframe.simulation.compiled.lowering import SETTINGS, Lowering
from fullframe.simulation.devices.table import Device, device_named

SHAPE, BYTES = (2, 8, 64, 96), 2 * 8 * 64 * 96 * 4
GPU = device_named("A100-80GB")
CPU = replace(GPU, name="cpu")


class Counting(StepClock):
    """Notes the bytes of each kernel."""

    def __init__(self, device: Device) -> None:
        self.kernels: list[int] = []
        super().__init__(device)

    def fused(self, bytes: int) -> None:
        self.kernels.append(bytes)
        super().fused(bytes)


def lowered(function: Callable[..., Any], inputs: int, device: Device) -> tuple[list[Tensor], list[int]]:
    """What comes out of a function of maps that want no gradient, and the bytes of its kernels."""
    fake, clock = FakeTensorMode(shape_env=ShapeEnv()), Counting(device)
    given = [fake.from_tensor(torch.zeros(SHAPE), static_shapes=True) for _ in range(inputs)]
    graph = torch.fx.Graph()
    called = graph.call_function(function, tuple(graph.placeholder(f"x{n}") for n in range(inputs)))
    graph.output((called,))
    settings = inductor_config.patch({"use_pre_grad_passes": False, **SETTINGS})
    with torch.no_grad(), settings, functorch_config.patch(backward_pass_autocast="off"):
        with torch._guards.tracing(torch._guards.TracingContext(fake)):
            run: Any = compile_fx(torch.fx.GraphModule(nn.Module(), graph), given, Lowering(clock))
        with fake:
            return list(run(*given)), clock.kernels


@pytest.mark.parametrize("device", [GPU, CPU])
def test_a_chain_of_pointwise_ops_reads_and_writes_once(device: Device) -> None:
    out, kernels = lowered(lambda x, y: (x.relu() * 2 + y).tanh(), 2, device)
    assert out[0].shape == SHAPE and out[0].device.type == "cpu"
    assert kernels == [3 * BYTES]


def test_no_other_program_is_called_not_even_a_compiler() -> None:
    with mock.patch("subprocess.Popen", side_effect=AssertionError("something is compiled")):
        assert lowered(lambda x: x.sigmoid().sum(1), 1, CPU)[1] == [BYTES + BYTES // SHAPE[1]]


def test_a_reduction_and_what_follows_are_kernels_of_their_own() -> None:
    def normed(x: Tensor) -> Tensor:
        return (x - x.mean((2, 3), keepdim=True)).relu()

    for device in (GPU, CPU):
        _, kernels = lowered(normed, 1, device)
        assert 2 * BYTES <= sum(kernels) <= 3.1 * BYTES
