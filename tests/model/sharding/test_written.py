"""What forward writes to sharded parameters is refused, as it would be lost."""

import pytest
import torch
from torch import Tensor, nn

import fullframe as ff
from fullframe.errors import StrategyError
from fullframe.model.sharding.written import WrittenIn
from tests.exactness import mesh
from tests.rank_group import RankFailure, rank_group


class Moving(nn.Module):
    """Its forward writes to a parameter, seen by autograd or not, or puts another in its place."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.conv, self.how = nn.Conv2d(3, 3, 1), how
        self.center = nn.Parameter(torch.zeros(3, 1, 1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.how == "replaced":
                self.center = nn.Parameter(self.center + 1, requires_grad=False)
            else:
                (self.center.data if self.how == "written to by .data" else self.center).add_(1)
        return self.conv(x) + self.center


def _moving(how: str) -> None:
    on = mesh(1, 2)
    model = ff.parallelize(nn.Sequential(Moving(how)), on, shard_parameters=True)
    model(ff.shard(torch.zeros(1, 3, 4, 6), on))


class Outside(nn.Module):
    """Writes to a parameter of a block that it does not call."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.mix = nn.ModuleList(nn.Sequential(nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.mix[0][0].weight  # type: ignore[index]
        with torch.no_grad():
            if self.how == "replaced":
                self.mix[0][0].weight = nn.Parameter(weight + 1)  # type: ignore[index]
            else:
                (weight.data if self.how == "written to by .data" else weight).add_(1)
        return self.mix[1](x)  # type: ignore[no-any-return]


def _outside(how: str) -> None:
    on = mesh(1, 2)
    model = ff.parallelize(Outside(how), on, shard_parameters=True)
    model(ff.shard(torch.zeros(1, 3, 4, 6), on))


HOW = ["written to", "written to by .data", "replaced"]


@pytest.mark.parametrize("how", HOW)
def test_what_forward_writes_to_a_block_that_it_does_not_call_is_not_lost(how: str) -> None:
    with pytest.raises(RankFailure, match=rf"mix.0.0.weight is {how.removesuffix(' by .data')} in forward"):
        rank_group(2).run(_outside, how)


@pytest.mark.parametrize("how", HOW)
def test_what_forward_writes_to_parameters_is_not_lost(how: str) -> None:
    said = rf"0.center is {how.removesuffix(' by .data')} in forward, which sharded parameters would lose"
    with pytest.raises(RankFailure, match=said):
        rank_group(2).run(_moving, how)


def test_a_unit_looks_at_values_in_its_first_pass_in_training_alone() -> None:
    unit = Moving("written to by .data")
    WrittenIn(unit, "block", is_real=True)
    unit.eval()(torch.zeros(1, 3, 4, 6))
    with pytest.raises(StrategyError, match=r"block\.center is written to in forward"):
        unit.train()(torch.zeros(1, 3, 4, 6))
