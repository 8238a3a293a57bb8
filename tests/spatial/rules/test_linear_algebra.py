"""Linear algebra of a small matrix at each pixel; norms of split matrices; a singular matrix on one rank."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, linalg

import fullframe as ff
from tests.exactness import mesh
from tests.rank_group import rank_group
from tests.spatial.cases import Case, Op, as_in_one_process, small
from tests.spatial.corners import Corners, corners_as_in_torch, noise, spoiled


def pixels(op: Op) -> Case:
    """`op` of symmetric, positive matrices (N, H, W, 3, 3), made of (N, 9, H, W)."""

    def run(x: Tensor) -> Any:
        half = x.permute(0, 2, 3, 1).unflatten(3, (3, 3))
        return op(half @ half.mT + torch.eye(3, dtype=x.dtype) * torch.tensor([1.0, 2, 4], dtype=x.dtype))

    return Case(run, ((2, 9),), sizes=((5, 7), (4, 3)))


SINGULAR, SUMS = ("nuc", 2, -2), ("fro", 1, -1, math.inf, -math.inf)
CASES: dict[str, Case] = {
    "inv": pixels(linalg.inv),
    "lstsq": pixels(lambda m: [t for d in ("gels", "gelsd") for t in linalg.lstsq(m[..., :2], m.cos(), driver=d)]),
    "lstsq of vectors": pixels(lambda m: linalg.lstsq(m[..., :2].detach(), m[..., 2].sin())[:3]),
    "lstsq, one without residuals": pixels(lambda m: [t * m.mean() for t in linalg.lstsq(
        m.detach()[..., :2] * (torch.arange(m.shape[2]) > 0)[:, None, None], m.detach(), driver="gelsd")]),
    "inverse": pixels(lambda m: m.inverse()),
    "det": pixels(linalg.det),
    "slogdet": pixels(linalg.slogdet),
    "logdet": pixels(torch.logdet),
    "cholesky": pixels(linalg.cholesky),
    "cholesky_ex": pixels(lambda m: linalg.cholesky_ex(m).L),
    "eigvalsh": pixels(linalg.eigvalsh),
    "eigh": pixels(lambda m: linalg.eigh(m).eigenvectors.abs()),
    "svd": pixels(lambda m: linalg.svd(m).S),
    "svdvals": pixels(lambda m: linalg.svdvals(m[..., :2])),
    "qr": pixels(linalg.qr),
    "qr without q": pixels(lambda m: linalg.qr(m.detach(), mode="r").R * m.mean()),
    "lu": pixels(linalg.lu),
    "lu_factor": pixels(linalg.lu_factor),
    "matrix_exp": pixels(lambda m: linalg.matrix_exp(m * 0.1)),
    "matrix_power": pixels(lambda m: linalg.matrix_power(m, -2)),
    "pinv": pixels(lambda m: linalg.pinv(m[..., :2])),
    "cond": pixels(lambda m: linalg.cond(m)),
    "solve": pixels(lambda m: linalg.solve(m, m[..., :2].sin())),
    "solve of vectors": pixels(lambda m: linalg.solve(m, m[..., 0].sin())),
    "solve of one right side": Case(lambda x, b: linalg.solve(x.permute(2, 3, 0, 1), b), ((3, 3),), ((3, 2),),
        ((5, 7),)),
    "solve by one matrix": Case(lambda x, a: linalg.solve(a, x.permute(0, 2, 3, 1)[..., None]), ((2, 3),), ((3, 3),),
        ((5, 7),)),
    "solve by one matrix, of many right sides": Case(lambda x, a: linalg.solve(a, x.flatten(2)), ((2, 3),), ((3, 3),),
        ((5, 7),)),
    "solve_triangular of many right sides": Case(lambda x, a: [
        linalg.solve_triangular(a, x[0].flatten(1), upper=False),
        linalg.solve_triangular(a, x.flatten(2).mT, upper=True, left=False, unitriangular=True)], ((2, 3),), ((3, 3),),
        ((5, 7),)),
    "solve_triangular": pixels(lambda m: linalg.solve_triangular(m, m.sin(), upper=True)),
    "cholesky_solve": pixels(lambda m: torch.cholesky_solve(m.sin(), linalg.cholesky(m))),
    "cross": pixels(lambda m: linalg.cross(m[..., 0], m[..., 1])),
    **{f"matrix_norm {p}": pixels(lambda m, p=p: linalg.matrix_norm(m, p)) for p in (*SINGULAR, *SUMS)},
    **{f"matrix_norm {p} of the image": small(lambda x, p=p: linalg.matrix_norm(x, p)) for p in SUMS},
    "matrix_norm of other dims": small(lambda x: linalg.matrix_norm(x, 1, (3, 1), True)),
    "nuclear norm of other dims": pixels(lambda m: linalg.matrix_norm(m, "nuc", (-1, -2), True)),
    "norm": small(lambda x: linalg.norm(x)),
    "norm of 3 along rows": small(lambda x: linalg.norm(x, 3, 2)),
    "norm of a matrix": small(lambda x: linalg.norm(x[0, 0], math.inf)),
}  # fmt: skip
CORNERS = Corners()


def _inverses(x: Tensor) -> Tensor:
    return linalg.inv_ex(x.permute(0, 2, 3, 1).unflatten(3, (2, 2))).inverse


for value in (math.inf, math.nan):
    CORNERS.add(f"det {value}", lambda x: linalg.det(x.permute(0, 2, 3, 1).unflatten(3, (2, 2))),
        [spoiled(1, 4, 5, 3, value=value)])  # fmt: skip
CORNERS.add("few", _inverses, [noise(1, 4, 2, 3)])
CORNERS.add("no pixels", lambda x: linalg.det(x.permute(0, 2, 3, 1).unflatten(3, (2, 2))[:0]), [noise(1, 4, 5, 7)])


test_as_in_one_process = as_in_one_process(__name__, CASES)
test_corners = corners_as_in_torch(__name__)


def _singular(height: int, width: int) -> bool:
    x = noise(1, 4, 6, 6)
    x[:, :, 5, 5] = 0  # on the last rank alone
    matrices = ff.shard(x, mesh(height, width)).permute(0, 2, 3, 1).unflatten(3, (2, 2))
    with pytest.raises(torch.linalg.LinAlgError):
        linalg.inv(matrices)
    return True


def test_a_singular_matrix_on_one_rank_is_an_error_on_all() -> None:
    assert rank_group(2).run(_singular, 1, 2) == [True] * 2


def _refused(height: int, width: int) -> None:
    with pytest.raises(ff.UnsupportedOp, match="whole matrices"):
        linalg.inv(ff.shard(noise(2, 2, 6, 6), mesh(height, width)))


def test_split_matrices_are_refused() -> None:
    rank_group(2).run(_refused, 2, 1)
