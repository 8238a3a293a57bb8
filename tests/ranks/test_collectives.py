"""Sums and gathers over ranks, and what their gradients are."""

import torch
import torch.distributed as dist
from torch import Tensor

from fullframe.ranks.collectives import (
    all_gather,
    all_gather_no_grad,
    all_owned,
    all_sum,
    all_sum_no_grad,
    device_of_facts,
)
from fullframe.simulation.fake.world import fake_job
from tests.rank_group import rank_group


def _group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _mine(*shape: int) -> Tensor:
    """1, 2, ... on rank 0, ten times that on rank 1."""
    count = torch.Size(shape).numel()
    return torch.arange(1.0, count + 1, dtype=torch.float64).view(shape) * 10 ** dist.get_rank()


def _with_gradients() -> tuple[list[float], ...]:
    a, b = _mine(2).requires_grad_(), _mine(2).requires_grad_()
    total, everyone = all_sum(a, _group()), all_gather(b, _group())
    (total * _mine(2)).sum().backward()
    (everyone * _mine(2, 2)).sum().backward()
    return total.tolist(), a.grad.tolist(), everyone.flatten().tolist(), b.grad.tolist()  # type: ignore[union-attr]


def test_values_and_gradients_are_added_over_the_ranks() -> None:
    """A sum's gradient is the sum of what its copies get; a gathered slot's the sum over the copies of the slot."""
    first, second = rank_group(2).run(_with_gradients)
    assert first == ([11, 22], [11, 22], [1, 2, 10, 20], [11, 22])
    assert second == ([11, 22], [11, 22], [1, 2, 10, 20], [33, 44])


def _owned() -> tuple[object, ...]:
    rank = dist.get_rank()
    mine = torch.tensor([[-0.0, 0.0], [0.0, torch.nan]][rank], dtype=torch.bfloat16).requires_grad_()
    found = all_owned(mine, _group())
    (found * (1 + rank)).sum().backward()
    true = all_owned(torch.tensor(rank == 1), _group())
    return str(found.tolist()), mine.grad.tolist(), bool(true), found.add_(1).shape  # type: ignore[union-attr]


def test_what_one_rank_has_arrives_to_the_last_bit() -> None:
    assert rank_group(2).run(_owned) == [("[-0.0, nan]", [3, 3], True, (2,))] * 2


def _of_any_kind() -> list[object]:
    short, empty = _mine(3).to(torch.int16), torch.zeros(0, 4)
    turned = _mine(2, 3).t()  # not contiguous
    large = _mine(2**20)  # more than a mailbox holds
    kept = _mine(2)
    all_sum_no_grad(kept, _group())
    return [
        all_gather_no_grad(short, _group()).tolist(),
        list(all_gather_no_grad(empty, _group()).shape),
        list(all_sum_no_grad(empty, _group()).shape),
        all_sum_no_grad(turned, _group()).tolist(),
        all_sum_no_grad(large, _group())[-1].item(),
        all_gather_no_grad(large, _group())[1, -1].item(),
        bool((kept == _mine(2)).all()),
    ]


def test_any_dtype_shape_and_size() -> None:
    for found in rank_group(2).run(_of_any_kind):
        assert found == [
            [[1, 2, 3], [10, 20, 30]],
            [2, 0, 4],
            [0, 4],
            [[11, 44], [22, 55], [33, 66]],
            11 * 2**20,
            10 * 2**20,
            True,
        ]


def test_facts_of_the_host_are_told_from_it_where_it_sends() -> None:
    assert rank_group(2).run(_of_the_host) == ["cpu", "cpu"]
    with fake_job(0, 2):
        assert device_of_facts(_group(), "cuda") == "cuda"


def _of_the_host() -> object:
    return device_of_facts(_group(), "cuda")
