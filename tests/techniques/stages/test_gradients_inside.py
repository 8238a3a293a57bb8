"""What the parts of a chain do with gradients on their way back, they do with one process's."""

import copy
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullframe as ff
from tests.rank_group import rank_group


class Clip(torch.autograd.Function):
    """As DROID-SLAM clips gradients from iteration to iteration."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return torch.where(gradient.abs() > 0.3, 0, gradient)


class Clipped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor, measured: Tensor) -> Tensor:
        x = Clip.apply(torch.tanh(self.conv(x)) + measured)  # type: ignore[no-untyped-call]
        x.register_hook(lambda gradient: gradient.clamp(-0.2, 0.2))
        return x


def clipped(axes: dict[str, int], microbatches: int, inside: bool) -> float:
    """Of two losses' gradients, the first in `no_sync`."""
    mesh = ff.init_mesh(**axes)
    torch.manual_seed(3)
    block, x = Clipped().double(), torch.randn(4, 3, 6, 8, dtype=torch.float64)
    loop = copy.deepcopy(block)
    model = ff.parallelize(ff.unroll(block, 5, placement="stages", mesh=mesh, microbatches=microbatches), mesh)
    whole, split = x.clone().requires_grad_(), (ff.shard(x, mesh) if "width" in axes else x.clone()).requires_grad_()
    for context in (model.no_sync(), nullcontext()):
        with context:
            given = [lambda state: state.square().sum() / 8, [], split, split] if inside else [split, split]
            found = model.loss(*given) if inside else model(*given).square().sum() / 8
            found.backward()
        state = whole
        for _ in range(5):
            state = loop(state, whole)
        (state.square().sum() / 8).backward()
    mine = split.grad.full() if isinstance(split, ff.SpatialTensor) else split.grad  # type: ignore[union-attr]
    pairs = [
        (mine, whole.grad),
        *((a.grad, b.grad) for a, b in zip(block.parameters(), loop.parameters(), strict=True)),
    ]
    return max(float((a - b).abs().max()) for a, b in pairs)  # type: ignore[operator]


@pytest.mark.parametrize("axes", [{"stages": 3}, {"stages": 2, "width": 2}], ids=str)
def test_clipping_in_a_block_gets_one_process_s_gradient(axes: dict[str, int]) -> None:
    for microbatches, inside in ((1, False), (2, False), (2, True)):
        assert max(rank_group(math.prod(axes.values())).run(clipped, axes, microbatches, inside)) < 1e-10
