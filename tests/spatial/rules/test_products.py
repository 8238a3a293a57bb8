"""Products of split vectors and matrices: contractions of whole and split dims, blocks, infinities."""

import math

import torch
from torch import Tensor

from tests.spatial.cases import Case, as_in_one_process, small
from tests.spatial.corners import Corners, corners_as_in_torch, noise, spoiled

ONE = ((7, 11),)
CASES: dict[str, Case] = {
    "tensordot of both image dims": small(lambda x: torch.tensordot(x, x.sin(), ([2, 3], [2, 3]))),
    "tensordot of 2": small(lambda x: torch.tensordot(x, x[0].permute(1, 2, 0).cos(), 2)),
    "tensordot with a whole one": Case(lambda x, w: torch.tensordot(x, w, ([1], [0])), whole=((4, 3),), sizes=ONE),
    "inner": small(lambda x: torch.inner(x[0], x[0, 0].cos())),
    "dot": small(lambda x: torch.dot(x[0, 0, 0], x[1, 1, 1]) * torch.vdot(x[0, 0, 0], x[1, 1, 1])),
    "vecdot": small(lambda x: torch.linalg.vecdot(x, x[:1].cos())),
    "vecdot of rows": small(lambda x: torch.linalg.vecdot(x, x.cos(), dim=2)),
    "outer": small(lambda x: torch.outer(x[0, 0, 0], x[0, 0, :, 0])),
    "addr": Case(lambda x, u, v: torch.addr(x[0, 0], u, v, beta=0.5, alpha=3), whole=((7,), (11,)), sizes=ONE),
    "addmv": Case(lambda x, b, v: torch.addmv(b, x[0, 0], v, beta=2), whole=((7,), (11,)), sizes=ONE),
    "addbmm": Case(lambda x, b, v: torch.addbmm(b, x[0], v, alpha=2), whole=((7, 5), (4, 11, 5)), sizes=ONE),
    "multi_dot": small(lambda x: torch.linalg.multi_dot([x[0, 0], x[0, 1].T, x[0, 2]])),
    "multi_dot of five and a vector": small(
        lambda x: torch.linalg.multi_dot([x[0, 0], x[0, 1].T, x[0, 2], x[1, 0].T, x[1, 1], x[1, 2, 0]])),
    "kron": Case(lambda x, w: torch.kron(x, w), whole=((2, 3),), sizes=ONE),
    "kron from the left": Case(lambda x, w: torch.kron(w, x), whole=((2, 3),), sizes=ONE),
    "block_diag": Case(lambda x, w: torch.block_diag(x[0, 0], w, x[0, 1, 0]), whole=((2, 3),), sizes=ONE),
}  # fmt: skip
CORNERS = Corners()


def _blocks(x: Tensor) -> Tensor:
    return torch.block_diag(x[0, 0], x[0, 1])


for value in (math.inf, math.nan):
    CORNERS.add(f"kron {value}", torch.kron, [spoiled(1, 2, 3, 5, value=value)], [noise(2, 2)])
    CORNERS.add(f"blocks {value}", _blocks, [spoiled(1, 2, 3, 5, value=value)])
CORNERS.add("integers", lambda x: torch.addr(x[0, 0], x[0, 0, :, 0], x[0, 0, 0], alpha=2), [noise(1, 1, 5, 6).long()])


test_as_in_one_process = as_in_one_process(__name__, CASES)
test_corners = corners_as_in_torch(__name__)
