"""Running statistics of microbatches that went through several stages, put together as one process has them."""

import copy

import pytest
import torch
from torch import nn

from fullframe.errors import StrategyError
from fullframe.techniques.stages.buffers import StageBuffers


@pytest.mark.parametrize("momentum", [0.1, 0.7, None])
def test_a_norm_that_two_stages_run(momentum: float | None) -> None:
    """Two stages, three microbatches, of which each passes the norm twice on the first stage and once on the second."""
    one = nn.Sequential(nn.BatchNorm2d(2, momentum=momentum)).double()
    one(torch.randn(3, 2, 4, 4, dtype=torch.float64))  # so that it has a past
    stages = [copy.deepcopy(one) for _ in range(2)]
    kept = [StageBuffers(whole, [[whole[0]], [whole[0]]], number, 3) for number, whole in enumerate(stages)]
    for _ in range(3):
        for whole, buffers, passes in zip(stages, kept, (2, 1), strict=True):
            buffers.begin()
            for _ in range(passes):
                x = torch.randn(3, 2, 4, 4, dtype=torch.float64) * 3 + 1
                assert torch.equal(whole(x), one(x))
            buffers.end()
    said = [buffers.said() for buffers in kept]
    for whole, buffers in zip(stages, kept, strict=True):
        buffers.settle(said)
        for mine, theirs in zip(whole.buffers(), one.buffers(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))


def test_what_one_stage_makes_of_its_buffers_is_known_to_all() -> None:
    wholes = [nn.ModuleList([Counting(), Counting()]) for _ in range(2)]
    kept = [StageBuffers(whole, [[whole[0]], [whole[1]]], number, 4) for number, whole in enumerate(wholes)]
    for number, buffers in enumerate(kept):
        buffers.begin()
        wholes[number][number].calls += number + 1
        buffers.end()
    for buffers in kept:
        buffers.settle([each.said() for each in kept])
    assert [[float(module.calls) for module in whole] for whole in wholes] == [[1, 2], [1, 2]]


def test_a_buffer_that_two_stages_write_with_several_microbatches() -> None:
    whole = nn.ModuleList([Counting()])
    buffers = StageBuffers(whole, [[whole[0]], [whole[0]]], 0, 2)
    buffers.begin()
    whole[0].calls = whole[0].calls + 1
    with pytest.raises(StrategyError, match=r"Counting changes its buffer 0\.calls in forward.*microbatches=1"):
        buffers.end()


class OfRunningStatistics(nn.BatchNorm1d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.running_mean is not None
        self.running_mean += x.mean()
        return x - self.running_mean


def test_a_norm_of_the_users_may_read_its_running_statistics() -> None:
    whole = nn.ModuleList([OfRunningStatistics(1)])
    buffers = StageBuffers(whole, [[whole[0]], [whole[0]]], 0, 2)
    buffers.begin()
    whole[0](torch.ones(2, 1))
    with pytest.raises(StrategyError, match=r"OfRunningStatistics changes its buffer 0\.running_mean in forward"):
        buffers.end()
