"""What torch keeps of a unit, as its versions name it; what is refused is in test_fsdp.py."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from fullframe.errors import StrategyError
from fullframe.model.sharding.torch_units import name_in, require_sharded_ones, sharded_in, take_up_data
from tests.rank_group import rank_group


def built() -> Any:
    unit = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    fully_shard(unit[0])
    return fully_shard(unit)


def looked_at() -> None:
    unit = built()
    assert {each._module_info.param_name for each in sharded_in(unit)} == {"weight", "bias"}
    assert {each._module_info.module for each in sharded_in(unit)} == {unit[1]}
    assert name_in(unit, "block", unit[0], "bias") == "block.0.bias"
    require_sharded_ones("block", unit, [])
    with pytest.raises(StrategyError, match=r"^block\.0\.bias is another tensor than the one that was sharded"):
        require_sharded_ones("block", unit, [(unit[0], "bias")])
    before = [each._sharded_param_data.data_ptr() for each in sharded_in(unit)]
    take_up_data(unit)
    assert [each._sharded_param_data.data_ptr() for each in sharded_in(unit)] == before
    weight = unit[1].weight
    weight._local_tensor = torch.full_like(weight.to_local(), 7.0)
    take_up_data(unit)
    assert any(each._sharded_param_data.eq(7).all() for each in sharded_in(unit))
    unit[1].weight = nn.Parameter(torch.zeros(2, 4))
    with pytest.raises(StrategyError, match=r"^block\.1\.weight is another tensor"):
        require_sharded_ones("block", unit, [])


def test_what_torch_keeps_of_a_unit() -> None:
    rank_group(2).run(looked_at)
