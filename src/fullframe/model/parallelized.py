"""The model parallelized as a strategy wants it."""

from typing import Any, Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullframe.errors import StrategyError
from fullframe.model.fsdp import is_sharded
from fullframe.model.parallelize import ParallelModel, parallelize
from fullframe.strategy import Strategy


def parallelize_for(
    strategy: Strategy,
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    unsupported: Literal["error", "gather"] = "error",
    find_unused_parameters: bool = False,
) -> ParallelModel:
    """`fullframe.parallelize` with what follows from the strategy."""
    return parallelize(
        model,
        mesh,
        unsupported=unsupported,
        find_unused_parameters=find_unused_parameters,
        shard_parameters=strategy.shard_parameters,
        average_gradients=not strategy.update_in_backward,
    )


def require_parallelized_for(strategy: Strategy, model: Any) -> None:
    """Raises StrategyError when `parallelize` was asked for something else than the strategy."""
    wanted = {
        "shard_parameters": (any(map(is_sharded, model.parameters())), strategy.shard_parameters),
        "average_gradients": (getattr(model, "average_gradients", True), not strategy.update_in_backward),
    }
    for option, (is_so, should_be) in wanted.items():
        if is_so != should_be:
            raise StrategyError(
                f"with this strategy (shard_parameters={strategy.shard_parameters}, update_in_backward="
                f"{strategy.update_in_backward}) pass fullframe.parallelize(model, mesh, {option}={should_be})"
            )
