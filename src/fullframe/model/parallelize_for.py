"""A model parallelized as a strategy says."""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullframe.errors import StrategyError
from fullframe.model.parallelize import ParallelModel, parallelize
from fullframe.model.sharding.values import is_sharded
from fullframe.strategy import Strategy


def parallelize_for(strategy: Strategy, model: nn.Module, mesh: DeviceMesh, **options: Any) -> "ParallelModel":
    """`parallelize`, with the options that follow from the strategy."""
    return parallelize(
        model,
        mesh,
        shard_parameters=strategy.shard_parameters,
        average_gradients=not strategy.update_in_backward,
        compile=strategy.compile,
        **options,
    )


def require_parallelized_for(strategy: Strategy, model: Any) -> None:
    """Raises StrategyError when `parallelize` was asked for something else than the strategy."""
    wanted = {
        "shard_parameters": (any(map(is_sharded, model.parameters())), strategy.shard_parameters),
        "average_gradients": (getattr(model, "average_gradients", True), not strategy.update_in_backward),
    }
    stages = getattr(model, "_stages", 1)
    if stages != strategy.stages:
        raise StrategyError(
            f"the model was parallelized over a mesh with {stages} stages, strategy.stages is {strategy.stages}; pass "
            f"fullframe.parallelize(model, fullframe.init_mesh(..., stages={strategy.stages}))"
        )
    for option, (is_so, should_be) in wanted.items():
        if is_so != should_be:
            raise StrategyError(
                f"with this strategy (shard_parameters={strategy.shard_parameters}, update_in_backward="
                f"{strategy.update_in_backward}) pass fullframe.parallelize(model, mesh, {option}={should_be})"
            )
