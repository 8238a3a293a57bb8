"""Libraries that take their functions from the package of an array's type."""

from importlib import import_module

import torch

import fullframe as ff
from tests.exactness import mesh
from tests.rank_group import rank_group


def _contracted() -> list[float]:
    x, w = (torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) for shape in SHAPES)
    split = ff.shard(x, mesh(1, 2))
    package = import_module(type(split).__module__.partition(".")[0])  # as opt_einsum finds it
    found = [
        package.einsum("bchw,cd->bdhw", split, w).full() - torch.einsum("bchw,cd->bdhw", x, w),
        package.tensordot(split, w, axes=((1,), (0,))).full() - torch.tensordot(x, w, ([1], [0])),
        package.transpose(split, (0, 2, 3, 1)).full() - x.permute(0, 2, 3, 1),
    ]
    return [float(difference.abs().max()) for difference in found]


SHAPES = (2, 3, 5, 7), (3, 4)


def test_a_split_tensors_package_contracts() -> None:
    for found in rank_group(2).run(_contracted):
        assert max(found) < 1e-12
