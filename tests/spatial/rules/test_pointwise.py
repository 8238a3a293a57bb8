"""Pointwise ops and operands with other boundaries."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fullframe as ff
from tests.exactness import mesh
from tests.rank_group import rank_group
from tests.spatial.cases import Case, as_in_one_process, one


def squeeze_excite(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return x * F.conv2d(x.mean((2, 3), keepdim=True), w, b).sigmoid()


CASES: dict[str, Case] = {
    "squeeze-excite": Case(squeeze_excite, whole=((4, 4, 1, 1), (4,))),
    "full-size whole operand": Case(lambda x, y: x * y[: x.shape[2], : x.shape[3]], whole=((80, 80),)),
    "whole operand on the left": Case(lambda x, y: 1 - y[:, None, None] * x / (2 + x.abs()), whole=((4,),)),
    "shifted difference": one(lambda x: (x[..., 1:] - x[..., :-1]).abs()),
    "shifted twice": one(lambda x: x[:, :, 2:, :-3] * x[:, :, :-2, 3:]),
    "where": one(lambda x: torch.where(x > 0, x, x.mean())),
    "in place": one(lambda x: (x * 1).add_(1).mul_(2).clamp_(-1, 1)),
    "in place with a shifted map": one(lambda x: (x[..., 1:] * 1).add_(x[..., :-1])),
    "clamp, lerp, addcmul": one(lambda x: torch.addcmul(x.clamp(-1, 1), x, x).lerp(x, 0.3)),
    "relu in place": one(lambda x: F.relu(x * 1, inplace=True)),
    "operands split along different dims": one(lambda x: x[..., : x.shape[2]] * x[..., : x.shape[2]].transpose(2, 3)),
    "whole tensors meet split ones": Case(
        lambda x, y: [y.expand_as(x) + x, y.to(x), y.type_as(x) * 2, x.to(y)], whole=((1, 1, 1, 1),)
    ),
    "special functions": one(lambda x: [torch.special.entr(x.abs()), torch.polygamma(1, x.abs() + 1), torch.gcd(
        (x * 9).long(), torch.tensor(6)), torch.special.xlog1py(x, x.abs())]),
}  # fmt: skip


def _refused() -> int:
    split = ff.shard(torch.ones(1, 1, 3, 4), mesh(1, 2))
    with pytest.raises(ff.UnsupportedOp):
        F.prelu(torch.ones(1, 4), split.view(3, 4)[0])
    return 1


def test_a_split_weight_of_a_whole_operand_is_refused_by_name() -> None:
    assert rank_group(2).run(_refused) == [1, 1]


test_as_in_one_process = as_in_one_process(__name__, CASES)
