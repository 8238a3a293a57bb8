"""Saved activations wait for backward in host memory: sent there as they are saved, fetched two ahead of their use.

On a GPU both ways run beside the computation, on a stream of their own, from and to pinned memory.
"""

import warnings
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from fullframe.ranks.agreement import is_first_rank
from fullframe.spatial.refetch import Saved, require_unwritten
from fullframe.techniques.pinned_memory import PinnedMemory

LEAST_BYTES = 1 << 20  # of a storage; smaller ones gain little and cost a copy each
LEAVING_BYTES = 512 << 20  # on the device that may wait for their copy; beyond it the host waits too

AHEAD = 2  # storages that are fetched before they are asked for


def saving_to_host(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """What to enter around each forward pass on `device`; on a CPU, where it could save nothing, it is nothing."""
    if device.type != "cpu":
        return Offload(DeviceRoad(device)).saving
    if is_first_rank():
        warnings.warn("strategy.offload does nothing on a CPU, whose memory is the host's", stacklevel=2)
    return nullcontext


class Road(Protocol):
    """The way to where activations wait, and back."""

    at_once: bool  # what is sent has left when `send` returns, and may be written to

    def takes(self, tensor: Tensor) -> bool:
        """Whether the tensor's storage can be sent."""

    def send(self, storage: torch.UntypedStorage) -> Any:
        """Send a storage, which is held until it has left; what to fetch it by."""

    def fetch(self, sent: Any) -> tuple[Tensor, Any]:
        """The bytes that were sent, and what to wait for before they are used."""

    def wait(self, arrival: Any) -> None:
        """Have the work that is queued from now on find the bytes there."""

    def begin(self) -> None:
        """A forward pass begins: hold nothing any longer that an earlier one sent, as after one that was given up."""


class Offload:
    """`with offload.saving(): forward()`, for one microbatch after the other.

    Only plain tensors whose storage has `least_bytes` or more, no parameters; what several nodes save goes once. Under
    recompute these are the blocks' inputs and what is saved outside the blocks. What was written to in between is
    RuntimeError in backward, as in torch, which does not look where there are hooks.
    """

    def __init__(self, road: Road, least_bytes: int = LEAST_BYTES):
        self._road, self._least_bytes = road, least_bytes
        self._parked: weakref.WeakValueDictionary[tuple[int, int], _Parked] = weakref.WeakValueDictionary()
        self._last: Callable[[], _Parked | None] = lambda: None

    def saving(self) -> AbstractContextManager[None]:
        """Inside, what is saved for backward is sent away."""
        self._road.begin()
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> "Saved | _View":
        is_weight = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
        if is_weight or not self._road.takes(tensor) or tensor.untyped_storage().nbytes() < self._least_bytes:
            return Saved.of(tensor)
        storage: Any = tensor.untyped_storage()
        # Written to in between, it is another value under the same address.
        key = storage._cdata, tensor._version
        parked = self._parked.get(key)
        if parked is None or parked.source() is not storage:
            parked = self._parked[key] = _Parked(storage, self._road, self._last())
            self._last = weakref.ref(parked)
        written = None if self._road.at_once else Saved(_version_alone(tensor), tensor._version)
        return _View(parked, written, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _unpack(self, packed: "Saved | _View") -> Tensor:
        if isinstance(packed, Saved):
            return packed.get()
        if packed.written is not None:
            require_unwritten(*packed.written, packed.size)
        held = packed.parked.take()
        held = held[: held.numel() // packed.dtype.itemsize * packed.dtype.itemsize]
        return held.view(packed.dtype).as_strided(packed.size, packed.stride, packed.offset)


def _version_alone(tensor: Tensor) -> Tensor:
    """An empty tensor that shares the version of `tensor`, and so counts the writes to it."""
    counter = tensor.detach()
    counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return counter


class _Parked:
    """One storage that was sent away; `before` was sent just before it, and so is wanted just after it."""

    def __init__(self, storage: torch.UntypedStorage, road: Road, before: "_Parked | None"):
        self.source = weakref.ref(storage)
        self._road = road
        self._before = None if before is None else weakref.ref(before)
        self._sent = road.send(storage)
        self._ahead: tuple[Tensor, Any] | None = None  # fetched, and not used yet
        self._in_use: weakref.ref[Tensor] | None = None

    def take(self) -> Tensor:
        """Its bytes, back for work that is queued from now on."""
        held = None if self._in_use is None else self._in_use()
        if held is None:
            held, arrival = self._ahead or self._road.fetch(self._sent)
            self._road.wait(arrival)
            self._ahead, self._in_use = None, weakref.ref(held)
        next_ = self
        for _ in range(AHEAD):  # so that the road is never idle while the device computes with what has come
            before = None if next_._before is None else next_._before()
            if before is None:
                break
            next_ = before
            if next_._in_use is None and next_._ahead is None:
                next_._ahead = self._road.fetch(next_._sent)
        return held


class _View(NamedTuple):
    """A saved tensor: where it lies in what was sent away."""

    parked: _Parked
    written: Saved | None  # the tensor's version, where the copy may have been made after a later write
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class DeviceRoad:
    """Bytes between `device` and host memory."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device)
        self._leaving: deque[tuple[torch.Event, Tensor]] = deque()
        self.at_once = self._stream is None
        self._host = PinnedMemory(pin=self._stream is not None)

    def takes(self, tensor: Tensor) -> bool:
        """Plain tensors on the device."""
        return (
            type(tensor) is Tensor  # no split or sharded tensor
            and tensor.device.type == self._device.type
            and tensor.layout == torch.strided
            and not (tensor.is_conj() or tensor.is_neg() or tensor.is_inference())
        )

    def send(self, storage: torch.UntypedStorage) -> Tensor:
        """A copy in host memory. The storage is held until the copy is made."""
        source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        host = self._host.take(storage.nbytes())
        sent = self._copy(source, host)
        self._let_go()
        if sent is not None:
            self._leaving.append((sent, source))
        return host

    def fetch(self, sent: Tensor) -> tuple[Tensor, torch.Event | None]:
        """A copy on the device, and when it will be there."""
        self._let_go()
        tensor = torch.empty_like(sent, device=self._device, pin_memory=False)
        arrived = self._copy(sent, tensor)
        if self._stream is not None:
            tensor.record_stream(self._stream)  # should nobody come to use it
        return tensor, arrived

    def wait(self, arrival: torch.Event | None) -> None:
        """The device waits, not the host."""
        if arrival is not None:
            torch.accelerator.current_stream(self._device).wait_event(arrival)

    def begin(self) -> None:
        """What left has arrived, in an ordinary step long ago."""
        while self._leaving:
            sent, _ = self._leaving.popleft()
            sent.synchronize()

    def _copy(self, source: Tensor, target: Tensor) -> torch.Event | None:
        if self._stream is None:
            target.copy_(source)
            return None
        # `source` and `target` may be in use there. Another GPU may be the current one.
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            target.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def _let_go(self) -> None:
        # The allocator hands out memory when the host asks, long before the device gets there: so the host must wait.
        while self._leaving:
            sent, _ = self._leaving[0]
            if not sent.query() and sum(source.nbytes for _, source in self._leaving) <= LEAVING_BYTES:
                break
            sent.synchronize()
            self._leaving.popleft()
