"""The `ff.unroll` inside a model, as a strategy wants them."""

from torch import nn

from fullframe.errors import StrategyError
from fullframe.model.blocks import class_name
from fullframe.strategy import Strategy
from fullframe.techniques.unrolling.unroll import Unrolled


def unrolled_in(model: nn.Module) -> dict[str, Unrolled]:
    """By name, each `ff.unroll` in the model."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Unrolled)}


def keep_states(model: nn.Module, strategy: Strategy) -> None:
    """Have each `ff.unroll` keep what the strategy says, in place of what its own `recompute` says.

    Under "none" that is what it was made with. Under "blocks" and "budget" its blocks are computed again, one by one,
    and its own would do that once more. Raises StrategyError for "nested" where the model has none.
    """
    found = unrolled_in(model)
    if strategy.recompute == "nested" and not found:
        raise StrategyError(
            f"strategy.recompute is 'nested', but {class_name(model)} has no ff.unroll inside, whose iterations "
            "could be nested; use 'blocks'"
        )
    kinds = {"nested": "nested", "none": None}
    kind = kinds.get(strategy.recompute, None if strategy.recompute_modules else "none")
    for unrolled in found.values():
        unrolled.keep(kind, strategy.recompute_states)


def most_iterations(model: nn.Module) -> int:
    """Of the `ff.unroll` for which "nested" is not the same as all states; 0 where there is none."""
    return max((u.iterations for u in unrolled_in(model).values() if not u.return_all), default=0)


def require_one_device(model: nn.Module) -> None:
    """Raises StrategyError where iterations are on several devices of one process."""
    for name, unrolled in unrolled_in(model).items():
        devices = dict.fromkeys(map(str, unrolled.devices))
        if len(devices) > 1:
            raise StrategyError(
                f"the iterations of {name or class_name(model)} are on {', '.join(devices)} of one process by "
                "ff.unroll(placement=[...]), and a simulated rank has one device; leave placement out of the recipe to "
                "have stages planned in its place, one process for each device (Strategy(stages=...))"
            )
