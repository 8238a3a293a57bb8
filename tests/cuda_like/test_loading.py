"""Data sets that keep their samples on the device."""

import torch
from torch import Tensor
from torch.utils.data import DataLoader

import fullframe as ff
from tests.cuda_like.device import to_device, to_host
from tests.cuda_like.ranks import device_ranks
from tests.exactness import mesh


def images() -> list[Tensor]:
    return list(torch.arange(4.0 * 3 * 5 * 7).view(4, 3, 5, 7))


def loaded() -> list[Tensor]:
    loader = ff.ShardedLoader(DataLoader(list(map(to_device, images())), 2), mesh(1, 2))  # type: ignore[arg-type]
    return [to_host(batch.full()) for batch in loader]


def test_samples_on_the_device_are_cut_too() -> None:
    expected = list(torch.stack(images()).split(2))
    for found in device_ranks().run(loaded):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
