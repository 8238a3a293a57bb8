"""What a kernel reads and writes: what it touches of a map, not the whole of it."""

import torch
from torch import Tensor
from torch._inductor.codegen.triton import TritonScheduling

from fullframe.simulation.compiled.kernels import kernels_noted
from tests.simulation.compiled.test_lowering import BYTES, CPU, GPU, SHAPE, lowered


def test_a_border_is_not_the_whole_map() -> None:
    for device in (GPU, CPU):
        out, kernels = lowered(lambda x: x[..., :1].contiguous(), 1, device)
        assert out[0].shape == (*SHAPE[:-1], 1) and kernels == [2 * BYTES // SHAPE[-1]]


def test_what_is_made_in_its_place_is_written_once() -> None:
    def both(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([(x * 2).sum(1, keepdim=True), y], 1)

    for device in (GPU, CPU):
        _, kernels = lowered(both, 2, device)
        assert sum(kernels) == 3 * BYTES + BYTES // SHAPE[1]


def test_inductor_is_as_before() -> None:
    before = TritonScheduling.define_kernel
    with kernels_noted() as nodes:
        assert TritonScheduling.define_kernel is not before and not nodes
    assert TritonScheduling.define_kernel is before
