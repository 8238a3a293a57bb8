"""What a forward pass writes to parameters that were gathered for it, which are thrown away after it."""

from typing import Any

import torch
from torch import Tensor, nn

from fullframe.errors import StrategyError
from fullframe.model.sharding.values import is_sharded
from fullframe.ranks.raw_bytes import checksums


class WrittenIn:
    """Raises StrategyError where a unit's forward writes to its parameters, or puts others in their place.

    What was gathered is thrown away after it. In the unit's first forward pass in training also where it does so by
    `.data`, of which no version tells. To be made before torch's own hooks, of which the first gathers before ours and
    the last gives back after ours.
    """

    def __init__(self, unit: nn.Module, name: str, is_real: bool):
        self._looks_at_values = is_real
        self._own = [
            (".".join(filter(None, (name, path, own))), module, own)
            for path, module in unit.named_modules()
            for own, parameter in module._parameters.items()
            if parameter is not None and not is_sharded(parameter)
        ]
        self.modules = list(dict.fromkeys(module for _, module, _ in self._own))
        self._unit = unit
        self._before: list[tuple[str, nn.Module, str, Tensor, int]] = []
        self._sums: list[int] = []  # where values are looked at
        self._is_taken = False  # by the forward of another unit, which ends later
        unit.register_forward_pre_hook(lambda unit, args: None if self._is_taken else self._note())
        unit.register_forward_hook(lambda unit, args, output: None if self._is_taken else self._compare())

    def begin(self) -> None:
        """Its parameters are taken by the forward of another unit."""
        self._is_taken = True
        self._note()

    def end(self) -> None:
        """And that ends."""
        self._is_taken = False
        self._compare()

    def _note(self) -> None:
        self._before = []
        if torch.is_inference_mode_enabled():  # which has no versions, and writes to no parameter
            return
        gathered: Any = [(name, module, own, module._parameters[own]) for name, module, own in self._own]
        self._before = [(*which, parameter, parameter._version) for *which, parameter in gathered]
        self._sums = self._sums_now() if self._looks_at_values and self._unit.training else []

    def _compare(self) -> None:
        now, (before, self._before) = self._sums_now() if self._sums else [], (self._before, [])
        for number, (name, module, own, parameter, version) in enumerate(before):
            is_replaced = module._parameters.get(own) is not parameter
            if is_replaced or parameter._version != version or (now and now[number] != self._sums[number]):
                raise lost(name, "replaced" if is_replaced else "written to")
        self._looks_at_values = self._looks_at_values and not now

    def _sums_now(self) -> list[int]:
        return checksums(parameter for *_, parameter, _ in self._before)


def lost(name: str, done: str) -> StrategyError:
    """What to raise where that is done to a parameter in forward."""
    return StrategyError(
        f"{name} is {done} in forward, which sharded parameters would lose, for what is gathered for it is thrown "
        "away; make it a buffer, or do without shard_parameters"
    )
