"""Running statistics of microbatches that went through several stages, put together as one process has them."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fullframe as ff
from fullframe.errors import StrategyError
from fullframe.techniques.stages.buffers import StageBuffers
from tests.rank_group import RankFailure, rank_group


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


def test_a_norm_that_two_stages_run_may_be_read_with_one_microbatch() -> None:
    whole = nn.Sequential(nn.BatchNorm1d(2))
    with StageBuffers(whole, [[whole[0]], [whole[0]]], 0, 1).around():
        whole(torch.arange(6.0).view(3, 2))
        assert whole[0].running_mean is not None and float(whole[0].running_mean.sum()) == pytest.approx(0.5)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))


def test_what_one_stage_makes_of_its_buffers_is_known_to_all() -> None:
    wholes = [nn.ModuleList([Counting(), Counting()]) for _ in range(2)]
    kept = [StageBuffers(whole, [[whole[0]], [whole[1]]], number, 4) for number, whole in enumerate(wholes)]
    before = [buffer for whole in wholes for buffer in whole.buffers()]
    for number, buffers in enumerate(kept):
        buffers.begin()
        wholes[number][number].calls += number + 1
        buffers.end()
    for buffers in kept:
        buffers.settle([each.said() for each in kept])
    assert [[float(module.calls) for module in whole] for whole in wholes] == [[1, 2], [1, 2]]
    after = [buffer for whole in wholes for buffer in whole.buffers()]
    assert all(a is b for a, b in zip(before, after, strict=True))  # for who holds them, too


class OwnNorm(nn.Module):
    """None of torch's, as users write them around `F.batch_norm`, which writes to buffers and to no version."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("var", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.mean, self.var, training=True)


def test_statistics_of_a_norm_of_the_users_are_known_to_all() -> None:
    wholes = [nn.ModuleList([OwnNorm(), OwnNorm()]) for _ in range(2)]
    kept = [StageBuffers(whole, [[whole[0]], [whole[1]]], number, 4) for number, whole in enumerate(wholes)]
    for number, buffers in enumerate(kept):
        buffers.begin()
        wholes[number][number](torch.arange(8.0).view(4, 2) + number)
        buffers.end()
    for buffers in kept:
        buffers.settle([each.said() for each in kept])
    one = nn.ModuleList([OwnNorm(), OwnNorm()])
    for number, norm in enumerate(one):
        norm(torch.arange(8.0).view(4, 2) + number)
    for whole in wholes:
        torch.testing.assert_close(list(whole.buffers()), list(one.buffers()))


def test_a_buffer_that_two_stages_write_with_several_microbatches() -> None:
    whole = nn.ModuleList([Counting()])
    buffers = StageBuffers(whole, [[whole[0]], [whole[0]]], 0, 2)
    buffers.begin()
    whole[0].calls = whole[0].calls + 1
    with pytest.raises(StrategyError, match=r"Counting changes its buffer 0\.calls in forward.*microbatches=1"):
        buffers.end()


@pytest.mark.parametrize("what", ["buffer", "attribute"])
@pytest.mark.parametrize(("stage", "microbatch"), [(0, 0), (0, 1), (1, 0)])
def test_what_the_very_first_microbatch_makes_alone_reaches_all_others(what: str, stage: int, microbatch: int) -> None:
    whole = nn.ModuleList([Counting()])
    buffers = StageBuffers(whole, [[whole[0]], [whole[0]]], stage, 2)
    for _ in range(microbatch):
        with buffers.around():
            pass
    late = pytest.raises(StrategyError, match=rf"Counting changes its {what} 0\.made in forward, and lies on several")
    with late if stage or microbatch else nullcontext(), buffers.around():
        if what == "buffer":
            whole[0].register_buffer("made", torch.ones(2))
        else:
            whole[0].made = torch.ones(2)


def test_a_stage_goes_on_with_what_its_own_microbatches_have_made() -> None:
    whole = nn.ModuleList([Counting()])
    whole[0].number = 0
    for calls in range(1, 3):
        buffers = StageBuffers(whole, [[whole[0]]], 0, 2)
        for _ in range(2):
            with buffers.around():
                whole[0].number += 1
        buffers.settle([buffers.said()])
        with pytest.raises(StrategyError, match=r"Counting sets 0\.number in forward for each microbatch anew"):
            whole[0].number + 1
        buffers.put_back_attributes()
        assert whole[0].number == 2 * calls
        buffers.settle([buffers.said()])


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


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", None)
        self.register_buffer("sizes", torch.zeros(1))


def test_a_buffer_that_is_made_on_one_stage_is_there_on_all() -> None:
    wholes = [nn.ModuleList([Lazy(), Lazy()]) for _ in range(2)]
    kept = [StageBuffers(whole, [[whole[0]], [whole[1]]], number, 4) for number, whole in enumerate(wholes)]
    with kept[1].around():
        wholes[1][1].mean = torch.ones(3)
        wholes[1][1].register_buffer("grid", torch.zeros(2), persistent=False)
        wholes[1][1].sizes = torch.ones(())
    with kept[1].around():
        wholes[1][1].sizes += 1
    for buffers in kept:
        buffers.settle([each.said() for each in kept])
    for whole in wholes:
        assert whole[0].mean is None and whole[1].mean.tolist() == [1, 1, 1] and whole[1].grid.tolist() == [0, 0]
        assert whole[0].sizes.tolist() == [0] and whole[1].sizes.tolist() == 2
        assert list(whole.state_dict()) == ["0.sizes", "1.mean", "1.sizes"]


def test_a_buffer_that_hangs_on_a_graph() -> None:
    whole = nn.ModuleList([Lazy()])
    buffers = StageBuffers(whole, [[whole[0]], [whole[0]]], 0, 1)
    with (
        pytest.raises(StrategyError, match=r"Lazy sets 0\.mean in forward to a tensor that wants a gradient"),
        buffers.around(),
    ):
        whole[0].mean = torch.ones(3, requires_grad=True) * 2


class Normed(nn.Module):
    """Reads its statistics where it is told to, and breaks off at large numbers."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.norm, self.reads = nn.BatchNorm1d(3), reads

    def forward(self, x: Tensor, measured: Tensor) -> Tensor:
        if measured.max() > 50:
            raise OSError("a broken sample")
        x = torch.tanh(self.norm(x)) + measured
        return x - self.norm.running_mean if self.reads else x


def interrupted() -> None:
    block = Normed(reads=False)
    run = ff.unroll(block, 4, placement="stages", mesh=ff.init_mesh(stages=2), microbatches=2)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    run(x, x)
    before, bad = [buffer.clone() for buffer in block.buffers()], x.index_fill(0, torch.tensor([3]), 99)
    try:
        run(bad, bad)
    except Exception as error:  # a broken sample, or what the other stage says of it
        same = [torch.equal(a, b) for a, b in zip(before, block.buffers(), strict=True)]
        raise RuntimeError(f"buffers as before: {same}") from error


def test_an_error_leaves_running_statistics_as_they_were() -> None:
    with pytest.raises(RankFailure) as raised:
        rank_group(2).run(interrupted)
    assert [message for _, _, message, _ in raised.value.errors] == [f"buffers as before: {[True] * 3}"] * 2


def read() -> None:
    run = ff.unroll(Normed(reads=True), 4, placement="stages", mesh=ff.init_mesh(stages=2), microbatches=2)
    run(torch.ones(4, 3), torch.ones(4, 3))


def test_a_block_that_reads_running_statistics() -> None:
    with pytest.raises(RankFailure) as raised:
        rank_group(2).run(read)
    errors = [message for _, _, message, _ in raised.value.errors]
    assert len(errors) == 2 and all("norm.running_mean is read in forward" in message for message in errors)
