"""A module's buffers: kept, replaced by copies for a while, and shared with all ranks."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fullframe.errors import MeshError
from fullframe.model.sharding.values import is_sharded
from fullframe.model.unread import copy_of
from fullframe.ranks.raw_bytes import overwrite, repeated_dims, share_values
from fullframe.spatial.tensor import SpatialTensor

Buffer = tuple[nn.Module, str, Tensor]


def buffers_of(module: nn.Module) -> list[Buffer]:
    """Every buffer with the module that has it and its name there."""
    return [
        (owner, name, buffer)
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None and not buffer.is_inference()
    ]


def borrow_buffers(module: nn.Module, values: Mapping[tuple[nn.Module, str], Tensor]) -> list[Buffer]:
    """Put copies in place of the buffers, of `values` where those have one; what was there, for `return_buffers`."""
    there = buffers_of(module)
    chosen: dict[int, Tensor] = {}
    for owner, name, buffer in there:
        chosen.setdefault(id(buffer), values.get((owner, name), buffer))
    made = dict(zip(chosen, copies(list(chosen.values())), strict=True))
    for owner, name, buffer in there:
        owner._buffers[name] = made[id(buffer)]
    return there


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """A copy of each, without its graph. What was one tensor is one again, and what shared memory shares it."""
    different = {id(tensor): tensor for tensor in tensors}
    sharing = Counter(map(_memory, different.values()))
    memory: dict[int, torch.UntypedStorage] = {}
    for key, tensor in different.items():
        place = _memory(tensor)
        if sharing[place] == 1:
            different[key] = copy_of(tensor)
            continue
        if place not in memory:
            memory[place] = tensor.untyped_storage().clone()
        where: Any = memory[place], tensor.storage_offset(), tensor.size(), tensor.stride()
        different[key] = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(*where)
    return [different[id(tensor)] for tensor in tensors]


def _memory(tensor: Tensor) -> int:
    storage: Any = tensor.untyped_storage() if type(tensor) is Tensor and tensor.layout == torch.strided else None
    return id(tensor) if storage is None else storage._cdata


def return_buffers(there: Sequence[Buffer]) -> None:
    """Put back what was there before `borrow_buffers`."""
    for owner, name, buffer in there:
        owner._buffers[name] = buffer


@contextmanager
def writable_buffers(model: nn.Module) -> Iterator[None]:
    """Inside, expanded buffers, to which `load_state_dict` cannot write, are whole; they take what was written."""
    expanded = [buffer for buffer in buffers_of(model) if repeated_dims(buffer[2])]
    for owner, name, buffer in expanded:
        owner._buffers[name] = buffer.clone()
    try:
        yield
    finally:
        for owner, name, buffer in expanded:
            overwrite(buffer, owner._buffers[name])  # type: ignore[arg-type]
        return_buffers(expanded)


class KeptBuffers:
    """A copy of a model's buffers, to put back what a step that came to nothing has done to them.

    It is taken again when the first forward pass begins, for by then the replicas have all taken rank 0's. A buffer
    that the step has put in another's place, made longer, or made where there was none, is taken away again; one of a
    name that was not there (a grid that the first forward makes) is left, as the model may have noted that it is there,
    unless it holds what is not finite.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        self._there: list[tuple[nn.Module, str, Tensor | None]] = []
        self._kept: list[Tensor] = []  # of those that are there
        self._hook: RemovableHandle | None = None

    def keep(self) -> None:
        """Take the copy."""
        self._copy()
        self._hook = self._model.register_forward_pre_hook(lambda module, inputs: self._copy())

    @torch.no_grad()
    def _copy(self) -> None:
        if self._hook is not None:
            self._hook.remove()  # again, where a rehearsal has put it back with all hooks
        self._there = [(o, name, buffer) for o in self._model.modules() for name, buffer in o._buffers.items()]
        buffers = [buffer for _, _, buffer in self._there if buffer is not None]
        if [(b.shape, b.dtype) for b in buffers] != [(k.shape, k.dtype) for k in self._kept]:
            self._kept = [torch.empty_like(buffer) for buffer in buffers]
        if buffers:
            torch._foreach_copy_(self._kept, buffers)

    @torch.no_grad()
    def restore(self) -> None:
        """Put the copy back."""
        self._take_new_ones()
        kept = iter(self._kept)
        for owner, name, buffer in self._there:
            owner._buffers[name] = buffer
            if buffer is None:
                continue
            value = next(kept)
            if buffer.shape != value.shape:
                buffer.data = value.clone()
            elif not buffer.is_inference():
                overwrite(buffer, value)

    def _take_new_ones(self) -> None:
        known = {(owner, name) for owner, name, _ in self._there}
        for owner in self._model.modules():
            for name, buffer in list(owner._buffers.items()):
                if (owner, name) not in known and buffer is not None and not buffer.isfinite().all():
                    delattr(owner, name)


def share_buffers(model: nn.Module) -> None:
    """Every rank takes the buffers of the job's first rank.

    As with DDP autograd is not told: a pass before may keep a buffer for a backward that comes after this one.
    """
    buffers = [buffer for buffer in model.buffers() if buffer.numel() and not is_sharded(buffer)]
    counted = tuple(buffer for buffer in buffers if not buffer.is_inference())
    with torch.autograd._unsafe_preserve_version_counter(counted):
        share_values(buffers)


def require_whole_buffers(model: nn.Module) -> None:
    """Raises MeshError where one is split, or sparse: ranks and copies take over what the first rank has, whole."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if isinstance(buffer, SpatialTensor):
                raise MeshError(
                    f"the buffer {name} of {type(module).__name__} is a split tensor, which replicas and copies of the "
                    "model cannot take over from the first rank; keep it whole (.full()), or in an attribute that is "
                    "no buffer"
                )
            if buffer is not None and buffer.layout != torch.strided:
                raise MeshError(
                    f"the buffer {name} of {type(module).__name__} is sparse ({buffer.layout}), which cannot be sent "
                    "to other ranks; keep its indices and values as buffers, of which forward makes it"
                )
