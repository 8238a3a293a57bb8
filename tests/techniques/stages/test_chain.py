"""A rank's share of a chain."""

import pytest
import torch
from torch import nn

import fullframe as ff
from fullframe.errors import GradientError, MeshError
from fullframe.techniques.stages.chain import Stages, require_known
from tests.rank_group import rank_group


def shares(parts: int) -> list[range]:
    stages = Stages(ff.init_mesh(stages=3), 1)
    assert stages.share(parts) == stages.share(parts, torch.distributed.get_rank())
    return [stages.share(parts, stage) for stage in range(3)]


def test_all_parts_in_order_and_as_even_as_can_be() -> None:
    assert rank_group(3).run(shares, 14)[1] == [range(0, 5), range(5, 10), range(10, 14)]
    assert rank_group(3).run(shares, 3)[2] == [range(0, 1), range(1, 2), range(2, 3)]


def test_a_mesh_without_stages() -> None:
    with pytest.raises(MeshError, match="no stages"):
        Stages(ff.init_mesh(), 1)


def test_a_tensor_whose_gradient_would_be_lost() -> None:
    layer, x, outside = nn.Linear(3, 3), torch.ones(2, 3, requires_grad=True), torch.ones(3, requires_grad=True)
    known = [*layer.parameters(), x.view_as(x)]
    require_known([[layer(x)]], known, 0)
    with pytest.raises(GradientError, match=r"a part on stage 1 uses a tensor of shape \(3,\)"):
        require_known([[layer(x) * outside]], known, 1)
