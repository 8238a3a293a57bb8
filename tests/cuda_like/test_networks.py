"""Networks on the CUDA-like device, split over two ranks: loss and gradients are those of one process on the CPU."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullframe as ff
from tests.cuda_like.device import TestsOnDevice, counted, to_device, to_host
from tests.cuda_like.models import moved
from tests.cuda_like.ranks import device_ranks
from tests.exactness import mesh, relative
from tests.models.matching_networks import ConvexStereo, TokenEncoder
from tests.models.networks import FPN, UNet

TOLERANCE = 1e-9
NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {  # and how many images it takes
    "UNet": (UNet, 1),
    "FPN": (FPN, 1),
    "tokens": (TokenEncoder, 1),
    "stereo": (ConvexStereo, 2),
}


def _loss(model: nn.Module, images: list[Tensor]) -> Tensor:
    given = model(*images)
    outputs = given if isinstance(given, list) else [given]
    outputs = [t for output in outputs for t in (output if isinstance(output, tuple) else (output,))]
    return torch.stack([(t - 0.5).square().mean() for t in outputs]).sum()


def _differences(network: str) -> tuple[dict[str, float], list[str]]:
    build, images = NETWORKS[network]
    torch.manual_seed(0)
    plain = build().double()
    torch.manual_seed(0)
    split = ff.parallelize(moved(build().double()), mesh(1, 2), average_gradients=False)
    whole = [torch.randn(1, 3, 50, 76, dtype=torch.float64) for _ in range(images)]
    here = _loss(plain, whole)
    here.backward()
    with TestsOnDevice(), counted() as counts:
        there = _loss(split, [ff.shard(to_device(image), mesh(1, 2), check=False) for image in whole])
        there.backward()
    found = {"loss": relative(here.detach(), to_host(there))}
    for (name, a), b in zip(plain.named_parameters(), split.module.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None, name
        mean = to_host(b.grad).clone()
        dist.all_reduce(mean)
        found[name] = relative(a.grad, mean / dist.get_world_size(), 1e-3)
    return found, [f"{what}, {line}" for what, line in counts.faults]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("network", NETWORKS)
def test_the_numbers_are_those_of_one_process(network: str) -> None:
    for found, faults in device_ranks().run(_differences, network):
        assert len(found) > 10
        assert {name: error for name, error in found.items() if not error <= TOLERANCE} == {}
        assert not faults
