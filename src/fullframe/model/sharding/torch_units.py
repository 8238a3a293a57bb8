"""What torch's FSDP keeps of a unit: a module whose parameters it gathers together, of the name that the model has."""

from typing import Any

from torch import nn

from fullframe.errors import StrategyError
from fullframe.spatial.views import share_memory
from fullframe.wording import inside


def sharded_in(unit: Any) -> list[Any]:
    """What torch knows of the parameters that a unit gathers."""
    state = unit._get_fsdp_state()
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [each for group in filter(None, groups) for each in group.fsdp_params]


def take_up_data(unit: Any) -> None:
    """Lets torch gather what has been assigned to `.data` of a unit's parameters."""
    for each in sharded_in(unit):
        if not share_memory(each.sharded_param._local_tensor, each._sharded_param_data):
            each.reset_sharded_param()


def require_sharded_ones(name: str, unit: Any, others: list[tuple[nn.Module, str]]) -> None:
    """Raises StrategyError where another tensor is in a parameter's place, which torch would pass over, or keep.

    `others` are places besides torch's where that is so.
    """
    infos = [
        each._module_info
        for each in sharded_in(unit)
        if each.sharded_state.name == "SHARDED"
        and each._module_info.module._parameters.get(each._module_info.param_name) is not each.sharded_param
    ]
    replaced = [(info.module, info.param_name) for info in infos] + others
    for module, own in replaced:
        raise StrategyError(
            f"{name_in(unit, name, module, own)} is another tensor than the one that was sharded, as "
            f"torch.func.functional_call or `module.{own} = ...` puts there, and would not be gathered; write to "
            "it by parameter.data = whole, replace it before parallelize, or do without shard_parameters"
        )


def name_in(unit: nn.Module, name: str, module: nn.Module, own: str) -> str:
    """What a parameter of a module of the unit of that name is called."""
    return next(inside(path, own) for path, part in unit.named_modules(prefix=name) if part is module)
