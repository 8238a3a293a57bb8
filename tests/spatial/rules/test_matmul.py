"""Linear, matmul, einsum."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.spatial.cases import Case, as_in_one_process, one
from tests.spatial.rules.test_convolution import at_two_pixels


def ones(x: Tensor) -> Tensor:
    return torch.ones_like(x, dtype=torch.uint8)


def by_its_own(x: Tensor) -> Tensor:
    """Weights and a bias from the image at two places."""
    weight = at_two_pixels(x)
    return F.linear(x.permute(0, 2, 3, 1), weight, weight[:, 0])


CASES: dict[str, Case] = {
    "einsum channels": Case(lambda x, w: torch.einsum("nchw,cd->nhwd", x, w), whole=((4, 3),)),
    "einsum over pixels": one(lambda x: torch.einsum("nchw,ndhw->ncd", x, x.sin())),
    "einsum of short integers": one(
        lambda x: [torch.einsum(f"c{a}{b},d->{a}d", ones(x[0, :1, :h, :w]), ones(x[0, 0, 0, :3])) * x.sum()
                   for a, b, h, w in (("h", "w", 2, 3), ("w", "h", 3, 2))]),
    "linear by what a mask picks": Case(by_its_own),
    "matmul of rows": Case(lambda x, w: x.permute(0, 2, 3, 1) @ w, whole=((4, 3),)),
    "bilinear": Case(
        lambda x, y, w, b: F.bilinear(x.permute(0, 2, 3, 1), y.permute(0, 2, 3, 1), w, b),
        split=((2, 4), (2, 3)), whole=((5, 4, 3), (5,))),
    "bilinear by split weights": Case(lambda x, y, z: F.bilinear(y, z, x[0, :, :3, :4]), whole=((5, 3), (5, 4))),
    "bilinear of split channels": Case(lambda x, y, w: F.bilinear(x[..., :11], y[..., :9], w),
        split=((2, 4), (2, 4)), whole=((5, 11, 9),)),
    "gram matrix": one(lambda x: x.flatten(2) @ x.flatten(2).transpose(1, 2)),
    "linear over a split dim": Case(lambda x, w: F.linear(x, w[:, : x.shape[3]]), whole=((3, 64),)),
    "a matrix of no rows": one(lambda x: torch.zeros(0, x.shape[2], dtype=x.dtype) @ x[0, 0] * 2),
}  # fmt: skip

test_as_in_one_process = as_in_one_process(__name__, CASES)
