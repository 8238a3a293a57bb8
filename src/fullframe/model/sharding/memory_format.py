"""Parameters without gaps, as torch's FSDP takes them, and maps in channels_last that weights in it had made."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from fullframe.model.sharding.values import is_sharded
from fullframe.ranks.memory_format import memory_format_of

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}  # by dims


def lay_contiguous(model: nn.Module) -> None:
    """Lays the memory of parameters anew where it is not contiguous; sharded ones are left as they are.

    A convolution whose weight was in channels_last brings what it is given into that format, as torch does for it.
    """
    own = [p for p in model.parameters() if not is_sharded(p)]
    in_channels_last = {p for p in own if memory_format_of(p) is not torch.contiguous_format}
    for module in model.modules():
        # Not by `module.weight`, of which a parametrization takes another step whenever it is read.
        if isinstance(module, _ConvNd) and not in_channels_last.isdisjoint(module.parameters()):
            module.register_forward_pre_hook(to_channels_last)
    for parameter in own:
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()


def to_channels_last(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The hook of such a convolution."""
    return tuple(
        value.contiguous(memory_format=_FORMATS[value.dim()])
        if isinstance(value, Tensor) and value.dim() in _FORMATS
        else value
        for value in args
    )
