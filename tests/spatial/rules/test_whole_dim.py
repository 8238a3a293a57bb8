"""What needs a whole dim: sorting, cumulative products, differences."""

import pytest
import torch
import torch.nn.functional as F

import fullframe as ff
from tests.exactness import mesh
from tests.rank_group import rank_group
from tests.spatial.cases import Case, Op, one, require_the_numbers_of_one_process
from tests.spatial.values import HALF_KINDS, floats, halves, on_all_meshes

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


def _refused() -> int:
    split = ff.shard(torch.ones(1, 1, 3, 4), mesh(1, 2))
    with pytest.raises(ff.UnsupportedOp):
        F.prelu(torch.ones(1, 4), split.view(3, 4)[0])
    return 1


def test_a_split_weight_of_a_whole_operand_is_refused_by_name() -> None:
    assert rank_group(2).run(_refused) == [1, 1]
