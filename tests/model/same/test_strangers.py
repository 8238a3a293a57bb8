"""Parameters of no model that have an optimizer of their own: told where each replica has a gradient of its own."""

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fullframe as ff
from fullframe.model.same.strangers import warn_of_strangers
from tests.rank_group import rank_group


def _left_alone(weight: nn.Parameter, mesh: DeviceMesh) -> None:
    pass


def _averaged_by_hand(weight: nn.Parameter, mesh: DeviceMesh) -> None:
    dist.all_reduce(weight.grad, group=mesh.get_group("data"))


def _told(before_the_step: Callable[[nn.Parameter, DeviceMesh], None], way: str, width: int) -> list[str]:
    """Of two steps by a loss whose weight is a criterion's."""
    mesh = ff.init_mesh(width=width)
    torch.manual_seed(0)
    model = ff.parallelize(nn.Conv2d(1, 1, 3), mesh)
    criterion = nn.ParameterList([torch.zeros(2)])
    parallel = ff.parallelize(criterion, mesh) if way == "a model of its own" else None
    optimizers = torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(criterion, 0.1)
    image = ff.shard(torch.rand(1, 1, 6, 8, generator=torch.Generator().manual_seed(mesh.get_local_rank("data"))), mesh)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            loss = model(image).square()
            weight = criterion[0]
            (loss * weight[0].exp() if way == "meets the map" else loss.mean() * weight[0].exp()).mean().backward()
            before_the_step(weight, mesh)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert parallel is None or parallel.module is criterion
    return [str(warning.message) for warning in said if "no parallel model holds" in str(warning.message)]


@pytest.mark.parametrize(("way", "width"), [("meets a number", 1), ("meets a number", 2), ("meets the map", 2)])
def test_gradients_that_differ_are_told_once(way: str, width: int) -> None:
    """What is made of the weight meets the map, not the weight: its gradient is averaged over the replica alone."""
    said = [line for rank in rank_group(2 * width).run(_told, _left_alone, way, width) for line in rank]
    assert len(said) == 1 and said[0].startswith(
        "an optimizer steps with 1 parameter that no parallel model holds (of shape (2,)), of which ranks have other"
    )


CASES = [(_averaged_by_hand, "meets a number", 1), (_left_alone, "a model of its own", 1)]
CASES += [(_left_alone, "meets a number", 2)]  # one replica


@pytest.mark.parametrize(("before_the_step", "way", "width"), CASES)
def test_equal_ones_are_not(before_the_step: Callable[[nn.Parameter, DeviceMesh], None], way: str, width: int) -> None:
    assert rank_group(2).run(_told, before_the_step, way, width) == [[], []]


def _sparse_or_none() -> None:
    ff.init_mesh()
    embedding = nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([dist.get_rank()])).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_strangers([{"params": [embedding.weight, nn.Parameter(torch.ones(1))]}])


def test_gradients_without_elements_of_their_own_are_not_looked_at() -> None:
    rank_group(2).run(_sparse_or_none)
