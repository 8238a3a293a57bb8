"""What `parallelize` is asked for follows from the strategy, and is held to it."""

import pytest
from torch import nn

from fullframe.errors import StrategyError
from fullframe.model.parallelize_for import parallelize_for, require_parallelized_for
from fullframe.ranks.mesh import init_mesh
from fullframe.strategy import Strategy
from tests.rank_group import rank_group


class Averaging(nn.Module):
    average_gradients = False


def test_a_model_made_for_another_strategy_is_refused_by_option() -> None:
    require_parallelized_for(Strategy(), nn.Linear(1, 1))
    require_parallelized_for(Strategy(update_in_backward=True), Averaging())
    for strategy, model, option in (
        (Strategy(update_in_backward=True), nn.Linear(1, 1), "average_gradients=False"),
        (Strategy(), Averaging(), "average_gradients=True"),
        (Strategy(data=2, shard_parameters=True), nn.Linear(1, 1), "shard_parameters=True"),
    ):
        with pytest.raises(StrategyError, match=option):
            require_parallelized_for(strategy, model)


def _made() -> list[bool]:
    mesh, found = init_mesh(width=2), []
    for strategy in (Strategy(width=2), Strategy(width=2, update_in_backward=True)):
        model = parallelize_for(strategy, nn.Conv2d(1, 1, 1), mesh)
        require_parallelized_for(strategy, model)
        found.append(model.average_gradients)
    return found


def test_what_is_made_for_a_strategy_is_of_it() -> None:
    assert rank_group(2).run(_made) == [[True, False]] * 2
