"""Adaptive pooling: windows that several ranks see, ties, infinities, integers, and what is kept and made of it."""

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fullframe as ff
from fullframe.simulation.fake.world import fake_job
from fullframe.spatial.tensor import wrap
from tests.spatial.cases import Case, as_in_one_process, one
from tests.spatial.corners import F64, ODD, Corners, corners_as_in_torch, deep, flat, noise, spoiled

CASES: dict[str, Case] = {
    "adaptive_avg_pool 1": one(lambda x: F.adaptive_avg_pool2d(x, 1)),
    "adaptive_avg_pool 7": one(lambda x: F.adaptive_avg_pool2d(x, 7)),
    "adaptive_avg_pool (3, 5)": one(lambda x: F.adaptive_avg_pool2d(x, (3, 5))),
    "adaptive_avg_pool (None, 2)": one(lambda x: F.adaptive_avg_pool2d(x, (None, 2))),
    "adaptive_avg_pool (2, None)": one(lambda x: F.adaptive_avg_pool2d(x, (2, None))),
    "adaptive_avg_pool of tokens 1": one(lambda x: F.adaptive_avg_pool1d(x.flatten(2), 1)),
    "adaptive_avg_pool of tokens 5": one(lambda x: F.adaptive_avg_pool1d(x.flatten(2), 5)),
    "adaptive_max_pool 1": one(lambda x: F.adaptive_max_pool2d(x, 1)),
    "adaptive_max_pool (4, 6)": one(lambda x: F.adaptive_max_pool2d(x.relu(), (4, 6))),
}
CORNERS = Corners()


def adaptive() -> None:
    for value in (math.inf, math.nan):
        x = spoiled(*ODD, value=value)
        for sizes in ((5, 7), (1, 7), (2, 1), (1, 1), (13, 4), (9, 9)):
            for pool in (F.adaptive_avg_pool2d, F.adaptive_max_pool2d):
                op = partial(pool, output_size=sizes)
                CORNERS.add(f"{pool.__name__} {sizes} {value}", op, [x])


def over_all_rows() -> None:
    """Windows that several ranks see whole, as where a pool is written with the map's own size."""
    low = torch.full(ODD, -math.inf, dtype=F64)
    low[..., 9:, 9:] = 1
    maps = {
        "ties": noise(*ODD).relu().round(),
        "zero": noise(*ODD).clamp(max=0),
        "low": low,
        "spoiled": spoiled(*ODD, value=math.nan),
    }
    for name, x in maps.items():
        for kernel in ((13, 11), (1, 11), (13, 1), (13, 3)):
            for indexed in (False, True):
                op = partial(F.max_pool2d, kernel_size=kernel, stride=kernel, return_indices=indexed)
                CORNERS.add(f"max {kernel} {indexed} of {name}", op, [x])
            CORNERS.add(f"average {kernel} of {name}", partial(F.avg_pool2d, kernel_size=kernel), [x])
        for sizes in ((2, 2), (3, 1), (1, 3)):
            op = partial(F.adaptive_max_pool2d, output_size=sizes, return_indices=True)
            CORNERS.add(f"adaptive max {sizes} of {name}", op, [x])
        volume = deep(partial(F.max_pool3d, kernel_size=(1, 13, 11), return_indices=True))
        CORNERS.add(f"max 3d of {name}", volume, [x])
        CORNERS.add(f"max 1d of {name}", flat(partial(F.max_pool1d, kernel_size=11)), [x])
    numbers = (noise(*ODD) * 50).to(torch.int32)
    CORNERS.add("max over all integers", partial(F.max_pool2d, kernel_size=(13, 11)), [numbers])
    CORNERS.add("average over all integers", partial(F.avg_pool2d, kernel_size=(13, 11)), [numbers.long()])
    CORNERS.add("over all, 4", partial(F.avg_pool2d, kernel_size=(13, 11), divisor_override=4), [noise(*ODD)])
    CORNERS.add("over all, few", partial(F.max_pool2d, kernel_size=(3, 4)), [noise(1, 2, 3, 4)])


adaptive()
over_all_rows()


test_as_in_one_process = as_in_one_process(__name__, CASES)
test_corners = corners_as_in_torch(__name__)


GLOBAL: dict[str, Any] = {
    "adaptive max": lambda x: F.adaptive_max_pool2d(x, 1),
    "adaptive max, 3": lambda x: F.adaptive_max_pool2d(x, 3),
    "max": lambda x: F.max_pool2d(x, (x.shape[2], x.shape[3])),
    "average": lambda x: F.avg_pool2d(x, (x.shape[2], x.shape[3])),
    "average of tokens": lambda x: F.adaptive_avg_pool1d(x.flatten(2), 1),
}


class _Largest(TorchDispatchMode):
    """Elements of the largest tensor that an op inside gives."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        made = [t.numel() for t in tree_leaves(found) if isinstance(t, torch.Tensor)]
        self.elements = max([self.elements, *made])
        return found


@pytest.mark.parametrize("name", GLOBAL)
def test_a_window_over_all_rows_makes_no_map_whole(name: str) -> None:
    with fake_job(1, 4):
        x = ff.shard(torch.randn(2, 4, 16, 64), ff.init_mesh(width=4), check=False)
        source = x.local.detach().requires_grad_()
        with _Largest() as largest:
            GLOBAL[name](wrap(source * 1, x.spec)).sum().backward()
    assert largest.elements == source.numel()
