"""Models that are wrapped beside each other: one backward pass is of both, and replicas do not use the same of them."""

from unittest.mock import patch
from weakref import WeakSet

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullframe as ff
from fullframe.model import ddp
from fullframe.model.ddp import DataParallel
from tests.rank_group import rank_group

USES = [(True, True), (True, False), (False, False), (False, True)]  # the second loss, by step and replica


class Losses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.full((1,), 0.1, dtype=torch.float64)) for _ in range(2))

    def forward(self, found: Tensor, wanted: Tensor, both: bool) -> Tensor:
        difference = found - wanted
        loss = difference.abs().mean() * (-self.first).exp().sum() + self.first.sum()
        return loss + (difference.square() * (-self.second).exp()).mean() + self.second.sum() if both else loss


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 3, padding=1)
    return nn.Sequential(*layers).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    image = torch.arange(198.0, dtype=torch.float64).view(2, 1, 9, 11) + 100 * step
    return image.sin(), image.cos()


def plain() -> list[Tensor]:
    model, losses = network(), Losses()
    optimizer = torch.optim.SGD([*model.parameters(), *losses.parameters()], lr=0.1)
    for step, uses in enumerate(USES):
        optimizer.zero_grad()
        image, target = batch(step)
        for number, both in enumerate(uses):
            (losses(model(image[number : number + 1]), target[number : number + 1], both) / 2).backward()
        optimizer.step()
    return [p.detach() for p in (*model.parameters(), *losses.parameters())]


def split(width: int) -> list[Tensor]:
    mesh = ff.init_mesh(width=width)
    replica = mesh["data"].get_local_rank()
    model, losses = ff.parallelize(network(), mesh), ff.parallelize(Losses(), mesh)
    optimizer = torch.optim.SGD([*model.parameters(), *losses.parameters()], lr=0.1)
    for step, uses in enumerate(USES):
        optimizer.zero_grad()
        image, target = (ff.shard(whole[replica : replica + 1], mesh) for whole in batch(step))
        losses(model(image), target, uses[replica]).backward()
        optimizer.step()
    return [p.detach() for p in (*model.module.parameters(), *losses.module.parameters())]


@pytest.mark.parametrize("width", [1, 2])
def test_a_layer_that_one_replica_alone_uses(width: int) -> None:
    expected = plain()
    for found in rank_group(2 * width).run(split, width):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def numbers() -> list[int]:
    """Of models that come one after another; on one rank the collector is late."""

    def made() -> DataParallel:
        return DataParallel(lambda *args, **kwargs: nn.Identity(), "cpu", replicas=True)

    ff.init_mesh()
    with patch.object(ddp, "_all", WeakSet()):  # not those of earlier tests' models, of which some are still there
        first, second = made(), made()
        found = [first._number, second._number]
        kept = second if dist.get_rank() else None
        del second
        third = made()
        found.append(third._number)
        del kept, third
        return [*found, made()._number]


def test_the_first_sends_in_the_jobs_group_and_others_in_one_that_no_rank_still_uses() -> None:
    assert rank_group(2).run(numbers) == [[0, 1, 2, 1]] * 2
