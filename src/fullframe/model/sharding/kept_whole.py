"""Parameters that torch's FSDP does not shard, whole on each rank: without dims, complex, or of a second dtype.

Outside of their unit they are sharded tensors as all others are, of which each rank's part is the whole: optimizers,
norms and checkpoints take all alike. While it runs a plain parameter of the same memory is in the module, and its
gradient is averaged after the pass.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fullframe.model.gradient_memory import chunks, means_over_ranks
from fullframe.model.sharding.torch_units import name_in
from fullframe.model.sharding.values import is_sharded
from fullframe.model.sharding.written import lost
from fullframe.spatial.views import share_memory


class _Kept(NamedTuple):
    places: list[tuple[nn.Module, str]]  # that have it
    parameter: Any  # a DTensor
    plain: nn.Parameter  # of the same memory, with the gradient that is not averaged yet


class KeptWhole:
    """Those of one unit, put in the place of the plain parameters that there were; `name` is the unit's."""

    def __init__(self, unit: nn.Module, name: str, mesh: DeviceMesh):
        self._unit, self._name = unit, name
        self._kept = [_keep(unit, parameter, mesh) for parameter in _unshardable(unit)]
        self.modules = list(dict.fromkeys(module for kept in self._kept for module, _ in kept.places))

    @property
    def parameters(self) -> set[nn.Parameter]:
        """As they are in the unit while it does not run."""
        return {kept.parameter for kept in self._kept}

    def attend(self) -> None:
        """From now on each call of the unit computes with plain ones; to be done before torch's hooks are on it."""
        if self._kept:
            self._unit.register_forward_pre_hook(lambda unit, args: self.put_in(), prepend=True)
            self._unit.register_forward_hook(lambda unit, args, output: self.take_out(), always_call=True)

    def replaced(self) -> list[tuple[nn.Module, str]]:
        """The places where something else is."""
        return [
            (module, own)
            for places, *ours in self._kept
            for module, own in places
            if all(module._parameters.get(own) is not each for each in ours)
        ]

    def put_in(self) -> None:
        """The unit, or a forward that takes parameters of it, computes with plain ones."""
        for places, parameter, plain in self._kept:
            if not share_memory(plain, parameter._local_tensor):  # something was assigned to `.data`
                plain.data = parameter._local_tensor.detach()
            for module, name in places:
                module._parameters[name] = plain

    def take_out(self) -> None:
        """It does so no more. Raises StrategyError where it has put another in the place of one."""
        for module, own in self.replaced():
            raise lost(name_in(self._unit, self._name, module, own), "replaced")
        self._put_back()

    def forget(self) -> None:
        """A pass has ended by an error."""
        self._put_back()
        for kept in self._kept:
            kept.plain.grad = None

    def _put_back(self) -> None:
        for places, parameter, _ in self._kept:
            for module, name in places:
                module._parameters[name] = parameter

    def of(self, parameters: set[Any]) -> list[_Kept]:
        """Those among `parameters`."""
        return [kept for kept in self._kept if kept.parameter in parameters]


@torch.no_grad()
def average(kept: Iterable[_Kept]) -> None:
    """Adds to gradients what a pass has brought on this rank or others; the same parameters on all ranks."""
    by_plain = {each.plain: each.parameter for each in kept}
    for chunk in chunks(list(by_plain)):
        gradients = [torch.zeros_like(plain) if plain.grad is None else plain.grad for plain in chunk]
        for plain, mean in zip(chunk, means_over_ranks(gradients), strict=True):
            plain.grad = None
            _add_gradient(by_plain[plain], mean)


def _add_gradient(parameter: Any, gradient: Tensor) -> None:
    whole = _replicated(gradient, parameter.device_mesh)
    if parameter.grad is None:
        parameter.grad = whole
    else:
        parameter.grad += whole
    for hook in (parameter._post_accumulate_grad_hooks or {}).values():
        hook(parameter)


def _keep(unit: nn.Module, parameter: nn.Parameter, mesh: DeviceMesh) -> _Kept:
    places = [(m, name) for m in unit.modules() for name, own in m._parameters.items() if own is parameter]
    sharded: Any = nn.Parameter(_replicated(parameter.detach(), mesh), requires_grad=parameter.requires_grad)
    for module, name in places:
        module._parameters[name] = sharded
    plain = nn.Parameter(sharded._local_tensor.detach(), requires_grad=parameter.requires_grad)
    return _Kept(places, sharded, plain)


def _replicated(values: Tensor, mesh: DeviceMesh) -> Tensor:
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(values, mesh, [Replicate()], run_check=False)


def _unshardable(unit: nn.Module) -> list[nn.Parameter]:
    """Torch's FSDP refuses numbers, gathers what has one dtype, and NCCL does not average complex ones for it."""
    plain = [parameter for parameter in unit.parameters() if not is_sharded(parameter)]
    elements: Counter[torch.dtype] = Counter()
    for parameter in plain:
        if parameter.requires_grad and not _is_beside(parameter):
            elements[parameter.dtype] += parameter.numel()
    most = elements.most_common(1)[0][0] if elements else None
    return [p for p in plain if _is_beside(p) or (p.requires_grad and p.dtype != most)]


def _is_beside(parameter: nn.Parameter) -> bool:
    return parameter.dim() == 0 or parameter.is_complex()
