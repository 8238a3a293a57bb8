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


class Two(nn.Module):
    """A state of two tensors, each by a weight of its own, of which a late block may cut some."""

    def __init__(self, number: int, cut: int):
        super().__init__()
        self.number, self.cut = number, cut
        self.weights = nn.ParameterList(torch.linspace(low, 1, 3, dtype=torch.float64) for low in (0.1, 0.5))

    def forward(self, state: Any) -> Any:
        state = [x.detach() if self.number == 2 and n < self.cut else x for n, x in enumerate(state)]
        return tuple(torch.sin(weight * x) for weight, x in zip(self.weights, state, strict=True))


def cut_short(cut: int, taken: int, stages: int, microbatches: int, inside: bool) -> list[Tensor | None]:
    """The gradients of five such blocks, whose last state's first tensors the loss takes."""
    own = [Two(number, cut) for number in range(5)]
    run = ff.unroll(own, 5)
    if stages > 1:
        mesh = ff.init_mesh(stages=stages)
        run = ff.unroll(own, 5, placement="stages", mesh=mesh, microbatches=microbatches)
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3)

    def criterion(state: Any) -> Tensor:
        return torch.stack([each.sum() for each in state[:taken]]).sum()

    (run.loss(criterion, [], (x, x * 2)) if inside else criterion(run((x, x * 2)))).backward()
    return [weight.grad for block in own for weight in block.weights]


@pytest.mark.parametrize(("cut", "taken"), [(0, 1), (1, 2), (2, 2)])
def test_what_a_part_of_the_state_alone_would_have_reached_has_no_gradient(cut: int, taken: int) -> None:
    expected = cut_short(cut, taken, 1, 1, False)
    for stages, microbatches, inside in ((2, 1, False), (3, 2, True)):
        ranks = rank_group(stages).run(cut_short, cut, taken, stages, microbatches, inside)
        for one, *found in zip(expected, *ranks, strict=True):
            assert [each is None for each in found] == [one is None] * stages
            if one is not None:
                torch.testing.assert_close(sum(found) / stages, one, rtol=1e-12, atol=1e-12)
