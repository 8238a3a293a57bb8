"""Sharded tensors, torch's DTensors, of which each rank holds a part, beside plain ones."""

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Tensor

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
