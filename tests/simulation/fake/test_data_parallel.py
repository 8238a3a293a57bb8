"""DDP's buckets and messages, without its numbers."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullframe.simulation.fake.data_parallel import FakeDataParallel, WithoutBuckets
from fullframe.simulation.fake.world import fake_job

MIB = 2**20


def model() -> nn.Module:
    """Used in this order: 4 MiB, 20 MiB, 16 bytes frozen, 40 bytes."""
    layers = nn.ParameterList([torch.zeros(n) for n in (MIB, 5 * MIB, 4, 10)])
    layers[2].requires_grad = False
    return layers


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers in each all-reduce."""
    found: list[int] = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: found.append(tensor.numel()))
    return found


def backward(parallel: FakeDataParallel) -> None:
    parameters = [p for p in parallel.module.parameters() if p.requires_grad]
    sum((p * 2).sum() for p in parameters).backward()  # type: ignore[union-attr]


def test_buckets_are_ddp_s_own_and_each_is_sent_once_when_full(sent: list[int]) -> None:
    """Last parameters first; a first bucket of 1 MiB, then of 25."""
    with fake_job(0, 2):
        parallel = FakeDataParallel(model(), broadcast_buffers=False)
        assert [bucket.numel() for bucket in parallel.buckets] == [10 + 5 * MIB, MIB]
        backward(parallel)
        assert sorted(sent) == [MIB, 10 + 5 * MIB]
        backward(parallel)
        assert len(sent) == 4


def test_gradients_lie_in_their_bucket_between_steps_too(sent: list[int]) -> None:
    with fake_job(0, 2):
        parallel = FakeDataParallel(model())
        backward(parallel)
        places = {b.untyped_storage().data_ptr() for b in parallel.buckets}
        gradients: list[Tensor] = [p.grad for p in parallel.parameters() if p.grad is not None]
        assert {g.untyped_storage().data_ptr() for g in gradients} == places
        assert all(bool((g == 2).all()) for g in gradients)


def test_nothing_is_sent_while_gradients_accumulate(sent: list[int]) -> None:
    with fake_job(0, 2):
        parallel = FakeDataParallel(model())
        parallel.require_backward_grad_sync = False
        backward(parallel)
        assert sent == []
        parallel.require_backward_grad_sync = True
        backward(parallel)
        assert len(sent) == 2


def test_without_buckets_each_gradient_is_sent_from_where_it_lies(sent: list[int]) -> None:
    with fake_job(0, 2):
        parallel = WithoutBuckets(model())
        backward(parallel)
        assert not parallel.buckets and sorted(sent) == [10, MIB, 5 * MIB]


def test_buffers_travel_together_as_ddp_sends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a dtype in one message, in forward passes that follow one whose gradients are sent, and in the first."""
    sent: list[tuple[int, torch.dtype]] = []
    monkeypatch.setattr(dist, "broadcast", lambda tensor, source: sent.append((tensor.numel(), tensor.dtype)))
    layers = nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(3))
    with fake_job(0, 2):
        parallel, without = FakeDataParallel(layers, forward_sync_buffers=True), FakeDataParallel(layers)
        counts = []
        for syncing in (True, False, False, True, True):
            parallel.require_backward_grad_sync = syncing
            parallel(torch.randn(2, 3, 4, 4))
            counts.append(len(sent))
        without(torch.randn(2, 3, 4, 4))
    assert counts == [2, 4, 4, 4, 6]
    assert sent[:2] == [(12, torch.float32), (2, torch.int64)]
    assert len(sent) == 6
