"""Offloaded activations where there is neither a host nor a device: as `training.offload`, by the simulated clock."""

import weakref
from collections import deque
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from fullframe.simulation.clock.roofline import StepClock, Transfer
from fullframe.techniques.offload import LEAST_BYTES, LEAVING_BYTES


class SimulatedOffload:
    """`with offload.saving(): forward()`: fake tensors saved there are gone, and made again when backward asks."""

    def __init__(self, clock: StepClock):
        self._clock = clock
        self._parked: weakref.WeakValueDictionary[tuple[int, int], _Parked] = weakref.WeakValueDictionary()
        self._last: weakref.ref[_Parked] | None = None
        self._leaving: deque[tuple[Transfer, torch.UntypedStorage]] = deque()

    def saving(self) -> AbstractContextManager[None]:
        """Inside, what is saved for backward is sent away."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> "Tensor | _View":
        storage = tensor.untyped_storage() if type(tensor) is FakeTensor else None
        weight = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
        if storage is None or weight or storage.nbytes() < LEAST_BYTES:
            return tensor
        key = storage._cdata, tensor._version
        parked = self._parked.get(key)
        if parked is None or parked.source() is not storage:
            parked = self._parked[key] = _Parked(weakref.ref(storage), storage.nbytes(), self._last)
            self._last = weakref.ref(parked)
            self._let_go()
            self._leaving.append((self._clock.offload(storage.nbytes()), storage))
        return _View(parked, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _unpack(self, packed: "Tensor | _View") -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        bytes = self._taken(packed.parked)
        return bytes.view(packed.dtype).as_strided(packed.size, packed.stride, packed.offset)

    def _taken(self, parked: "_Parked") -> Tensor:
        held = None if parked.in_use is None else parked.in_use()
        if held is None:
            held, arrival = parked.ahead or self._fetched(parked)
            self._clock.finish(arrival)
            parked.ahead, parked.in_use = None, weakref.ref(held)
        before = None if parked.before is None else parked.before()
        if before is not None and before.in_use is None and before.ahead is None:
            before.ahead = self._fetched(before)
        return held

    def _fetched(self, parked: "_Parked") -> tuple[Tensor, Transfer]:
        self._let_go()
        return torch.empty(parked.bytes, dtype=torch.uint8), self._clock.offload(parked.bytes)

    def _let_go(self) -> None:
        while self._leaving:
            transfer, _ = self._leaving[0]
            waiting = sum(storage.nbytes() for _, storage in self._leaving)
            if transfer.done > self._clock.step_seconds and waiting <= LEAVING_BYTES:
                break
            self._clock.finish(transfer)
            self._leaving.popleft()


@dataclass(eq=False)
class _Parked:
    """One storage that was sent away; `before` went just before it, and so is wanted just after it."""

    source: "weakref.ref[torch.UntypedStorage]"
    bytes: int
    before: "weakref.ref[_Parked] | None"
    ahead: tuple[Tensor, Transfer] | None = None  # fetched, and not used yet
    in_use: "weakref.ref[Tensor] | None" = None


class _View(NamedTuple):
    """A saved tensor: where it lies in what was sent away."""

    parked: _Parked
    dtype: torch.dtype
    size: Any
    stride: tuple[int, ...]
    offset: int
