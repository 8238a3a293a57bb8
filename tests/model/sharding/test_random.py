"""What is drawn into sharded parameters, and what `torch.nn.init` makes of them, is one process's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullframe as ff
from fullframe.model.sharding.random import draw_whole
from fullframe.model.sharding.values import whole_value
from tests.exactness import mesh
from tests.rank_group import rank_group

Draw = Callable[[Any], Any]


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


DRAWS: list[Draw] = [
    nn.init.normal_,
    nn.init.uniform_,
    nn.init.xavier_uniform_,
    nn.init.xavier_normal_,
    nn.init.kaiming_uniform_,
    lambda weight: nn.init.kaiming_normal_(weight, mode="fan_out", generator=_generator()),
    lambda weight: nn.init.trunc_normal_(weight, std=0.02),
    lambda weight: nn.init.trunc_normal_(weight, generator=_generator()),
    lambda weight: nn.init.orthogonal_(weight),
    lambda weight: nn.init.dirac_(weight) if weight.dim() > 2 else nn.init.eye_(weight),
    lambda weight: nn.init.sparse_(weight, 0.3) if weight.dim() == 2 else nn.init.ones_(weight),
    lambda weight: weight.add_(torch.randn_like(weight)),
    lambda weight: weight.add_(torch.rand_like(weight) + torch.randint_like(weight, 5)),
    lambda weight: weight.bernoulli_(0.4).add_(torch.bernoulli(weight.sigmoid())),
    lambda weight: weight.exponential_().log_(),
    lambda weight: weight.random_(3, 9),
    lambda weight: weight.data.cauchy_().clamp_(-2, 2),
    lambda weight: weight.log_normal_().add_(torch.empty_like(weight).geometric_(0.3)),
    lambda weight: weight.copy_(nn.functional.dropout(weight, 0.5)),
]


def net(dims: int) -> nn.Module:
    """Five rows over two ranks: parts of different sizes."""
    torch.manual_seed(0)
    return (nn.Conv2d(3, 5, 3) if dims == 4 else nn.Linear(7, 5)).double()


@torch.no_grad()
def _drawn(model: Any) -> list[Tensor]:
    found = []
    for draw in DRAWS:
        torch.manual_seed(11)
        draw(model.weight)
        found += [whole_value(model.weight.detach()).clone(), torch.rand(3)]  # what is drawn next
    return found


def _compare(dims: int) -> None:
    draw_whole()  # as `parallelize` does; once more is the same
    model: Any = ff.parallelize(net(dims), mesh(1, 2), shard_parameters=True)
    torch.testing.assert_close(_drawn(model.module), _drawn(net(dims)), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dims", [2, 4])
def test_drawn_as_one_process_draws(dims: int) -> None:
    rank_group(2).run(_compare, dims)
