"""Sharded tensors, torch's DTensors, of which each rank holds a part, beside plain ones.

torch gives a rank's own number where it is asked for that of all (`parameter.norm().item()`), and passes over what is
assigned to `.data`.
"""

import sys
from collections.abc import Callable, Iterable, Set
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fullframe.errors import GradientError, ShapeError
from fullframe.model.sharding.steps_taken import note_values
from fullframe.spatial.gradients import mean_over_ranks

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(parameter: object) -> "TypeGuard[DTensor]":
    """Whether `fully_shard`, ours or the user's, has taken the parameter."""
    loaded = sys.modules.get("torch.distributed.tensor")  # takes a second to load, and no one has sharded without it
    return loaded is not None and isinstance(parameter, loaded.DTensor)


def whole_value(value: Any) -> Any:
    """A sharded tensor gathered from all ranks, which all call it; anything else as it is."""
    return value.full_tensor() if is_sharded(value) else value


def local_value(value: Tensor) -> Tensor:
    """This rank's part of a sharded tensor; anything else as it is."""
    return value.to_local() if is_sharded(value) else value


def shard_of(value: Tensor) -> tuple[tuple[int, int], ...]:
    """Which part of a sharded tensor this rank holds: its place along each dim of the mesh that cuts it."""
    if not is_sharded(value):
        return ()
    where = zip(value.device_mesh.get_coordinate() or (), value.placements, strict=False)
    return tuple((dim, at) for dim, (at, how) in enumerate(where) if not how.is_replicate())


_COUNTS = {"step", "mu_product", "eta", "mu"}  # in the state that torch's optimizers have of a parameter
_in_step = [False]  # of an optimizer


def leave_step(*_: Any) -> None:
    """An optimizer's step has ended, perhaps by an error."""
    _in_step[0] = False


def _enter_step(*_: Any) -> None:
    _in_step[0] = True


def mind_sharded_values() -> None:
    """From now on what is read of sharded tensors, and written to them, is that of all ranks, or refused."""
    from torch.distributed.tensor import DTensor

    from fullframe.model.sharding.few_rows import take_extremes_of_few_rows
    from fullframe.model.sharding.parts import refuse_lost_writes
    from fullframe.model.sharding.random import draw_whole

    if not isinstance(vars(DTensor).get("data"), property):
        handlers: Any = DTensor._op_dispatcher._custom_op_handlers
        handlers[torch.ops.aten._local_scalar_dense.default] = _number
        DTensor.data = property(Tensor.data.__get__, _assign)  # type: ignore[assignment, attr-defined]
        DTensor.full_tensor = _averaged(DTensor.full_tensor)  # type: ignore[method-assign]
        refuse_lost_writes()
        take_extremes_of_few_rows()
        draw_whole()
        for name in ("__format__", "tolist"):
            setattr(DTensor, name, _of_a_number(getattr(Tensor, name)))
        for name in ("copy_", "add_", "sub_", "mul_", "lerp_"):
            setattr(DTensor, name, _taking_parts(getattr(Tensor, name)))
        register_optimizer_step_pre_hook(_enter_step)
        register_optimizer_step_post_hook(leave_step)


def _number(op: Any, args: Any, kwargs: Any) -> Any:
    """In the place of `Tensor.item`, and of `float` and `if`, which call it.

    Within an optimizer's step, which all ranks take, the parts are put together. Elsewhere one rank alone may ask, and
    the others' messages would meet its own.
    """
    (value,) = args
    if not any(placement.is_partial() for placement in value.placements):
        return op(value.to_local())
    if not _in_step[0]:
        raise GradientError(
            "a norm, mean, sum, largest or any() of a sharded tensor is read, of which this rank has its part's alone; "
            "call .full_tensor() on it before, on all ranks"
        )
    return op(value.full_tensor())


def _averaged(gather: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`full_tensor`, of whose gradient torch takes a part from each rank: of one replica's loss, if not of the mean."""

    @wraps(gather)
    def gathering(value: Any, **options: Any) -> Tensor:
        whole = gather(value, **options)
        if whole.requires_grad and value.device_mesh.size() == dist.get_world_size():
            whole.register_hook(lambda gradient: mean_over_ranks(gradient, dist.group.WORLD))  # type: ignore[arg-type]
        return whole

    return gathering


def _assign(parameter: Any, value: Tensor) -> None:
    """In the place of `parameter.data = value`. Raises ShapeError for another shape or dtype."""
    if (value.shape, value.dtype) != (parameter.shape, parameter.dtype):
        raise ShapeError(
            f"to .data of a sharded parameter of shape {tuple(parameter.shape)} and {parameter.dtype} something of "
            f"shape {tuple(value.shape)} and {value.dtype} is assigned; assign the like, and cast the model as a whole"
        )
    note_values(value)
    parameter._local_tensor = _as_sharded(parameter, value)._local_tensor


def _as_sharded(parameter: Any, value: Any) -> Any:
    """Of a whole value each rank takes its part, and sends nothing."""
    from torch.distributed.tensor import distribute_tensor

    value, mesh = value.detach(), parameter.device_mesh
    if is_sharded(value):
        return value.redistribute(mesh, parameter.placements)
    return distribute_tensor(value.to(parameter.device), mesh, parameter.placements, src_data_rank=None)


def _of_a_number(read: Callable[..., Any]) -> Callable[..., Any]:
    """The method, of a number without dims, as norms are printed: that of its value, which is refused as `item` is."""

    @wraps(read)
    def reading(value: Any, *args: Any) -> Any:
        return read(value, *args) if value.dim() else read(torch.tensor(value.item(), dtype=value.dtype), *args)

    return reading


def take_whole_optimizer_states(optimizer: Any) -> None:
    """Of whole states that were loaded for sharded parameters, each rank takes its parts.

    One of a group shows whether there are any, and one of those without dims, whose states torch leaves plain.
    """
    state = optimizer.state
    for group in optimizer.param_groups:
        numbers = [p for p in group["params"] if p.dim() == 0]
        first = next((p for p in group["params"] if p.dim() > 0 and p in state), None)
        counts = {name for name, value in state.get(first, {}).items() if isinstance(value, Tensor) and not value.dim()}
        number = next((p for p in numbers if p in state), None)
        if is_sharded(first) and _whole_in(state[first], first):
            _take_parts(state, (p for p in group["params"] if p.dim() > 0))
        if is_sharded(number) and _whole_in(state[number], number, counts | _COUNTS):
            _take_parts(state, numbers, counts | _COUNTS)


def _take_parts(state: Any, parameters: Iterable[Any], apart: Set[str] = frozenset()) -> None:
    for parameter in filter(is_sharded, parameters):
        held = state.get(parameter, {})
        whole = _whole_in(held, parameter, apart)
        held.update({name: _noted_part(value, parameter).clone() for name, value in whole.items()})


def _whole_in(held: dict[str, Any], parameter: Any, apart: Set[str] = frozenset()) -> dict[str, Tensor]:
    """Those of the parameter's shape, but for those of the names `apart`, which count steps."""
    return {name: value for name, value in held.items() if name not in apart and _is_plain_like(value, parameter)}


def _is_whole(value: Any, parameter: Any) -> bool:
    return _is_plain_like(value, parameter) and value.dim() > 0


def _is_plain_like(value: Any, parameter: Any) -> bool:
    return type(value) in (Tensor, nn.Parameter) and value.shape == parameter.shape


def _taking_parts(write: Callable[..., Any]) -> Callable[..., Any]:
    """The method of a sharded tensor that takes its parts of whole ones of its shape, such as masks and pretrained."""

    @wraps(write)
    def writing(parameter: Any, *values: Any, **options: Any) -> Any:
        return write(parameter, *(_part_of(value, parameter) for value in values), **options)

    return writing


def _part_of(value: Any, parameter: Any) -> Any:
    return _noted_part(value, parameter) if _is_whole(value, parameter) else value


def _noted_part(value: Tensor, parameter: Any) -> Any:
    note_values(value.detach())
    return _as_sharded(parameter, value)


def take_whole_states(module: nn.Module, abandon: Callable[[], None]) -> None:
    """Its `load_state_dict` takes whole tensors for sharded parameters, too, and writes to those that there are.

    Those that a pass has left gathered, as it ended by an error, are sharded again by `abandon` before.
    """

    def share(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any) -> None:
        if not all(parameter is None or is_sharded(parameter) for parameter in module._parameters.values()):
            abandon()
        for own, parameter in module._parameters.items():
            value = state.get(prefix + own)
            if is_sharded(parameter) and isinstance(value, Tensor):
                metadata["assign_to_params_buffers"] = False
                if value.shape == parameter.shape and not is_sharded(value):
                    note_values(value.detach())
                    state[prefix + own] = _as_sharded(parameter, value)

    module.register_load_state_dict_pre_hook(share)
