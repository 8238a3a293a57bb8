"""Writes to rows of a sharded parameter are refused, and what reads them, or writes to the rest, is one process's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fullframe as ff
from fullframe.errors import StrategyError
from fullframe.model.sharding.parts import CopiedPart
from fullframe.model.sharding.values import whole_value
from tests.exactness import mesh
from tests.rank_group import rank_group

Write = Callable[[Tensor], Any]

REFUSED: list[Write] = [
    lambda weight: weight[0].zero_(),
    lambda weight: weight.data[2:5].mul_(2),
    lambda weight: weight[0].detach().zero_(),
    lambda weight: weight[1:].flatten().data.fill_(1),
    lambda weight: weight.chunk(3)[1].fill_(1),  # a forget gate's bias
    lambda weight: weight.split(2)[0].fill_(1),
    lambda weight: weight.narrow(0, 3, 2).add_(1),
    lambda weight: weight.select(0, 3).copy_(weight.select(0, 1)),
    lambda weight: weight.view(-1)[4:9].mul_(2),
    lambda weight: weight.flatten(1).diagonal().mul_(2),
    lambda weight: torch.add(weight[0], 1, out=weight[0]),
    lambda weight: nn.init.constant_(weight[2:], 1.0),
    lambda weight: torch._foreach_mul_([weight, weight[1]], 2.0),
    lambda weight: weight.vsplit(2)[0].mul_(2),
    lambda weight: torch.chunk(weight, 3)[1].fill_(1),  # as functions
    lambda weight: torch.narrow(weight, 0, 3, 2).add_(1),
    lambda weight: torch.select(weight, 0, 3).zero_(),
    lambda weight: torch.tensor_split(weight, 2)[0].mul_(2),
    lambda weight: torch.diagonal(weight).fill_(1),
    lambda weight: torch.flatten(weight[1:]).view(-1, 3)[2].fill_(1),
    lambda weight: torch.unsqueeze(weight, 0)[0, 1].fill_(1),
    lambda weight: torch._foreach_zero_(list(torch.split(weight, 2))[:1]),
    lambda weight: weight.__setitem__((3, 1, 1, 1), 1.0),
    lambda weight: weight.data.__setitem__(slice(2, 4), 1.0),
    lambda weight: weight.__setitem__(weight[:, 0, 0, 0] < 0, 0.0),
    lambda weight: weight.__setitem__(weight < 0, torch.zeros(1)),
]
TAKEN: list[Write] = [
    lambda weight: weight[:, 0].zero_(),
    lambda weight: weight.view(-1).mul_(2),
    lambda weight: weight.transpose(0, 1).mul_(2),
    lambda weight: weight.masked_fill_(weight < 0, 0.0),
    lambda weight: weight.__setitem__(weight < 0, 0.5),
    lambda weight: weight.copy_(torch.cat([weight[4:], weight[:4]])),
    lambda weight: weight.mul_(weight[3:5].square().sum() + weight[0, 1, 2, 0]),
    lambda weight: weight[2:4].clone().mul_(2),  # a copy in one process, too
    lambda weight: (
        weight.add_(float(weight[1].full_tensor().numpy().sum()) + weight[2, 0, 0].full_tensor().tolist()[1])
        if isinstance(weight, DTensor)
        else weight.add_(float(weight[1].numpy().sum()) + weight[2, 0, 0].tolist()[1])
    ),
]


def _written() -> list[Tensor]:
    model: Any = ff.parallelize(_net(), mesh(1, 2), shard_parameters=True)
    found = []
    for write in TAKEN:
        with torch.no_grad():
            write(model.module.weight)
        found.append(whole_value(model.module.weight.detach()).clone())
    for write in REFUSED:
        with torch.no_grad(), pytest.raises(StrategyError, match="write to the whole, whole = parameter"):
            write(model.module.weight)
    assert torch.equal(whole_value(model.module.weight.detach()), found[-1])
    assert isinstance(model.module.weight[0].to_local(), CopiedPart)
    model.module.weight[0].sum().backward()
    with pytest.raises(StrategyError):
        torch.narrow(model.module.weight.square(), 0, 1, 2).zero_()
    found.append(whole_value(model.module.weight.grad))
    return found


def _net() -> nn.Conv2d:
    torch.manual_seed(0)
    return nn.Conv2d(3, 6, 3).double()


def test_rows() -> None:
    net, expected = _net(), []
    for write in TAKEN:
        with torch.no_grad():
            write(net.weight)
        expected.append(net.weight.detach().clone())
    net.weight[0].sum().backward()
    expected.append(net.weight.grad)  # type: ignore[arg-type]
    for found in rank_group(2).run(_written):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
