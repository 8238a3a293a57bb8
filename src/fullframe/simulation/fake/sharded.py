"""Elementwise ops on DTensors that lie alike: each rank's parts, as DTensor has it. Numbers of what FSDP2 gathers.

DTensor first asks for each operand of a list where it may lie, which takes seconds for the lists of an optimizer.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor, Replicate, Shard

from fullframe.simulation.fake.numbers import know, known
from fullframe.simulation.fake.replaced import replaced

_FOREACH = {
    f"_foreach_{name}"
    for name in ("abs", "add", "addcdiv", "addcmul", "clamp_max", "clamp_min", "div", "exp", "lerp", "log", "maximum",
                 "minimum", "mul", "neg", "pow", "reciprocal", "sign", "sqrt", "sub", "zero")
}  # fmt: skip


def on_parts(run: Callable[..., Any], func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`func(*args, **kwargs)` by `run(func, parts, kwargs)`; NotImplemented where DTensor is to be asked.

    That is for any op that is not known to be elementwise, and for operands that do not lie alike.
    """
    if not _is_elementwise(func) or any(isinstance(value, (Tensor, list)) for value in kwargs.values()):
        return NotImplemented
    lists = [value for value in args if isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor)]
    columns = list(zip(*lists, strict=True)) if lists else [args[:1]]
    single = [value for value in args[not lists :] if isinstance(value, Tensor)]
    if single or not all(map(_alike, columns)):
        return NotImplemented
    out = run(func, tuple(map(own_parts, args)), kwargs)
    if out is None:
        return None
    made = [_whole(part, column[0]) for part, column in zip(out if lists else [out], columns, strict=True)]
    return made if lists else made[0]


def known_when_gathered(model: nn.Module) -> AbstractContextManager[None]:
    """Inside, what FSDP2 gathers of parameters whose numbers are known now has these numbers."""
    held = {
        (module, name): values
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if (values := known(parameter)) is not None
    }
    make_whole = FSDPParam.to_unsharded

    def to_unsharded(self: Any) -> None:
        make_whole(self)
        values = held.get((self._module_info.module, self._module_info.param_name))
        if values is not None:
            know(self._unsharded_param, values)

    return replaced(FSDPParam, "to_unsharded", to_unsharded)


def own_parts(value: Any) -> Any:
    """This rank's part of a DTensor, also within lists; anything else as it is."""
    if isinstance(value, DTensor):
        return value._local_tensor
    if isinstance(value, (list, tuple)) and any(isinstance(item, DTensor) for item in value):
        return type(value)(map(own_parts, value))
    return value


@functools.cache
def _is_elementwise(func: Any) -> bool:
    name: str = func._schema.name.removeprefix("aten::")
    return name == "zeros_like" or name.removesuffix("_") in _FOREACH


def _alike(column: Sequence[Any]) -> bool:
    """Whether all are DTensors that lie on the same ranks in the same way, each number on those that have it."""
    if not all(isinstance(tensor, DTensor) for tensor in column):
        return False
    first = column[0]
    return all(type(placement) in (Shard, Replicate) for placement in first.placements) and all(
        tensor.device_mesh == first.device_mesh
        and tensor.placements == first.placements
        and tensor.shape == first.shape
        for tensor in column[1:]
    )


def _whole(part: Tensor, like: DTensor) -> DTensor:
    """The DTensor of which this is the rank's part, as `like` is of its own."""
    if part.dtype == like.dtype and part.stride() == like._local_tensor.stride():
        return DTensor(part, like._spec, requires_grad=False)
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
