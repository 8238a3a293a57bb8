"""What a unit's forward leaves in attributes (`self.aux = self.head(x)`) for a loss or a later layer to take up.

Torch gathers a unit's parameters where backward reaches what forward returned. What it left elsewhere may be reached
before, and backward would compute with parameters whose memory has been given back: a crash without a word.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from fullframe.data.nested import tensors_in
from fullframe.errors import GradientError
from fullframe.model.attributes import OF_EVERY_MODULE
from fullframe.spatial.tensor import local_or_whole
from fullframe.spatial.views import share_memory
from fullframe.wording import inside


class LeftIn:
    """Has backward gather a unit's parameters where it reaches what its forward left in an attribute.

    Raises GradientError for what is a gathered parameter, or a view of one. To be made before torch's own hooks.
    """

    def __init__(self, unit: nn.Module, name: str):
        self._modules = [(".".join(filter(None, (name, path))), each) for path, each in _own_modules(unit)]
        self._own = {each: OF_EVERY_MODULE | each._parameters.keys() | _listed(each) for _, each in self._modules}
        self._parameters = {each: frozenset(each._parameters) for _, each in self._modules}
        self._known = WeakIdKeyDictionary()  # tensors that have their hook
        unit.register_forward_hook(self._look)

    def _look(self, unit: Any, args: Any, output: Any) -> None:
        for where, tensor in self._left():
            gathered = (each._parameters[name] for each, names in self._parameters.items() for name in names)
            if any(share_memory(tensor, parameter) for parameter in gathered if parameter is not None):
                raise GradientError(
                    f"forward leaves a sharded parameter, or a view of one, in the attribute {where}, whose memory is "
                    "given back when it ends; leave a copy there (.clone()), or do without shard_parameters"
                )
            if tensor.grad_fn is not None and torch.is_grad_enabled() and tensor not in self._known:
                self._known[tensor] = True
                tensor.register_hook(unit._get_fsdp_state()._pre_backward)

    def _left(self) -> Iterator[tuple[str, Tensor]]:
        for path, each in self._modules:
            for name, value in (*vars(each).items(), *each._parameters.items()):
                if name not in self._own[each] and isinstance(value, (Tensor, list, tuple, Mapping)):
                    for tensor in tensors_in(value):
                        yield inside(path, name), local_or_whole(tensor)


def _listed(module: nn.Module) -> frozenset[str]:
    """Where a module lists its parameters and keeps that list up to date as they are put in place and away."""
    return frozenset({"_flat_weights"} if isinstance(module, nn.RNNBase) else ())


def _own_modules(unit: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The unit and its modules, but for those of units within it."""
    from torch.distributed.fsdp import FSDPModule

    yield path, unit
    for name, child in unit.named_children():
        if not isinstance(child, FSDPModule):
            yield from _own_modules(child, inside(path, name))
