"""In which order backward runs on a device: the same on all ranks, whatever else each of them has computed."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullframe as ff
from tests.cuda_like.device import to_device, to_host
from tests.cuda_like.models import moved
from tests.cuda_like.ranks import device_ranks
from tests.exactness import mesh


def penalty(network: nn.Module, x: Tensor) -> Tensor:
    out = network(x)
    loss = out.square().mean() + out.sin().std()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + gradient.square().sum()


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.SiLU(), nn.Conv2d(4, 1, 3, padding=1)
    return nn.Sequential(*layers).double()


def image() -> Tensor:
    return torch.randn(2, 3, 12, 22, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def gradients(more: int) -> list[Any]:
    """Of a penalty on a gradient, where the first rank has made `more` nodes of graphs that the other has not."""
    on = mesh(1, 2)
    one = torch.ones((), requires_grad=True)
    for _ in range(more if dist.get_rank() == 0 else 0):
        one * 2
    split = moved(network())
    model = ff.parallelize(split, on)
    penalty(model, ff.shard(to_device(image()).requires_grad_(), on)).backward()
    return [to_host(parameter.grad) for parameter in split.parameters() if parameter.grad is not None]


def test_ranks_that_have_made_other_nodes_run_one_order() -> None:
    plain = network()
    penalty(plain, image().requires_grad_()).backward()
    expected = [parameter.grad for parameter in plain.parameters()]
    for more in (0, 100, 200, 400):
        for found in device_ranks().run(gradients, more):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
