"""A batch norm with the running statistics of one microbatch alone."""

import pytest
import torch
from torch import Tensor, nn

from fullframe.errors import StrategyError
from fullframe.techniques.stages.statistics import Apart, Statistics, add, counts, is_torchs


def test_it_begins_at_zero_and_adds_to_the_past_later() -> None:
    norm, one = nn.BatchNorm1d(2).double(), nn.BatchNorm1d(2).double()
    first, second = torch.randn(2, 5, 2, dtype=torch.float64)
    one(first), one(second), norm(first)
    before = [buffer.clone() for buffer in norm.buffers()]
    apart = Apart(norm, "norm")
    norm(second)
    found = apart.found()
    apart.put_back()
    assert all(torch.equal(a, b) for a, b in zip(before, norm.buffers(), strict=True)) and found.batches == 1
    add(norm, found)
    for mine, theirs in zip(norm.buffers(), one.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=0)


def test_it_is_not_read_meanwhile() -> None:
    norm, x = nn.BatchNorm1d(2), torch.ones(3, 2)
    apart = Apart(norm, "norm")
    with pytest.raises(StrategyError, match=r"norm\.running_mean is read in forward.*use microbatches=1"):
        x - norm.running_mean
    norm(x)
    with pytest.raises(StrategyError, match=r"norm\.running_mean is read in forward"):
        norm.eval()(x)
    apart.put_back()
    assert torch.equal(norm(x), x / (1 + norm.eps) ** 0.5) and not norm._forward_hooks and not norm._forward_pre_hooks


def test_hooks_of_the_norm_do_not_read_it_either() -> None:
    norm = nn.BatchNorm1d(2)
    norm.register_forward_hook(lambda norm, args, result: result - norm.running_mean)
    Apart(norm, "norm")
    with pytest.raises(StrategyError, match=r"norm\.running_mean is read in forward"):
        norm(torch.ones(3, 2))


def test_a_norm_that_no_microbatch_has_passed_has_no_mean_yet() -> None:
    norm = nn.BatchNorm1d(2, momentum=None)
    add(norm, Statistics(0, torch.zeros(2), torch.zeros(2)))
    assert norm.num_batches_tracked == 0 and norm.running_mean.sum() == 0


class Own(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return x


def test_which_norms_count() -> None:
    assert counts(nn.BatchNorm1d(2)) and is_torchs(nn.BatchNorm1d(2))
    assert not counts(nn.BatchNorm1d(2).eval()) and not counts(nn.BatchNorm1d(2, track_running_stats=False))
    assert counts(Own(2)) and not is_torchs(Own(2))
