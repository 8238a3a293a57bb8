"""A sum over all ranks counts each rank of a replica: said once of each line of the user's that does so."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather as gathered_with_gradient

import fullframe as ff
from fullframe.model.world_collectives import watch_collectives
from tests.rank_group import rank_group


def _sum(x: Tensor, group: dist.ProcessGroup) -> None:
    dist.all_reduce(x)


def _mean(x: Tensor, group: dist.ProcessGroup) -> None:
    dist.all_reduce(x)
    x /= dist.get_world_size()


def _mean_in_a_helper(x: Tensor, group: dist.ProcessGroup) -> None:
    _mean_of(x / dist.get_world_size())


def _mean_of(x: Tensor) -> None:
    dist.all_reduce(x)


def _largest(x: Tensor, group: dist.ProcessGroup) -> None:
    dist.all_reduce(x, dist.ReduceOp.MAX)


def _list(x: Tensor, group: dist.ProcessGroup) -> None:
    dist.all_gather([torch.empty_like(x) for _ in range(dist.get_world_size())], x)


def _objects(x: Tensor, group: dist.ProcessGroup) -> None:
    dist.all_gather_object([None] * dist.get_world_size(), float(x))


def _list_with_gradient(x: Tensor, group: dist.ProcessGroup) -> None:
    gathered_with_gradient(x)


def _of_replicas(x: Tensor, group: dist.ProcessGroup) -> None:
    dist.all_reduce(x, group=group)


def _metric(x: Tensor, group: dist.ProcessGroup) -> None:
    metric = torchmetrics.SumMetric()
    metric.update(x)
    metric.compute()


def _metric_of_replicas(x: Tensor, group: dist.ProcessGroup) -> None:
    metric = torchmetrics.SumMetric(process_group=group)
    metric.update(x)
    metric.compute()


def _in_torch(x: Tensor, group: dist.ProcessGroup) -> None:
    nn.parallel.DistributedDataParallel(nn.Linear(1, 1))(x[None]).sum().backward()


def _told(collective: Callable[[Tensor, dist.ProcessGroup], None], width: int) -> list[str]:
    mesh = ff.init_mesh(width=width)
    watch_collectives(mesh)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            collective(torch.ones(1), mesh.get_group("data"))
    return [f"{warning.filename}: {warning.message}" for warning in said if "each comes" in str(warning.message)]


CASES = [
    (_sum, "dist.all_reduce adds up over all 2 ranks"),
    (_list, "dist.all_gather gathers over all 2 ranks"),
    (_objects, "dist.all_gather_object gathers"),
    (_list_with_gradient, "dist.all_gather gathers"),
    (_metric, "this metric gathers over all 2 ranks"),
    (_metric_of_replicas, ""),
    (_mean, ""),
    (_mean_in_a_helper, ""),
    (_largest, ""),
    (_of_replicas, ""),
    (_in_torch, ""),
]


@pytest.mark.parametrize(("collective", "text"), CASES)
def test_what_counts_each_rank_of_a_replica_is_told_once(
    collective: Callable[[Tensor, dist.ProcessGroup], None], text: str
) -> None:
    first, second = rank_group(2).run(_told, collective, 2)
    assert not second and len(first) == bool(text)
    assert all(text in line and line.startswith(__file__) and "each comes 2 times" in line for line in first)


class _Gathered(torch.autograd.Function):
    """Of all ranks of a group, with the gradients of all: as contrastive losses have it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        every = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(every, x, group=group)
        return torch.cat(every)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None


def _contrastive(model: nn.Module, images: Tensor, gather: Callable[[Tensor], Tensor]) -> Tensor:
    features = gather(nn.functional.normalize(model(images).mean((2, 3))))
    return (features @ features.T).div(0.1).logsumexp(1).mean()


def _gradient_of_a_contrastive_loss(images: Tensor) -> Tensor:
    torch.manual_seed(0)
    mesh = ff.init_mesh(width=2)
    data = mesh.get_group("data")
    model = ff.parallelize(nn.Conv2d(3, 5, 3, padding=1).double(), mesh)
    mine = ff.shard(images[dist.get_rank(data) :: 2], mesh)
    _contrastive(model, mine, lambda x: _Gathered.apply(x, data)).backward()
    gradient = model.module.weight.grad
    assert gradient is not None
    return gradient


def _told_by_a_parallel_model() -> int:
    ff.parallelize(nn.Conv2d(1, 1, 3), ff.init_mesh(width=2))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        dist.all_reduce(torch.ones(()))
    return len(said)


def test_a_parallel_model_starts_it() -> None:
    assert rank_group(2).run(_told_by_a_parallel_model) == [1, 0]


def test_what_is_gathered_over_the_replicas_is_one_process_s() -> None:
    images = torch.randn(4, 3, 7, 9, dtype=torch.float64)
    torch.manual_seed(0)
    plain = nn.Conv2d(3, 5, 3, padding=1).double()
    _contrastive(plain, images, lambda x: x).backward()
    for gradient in rank_group(4).run(_gradient_of_a_contrastive_loss, images):
        torch.testing.assert_close(gradient, plain.weight.grad)
