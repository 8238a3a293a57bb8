"""Likeness and distance of vectors: along whole and split dims, of zero vectors, of points that coincide."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.spatial.cases import Case, as_in_one_process, one, small
from tests.spatial.corners import BF16, Corners, corners_as_in_torch, noise, spoiled

CASES: dict[str, Case] = {
    **{f"cosine_similarity of dim {n}": small(lambda x, n=n: F.cosine_similarity(x, x[:1].cos(), n)) for n in range(4)},
    "cosine_similarity of a broadcast dim": small(lambda x: F.cosine_similarity(x, x[:, :, :, :1].cos(), 3)),
    "cosine_similarity with a whole one": Case(lambda x, w: F.cosine_similarity(x, w, -1), whole=((11,),),
        sizes=((7, 11),)),
    **{f"glu of dim {n}": Case(lambda x, n=n: F.glu(x, n), sizes=((6, 14), (10, 22))) for n in range(4)},
    "local_response_norm": one(lambda x: F.local_response_norm(x, 3)),
    **{f"local_response_norm of split channels {n}": small(lambda x, n=n: F.local_response_norm(x[0], n, 0.1, 0.7, 2))
       for n in (1, 2, 3)},
    "local_response_norm of split channels, 5 dims": small(
        lambda x: F.local_response_norm(x.permute(1, 3, 0, 2)[..., None], 4, 0.1)),
    "normalize": one(lambda x: [F.normalize(x), F.normalize(x, dim=3)]),
    "pairwise_distance": small(lambda x: F.pairwise_distance(x, x.cos(), 3.0)),
    "cdist": small(lambda x: torch.cdist(x, x.cos())),
    "cdist of 1": small(lambda x: torch.cdist(x, x[:1].cos(), 1.0)),
    "cdist to whole ones": Case(lambda x, w: torch.cdist(x, w, 3.0), whole=((5, 11),), sizes=((7, 11),)),
    "cdist from whole ones": Case(lambda x, w: torch.cdist(w, x), whole=((4, 5, 11),), sizes=((7, 11),)),
    "cdist of many": Case(lambda x: torch.cdist(x, x.cos()), sizes=((30, 5),)),
    "pdist": small(lambda x: [
        F.pdist(x[0, 0]), torch.pdist(x[0].flatten(1).mT, 1.5), F.pdist(x[0, :1, 0].expand(3, -1))]),
}  # fmt: skip
CORNERS = Corners()


def _near_zero(x: Tensor, dim: int) -> Tensor:
    return F.cosine_similarity(x * 1e-9, x.cos() * 1e-9, dim)


for dim in (1, 2, 3):
    CORNERS.add(f"shorter than eps along {dim}", lambda x, d=dim: _near_zero(x, d), [noise(1, 2, 5, 7)])
    for value in (math.inf, math.nan, 0.0):
        x = spoiled(1, 2, 5, 7, value=value)
        CORNERS.add(f"cosine {value} along {dim}", lambda x, d=dim: F.cosine_similarity(x, x.cos(), d), [x])
    CORNERS.add(f"cosine of zeros along {dim}", lambda x, d=dim: F.cosine_similarity(x * 0, x, d), [noise(1, 2, 5, 7)])
    CORNERS.add(
        f"cosine 16 bit {dim}", lambda x, d=dim: F.cosine_similarity(x, x.cos(), d), [noise(1, 2, 5, 7, dtype=BF16)]
    )
for value in (math.inf, math.nan):
    x = spoiled(1, 2, 5, 7, value=value)
    CORNERS.add(f"largest differences with {value}", lambda x: F.pdist(x[0, 0], math.inf), [x])
    CORNERS.add(f"powers of {value}", lambda x: torch.linalg.vander(x, N=4), [x])
CORNERS.add("points that coincide", lambda x: torch.cdist(x, x), [noise(1, 2, 5, 7)])
CORNERS.add("few", lambda x: torch.cdist(x, x[:, :, :1]), [noise(1, 2, 2, 3)])
CORNERS.add("glu few", lambda x: F.glu(x, 3), [noise(1, 2, 2, 4)])


test_as_in_one_process = as_in_one_process(__name__, CASES)
test_corners = corners_as_in_torch(__name__)
