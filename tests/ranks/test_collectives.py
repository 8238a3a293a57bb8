"""Sums and gathers over ranks, and what their gradients are."""

import pytest
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
    in_one_row,
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
    of_a_column = all_owned(torch.full((1, 4), 3.0 * rank, dtype=torch.bfloat16)[:, 0], _group())  # with a stride of 4
    assert of_a_column.tolist() == [3.0]
    return str(found.tolist()), mine.grad.tolist(), bool(true), found.add_(1).shape  # type: ignore[union-attr]


def test_what_one_rank_has_arrives_to_the_last_bit() -> None:
    assert rank_group(2).run(_owned) == [("[-0.0, nan]", [3, 3], True, (2,))] * 2


def _under_autocast() -> list[Tensor]:
    found = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for value in (_mine(2).half(), _mine(2).bfloat16(), _mine(2)):
            found += [all_gather_no_grad(value, _group()), all_sum_no_grad(value, _group())]
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_autocast_leaves_values_as_they_are(ranks: int) -> None:
    for found in rank_group(ranks).run(_under_autocast):
        for n, dtype in enumerate((torch.float16, torch.bfloat16, torch.float64)):
            everyone, total = found[2 * n], found[2 * n + 1]
            assert everyone.dtype == total.dtype == dtype
            assert everyone.double().tolist() == [[10.0**rank, 2 * 10.0**rank] for rank in range(ranks)]
            assert total.double().tolist() == everyone.double().sum(0).to(dtype).tolist()


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


def _rows_of_all() -> list[object]:
    """What differs from the parts joined: their values, and the first and second gradients of a part."""
    group, rank = _group(), dist.get_rank()
    wrong: list[object] = []
    for dtype, shape, dim in (
        (torch.float64, (3, 4, 5), 1),
        (torch.float64, (2, 3, 4, 5), 2),
        (torch.complex128, (4, 2), 0),
        (torch.float64, (0, 3), 1),
        (torch.bfloat16, (2, 6), 1),
        (torch.float64, (500, 300), 1),
    ):
        draws = torch.Generator().manual_seed(5)
        parts = [torch.randn(shape, generator=draws, dtype=dtype) for _ in range(dist.get_world_size())]
        seeds = [torch.randn_like(torch.cat(parts, dim)) for _ in parts]
        seeds = [seed.fill_(1 + number) if dtype is torch.bfloat16 else seed for number, seed in enumerate(seeds)]
        dist.broadcast_object_list(seeds, 0)
        for last in (False, True, rank == 0) if len(shape) == 4 else (False,):
            mine = parts[rank].to(memory_format=torch.channels_last) if last else parts[rank]
            mine.requires_grad_()
            row = in_one_row(mine, dim, group)
            (gradient,) = torch.autograd.grad(row, mine, seeds[rank].requires_grad_(), create_graph=True)
            (second,) = torch.autograd.grad(gradient.abs().square().sum(), seeds[rank])
            own = slice(rank * shape[dim], (rank + 1) * shape[dim])
            summed = torch.stack([seed.detach() for seed in seeds]).sum(0)
            expected = [torch.cat(parts, dim), summed.movedim(dim, 0)[own].movedim(0, dim), 2 * summed]
            for found, wanted in zip((row, gradient, second), expected, strict=True):
                if not torch.allclose(found, wanted, rtol=1e-12, atol=1e-12):
                    wrong.append((dtype, shape, dim, last, found, wanted))
            if last and row.stride(1) != 1:
                wrong.append(row.stride())
    return wrong


@pytest.mark.parametrize("ranks", [2, 3])
def test_equal_parts_in_one_row(ranks: int) -> None:
    for wrong in rank_group(ranks).run(_rows_of_all):
        assert not wrong, wrong
