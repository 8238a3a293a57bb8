"""Fractional max pooling: the windows that one process draws."""

import torch
import torch.nn.functional as F

from tests.spatial.cases import Case, as_in_one_process, one, small

DRAWS = torch.rand(2, 4, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

CASES: dict[str, Case] = {
    "drawn": one(lambda x: F.fractional_max_pool2d(x, 2, output_ratio=(0.6, 0.7)).sin()),
    "given": small(lambda x: F.fractional_max_pool2d(x, (2, 3), (4, 5), _random_samples=DRAWS)),
    "split draws": Case(
        lambda x, w: F.fractional_max_pool2d(w, 2, 3, _random_samples=x[:1, :, :2, 0].detach().sigmoid()),
        whole=((1, 4, 7, 9),), sizes=((7, 11),)),
    "places": small(lambda x: F.fractional_max_pool2d(x, 2, 3, return_indices=True)),
    "too small": small(lambda x: F.fractional_max_pool2d(x, 3, (1, 2))),
    "no batch": small(lambda x: [F.fractional_max_pool2d(x[0], 2, 3), torch.nn.FractionalMaxPool2d(2, 4)(x[:1, :1])]),
    "volumes": Case(lambda x: F.fractional_max_pool3d(x, 2, (2, 3, 4), return_indices=True), ((2, 2, 5),),
                    sizes=((7, 11),)),
}  # fmt: skip

test_as_in_one_process = as_in_one_process(__name__, CASES)
