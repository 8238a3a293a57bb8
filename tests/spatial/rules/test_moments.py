"""Variance, norms, logsumexp: infinities, NaN, zeros, short floats."""

import torch
import torch.nn.functional as F

from tests.spatial.cases import Case, Op, as_in_one_process, one
from tests.spatial.values import as_in_torch, inf

ORDERS = (2, 1, 0, inf, -inf, 3, 1.5, 0.5, -1, -2)


CASES: dict[str, Case] = {
    "var, std": one(
        lambda x: [x.var(), x.std((2, 3)), x.var(1, correction=0), *torch.var_mean(x, (1, 2), keepdim=True)]
    ),
    "norms": one(lambda x: [x.norm(), x.norm(p=1, dim=2), x.norm(dim=1), torch.linalg.vector_norm(x, 3, (2, 3))]),
    "logsumexp": one(lambda x: [x.logsumexp((2, 3)), x.logsumexp(1)]),
    "vector norm of order 0": one(lambda x: torch.linalg.vector_norm(x, 0, (1, 3)) * x.sum()),
}  # fmt: skip
OVER_FLOATS: dict[str, Op] = {
    "var": lambda x: [x.var((2, 3)), x.var(), x.var(3, correction=0), x.var(2, correction=7), x.var(correction=900)],
    "std": lambda x: [x.std((2, 3)), x.std(), x.std(3, correction=0), x.std(1), x.std(2, keepdim=True)],
    "var_mean": lambda x: [*torch.var_mean(x, (2, 3)), *torch.var_mean(x.roll(-1, 3), 3),
                           *torch.std_mean(x, 3, keepdim=True), *torch.std_mean(x)],
    "norms over a dim": lambda x: [torch.linalg.vector_norm(x, p, 3) for p in ORDERS],
    "norms over the plane": lambda x: [torch.linalg.vector_norm(x, p, (2, 3), True) for p in ORDERS],
    "norms": lambda x: [x.norm(), x.norm(p=1, dim=2), x.norm(3), x.norm(inf), x.dist(x * 0.5), x.dist(x, 1)],
    "logsumexp": lambda x: [x.logsumexp((2, 3)), x.logsumexp(3, True), x.logsumexp(1)],
}  # fmt: skip
HALVES: dict[str, Op] = {
    "spread": lambda x: [x.var((2, 3)), x.std(3), *torch.var_mean(x, 2), *torch.std_mean(x)],
    "norms": lambda x: [x.norm(), x.norm(3, 3), x.norm(1, 2), x.norm(inf), x.norm(0), x.dist(x * 0.5),
                        torch.linalg.vector_norm(x, 2, (2, 3), dtype=torch.float32), F.normalize(x, dim=3),
                        F.pairwise_distance(x, x * 0.5)],
}  # fmt: skip

test_as_in_one_process = as_in_one_process(__name__, CASES)
test_unusual_values_and_dtypes_as_in_torch = as_in_torch(__name__, OVER_FLOATS, HALVES)
