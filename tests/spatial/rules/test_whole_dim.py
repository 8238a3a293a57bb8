"""What needs a whole dim: sorting, cumulative products, differences, tables of embeddings."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fullframe as ff
from tests.exactness import mesh
from tests.rank_group import rank_group
from tests.spatial.cases import Case, Op, one, require_the_numbers_of_one_process
from tests.spatial.values import HALF_KINDS, SHAPE, floats, found, halves, on_all_meshes, scores

CASES: dict[str, Case] = {
    "normalize": one(lambda x: [F.normalize(x), F.normalize(x, dim=3)]),
    "diff, dist": one(lambda x: [x.diff(), x.diff(n=2, dim=2), x.dist(x.sin()), x.diff(dim=1)]),
    "sort, topk over channels": one(lambda x: [*x.sort(1), *x.topk(2, 1), x.argsort(1)]),
    "more differences than rows": one(lambda x: x.diff(9, 1)),
}  # fmt: skip
OVER_FLOATS: dict[str, Op] = {
    "along whole dims": lambda x: [x.cumprod(1), x.logcumsumexp(1), *x.sort(1), *torch.sort(x, dim=1, stable=True),
                                   *x.sort(1, True), *x.sort(descending=True, dim=0, stable=True), x.argsort(1),
                                   torch.argsort(x, stable=True, dim=1), x.msort(), *x.topk(2, 1), F.glu(x, 0)],
}  # fmt: skip
HALVES: dict[str, Op] = {
    "distances": lambda x: [F.normalize(x, dim=3), F.pairwise_distance(x, x * 0.5)],
}  # fmt: skip
ALONG: dict[str, Op] = {
    "one_hot": lambda x, w: [F.one_hot(_indices(x), 6), F.one_hot(_indices(x))],
    "embedding by frequency": lambda x, w: F.embedding(_indices(x), w, padding_idx=-2, scale_grad_by_freq=True),
    "embedding of a largest norm": lambda x, w: _shortened(_indices(x), w.detach().clone()),
}


def _indices(x: Tensor) -> Tensor:
    return (x[:, 0].detach().abs() * 7).long() % 5


def _shortened(indices: Tensor, table: Tensor) -> list[Tensor]:
    return [F.embedding(indices, table, max_norm=0.5, norm_type=3), table]


@pytest.mark.parametrize("name", CASES)
def test_as_in_one_process(name: str) -> None:
    require_the_numbers_of_one_process(__name__, name)


@pytest.mark.parametrize("name", OVER_FLOATS)
def test_infinities_nan_ties_and_zeros_go_through_as_in_torch(name: str) -> None:
    assert not on_all_meshes(floats, __name__, name)


@pytest.mark.parametrize("kind", HALF_KINDS)
@pytest.mark.parametrize("name", HALVES)
def test_short_floats_are_added_up_as_widely_as_in_torch(name: str, kind: str) -> None:
    assert not on_all_meshes(halves, __name__, name, kind)


def _along(name: str, world: int) -> list[str]:
    return found({name: (ALONG[name], [scores(*SHAPE)], [scores(5, 4)])}, 1e-12, world)


@pytest.mark.parametrize("name", ALONG)
def test_functions_along_a_dim(name: str) -> None:
    assert not on_all_meshes(_along, name)


def _refused() -> int:
    split = ff.shard(torch.ones(1, 1, 3, 4), mesh(1, 2))
    calls = [
        lambda: F.prelu(torch.ones(1, 4), split.view(3, 4)[0]),
        lambda: F.embedding(torch.ones(2).long(), split[0, 0]),
    ]
    for call in calls:
        with pytest.raises(ff.UnsupportedOp):
            call()
    return len(calls)


def test_a_split_weight_or_table_of_a_whole_operand_is_refused_by_name() -> None:
    assert rank_group(2).run(_refused) == [2, 2]
