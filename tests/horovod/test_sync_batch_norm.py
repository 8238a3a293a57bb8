"""SyncBatchNorm on 2 ranks with unequally many samples against batch norm of the whole batch, in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullframe.horovod as hvd
from tests.rank_group import rank_group

SPLIT = (3, 2)  # samples of each rank


def data(dims: int) -> Tensor:
    generator = torch.Generator().manual_seed(dims)
    return torch.randn(sum(SPLIT), 4, *(5, 3)[: dims - 2], generator=generator, dtype=torch.float64)


def step(module: nn.Module, x: Tensor) -> Tensor:
    out = module(x)
    weights = torch.linspace(1, 2, x[0].numel(), dtype=torch.float64).view(x[0].shape)
    (out * out * weights).sum().backward()
    return out


def on_rank(dims: int, options: dict[str, Any]) -> tuple[Any, ...]:
    hvd.init()
    module = hvd.SyncBatchNorm(4, **options).double()
    for _ in range(2):
        x = data(dims).split(SPLIT)[hvd.rank()].clone().requires_grad_()
        module.zero_grad()
        out = step(module, x)
    parameters = [hvd.allreduce(parameter.grad, op=hvd.Sum) for parameter in module.parameters()]
    module.eval()
    found = out.detach(), x.grad, parameters, dict(module.state_dict()), module(x).detach()
    hvd.shutdown()
    return found


@pytest.mark.parametrize("dims", [2, 3, 4])
@pytest.mark.parametrize(
    "options", [{}, {"affine": False}, {"momentum": None}, {"track_running_stats": False}], ids=str
)
def test_the_numbers_are_those_of_the_whole_batch(dims: int, options: dict[str, Any]) -> None:
    module = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[dims](4, **options).double()
    for _ in range(2):
        x = data(dims).requires_grad_()
        module.zero_grad()
        out = step(module, x)
    grads, state = [parameter.grad for parameter in module.parameters()], dict(module.state_dict())
    module.eval()
    evaluated = module(x).detach()
    found = rank_group(2).run(on_rank, dims, options)
    close = {"rtol": 1e-9, "atol": 1e-11}
    torch.testing.assert_close(torch.cat([rank[0] for rank in found]), out.detach(), **close)
    torch.testing.assert_close(torch.cat([rank[1] for rank in found]), x.grad, **close)
    for _, _, parameters, buffers, _ in found:
        torch.testing.assert_close(parameters, grads, **close)
        torch.testing.assert_close(buffers, state, **close)
    if module.track_running_stats:
        torch.testing.assert_close(torch.cat([rank[4] for rank in found]), evaluated, **close)
