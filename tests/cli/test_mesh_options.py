"""Sizes of a mesh become a strategy."""

import pytest

from fullframe.cli.mesh_options import require_ranks, split_as
from fullframe.errors import MeshError
from fullframe.strategy import Strategy

NOTHING = dict.fromkeys(("depth", "height", "width", "stages", "data"))


def test_what_is_not_given_is_one() -> None:
    assert split_as(NOTHING, None) == Strategy()
    assert split_as(NOTHING | {"width": 2, "stages": 3}, None) == Strategy(width=2, stages=3)
    assert split_as(NOTHING | {"data": 2, "height": 2}, 4) == Strategy(data=2, height=2)


def test_replicas_are_what_torchrun_leaves() -> None:
    assert split_as(NOTHING | {"width": 2}, 6) == Strategy(data=3, width=2)


def test_wrong_sizes() -> None:
    with pytest.raises(MeshError, match="--height must be at least 1, got 0"):
        split_as(NOTHING | {"height": 0}, None)
    with pytest.raises(MeshError, match=r"data 1 x height 1 x width 2 = 2 is not the number of ranks .*, 3; start 2"):
        split_as(NOTHING | {"width": 2}, 3)
    require_ranks(Strategy(width=2), 2)
    with pytest.raises(MeshError, match="start 1 or choose other axes"):
        require_ranks(Strategy(), 2)
