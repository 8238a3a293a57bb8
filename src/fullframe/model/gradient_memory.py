"""The memory in which gradients lie: DDP's buckets, what others have kept of them, what users have put into `.grad`."""

import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

_CHUNK_NUMBERS = 1 << 22  # of a message in which gradients travel together
_NOBODYS = nn.Parameter(torch.zeros(()))
_NOBODYS.grad = torch.zeros(())  # to which nothing else refers


class Buckets:
    """The memory in which DDP keeps gradients, and into which those of the next pass will be written.

    A gradient that someone has kept by reference would change under him. He keeps the memory, and DDP gets other.
    """

    def __init__(self) -> None:
        self._are_made_again = True  # by DDP before the second pass, in the order of the first
        self._places: dict[nn.Parameter, Tensor] = {}  # DDP's own views of its buckets
        self._holders: dict[Tensor, int] = {}  # of a bucket's memory, without the gradients of parameters

    def hand_out(self, arrived: Iterable[nn.Parameter]) -> None:
        """After a pass: what lies in `.grad` is another view than DDP's own, which nobody may keep."""
        for parameter in arrived:
            place, known = parameter.grad, self._places.get(parameter)
            if place is None or place._base is None or (known is not None and place.data_ptr() == known.data_ptr()):
                continue
            self._places[parameter] = place  # DDP's own view, made in this pass
        for parameter, place in self._places.items():
            if parameter.grad is place:
                parameter.grad = place.detach()
        if self._are_made_again:  # nothing is written here any more, and who keeps a gradient keeps the memory
            self._are_made_again = False
            self._places.clear()
        self._holders = self._held()

    def leave_to_holders(self) -> None:
        """Before a pass writes into the buckets."""
        for bucket, holders in self._held().items():
            if holders <= self._holders.get(bucket, 0):
                continue
            places = [place for place in self._places.values() if place._base is bucket]
            where = [(place.shape, place.stride(), place.storage_offset()) for place in places]
            bucket.data = torch.empty_like(bucket)
            for place, shape in zip(places, where, strict=True):
                place.data = bucket.data.as_strided(*shape)

    def _held(self) -> dict[Tensor, int]:
        """By bucket, how many tensors lie in its memory, without the gradients that are `.grad` of a parameter."""
        held: dict[Tensor, int] = {}
        for place in self._places.values():
            bucket = place._base
            if bucket is not None and bucket not in held:
                held[bucket] = _tensors_in(bucket)
        for parameter, place in self._places.items():
            if parameter.grad is not None and _memory(parameter.grad) == _memory(place):
                held[place._base] -= 1  # type: ignore[index]
        return held


class Placed:
    """What users have put into `.grad` themselves, pieces of one tensor with all gradients say, or hold of it.

    DDP puts its own in its place when it is made, when it makes its buckets again in a forward pass, and in backward.
    """

    def __init__(self) -> None:
        self._made: dict[nn.Parameter, tuple[weakref.ref[Tensor], int]] = {}  # by torch or DDP; others in its memory
        self._placed: dict[nn.Parameter, Tensor] = {}  # other ones
        self._noted: Iterable[nn.Parameter] = ()  # until they are given back

    def note(self, parameters: Iterable[nn.Parameter]) -> None:
        """Before any of that."""
        others = _others(parameters)
        for parameter in parameters:
            known = self._made.get(parameter)
            if known is not None and (_is_held(parameter) or others.get(parameter, 0) > known[1]):
                del self._made[parameter]
        self._placed = {p: p.grad for p in parameters if p.grad is not None and not self._has_made(p, p.grad)}
        self._noted = parameters

    def give_back(self, *call: Any) -> None:
        """Afterwards, or before a module's `call`: it has DDP's values, and is what lies in `.grad`.

        What else lies there is no one's.
        """
        if call and not torch.is_grad_enabled():  # DDP puts nothing there, and nothing was noted for this call
            return
        self.remember(parameter for parameter in self._noted if parameter not in self._placed)
        for parameter, own in self._placed.items():
            if parameter.grad is not None and parameter.grad is not own:
                parameter.grad = own.copy_(parameter.grad)
        self._placed, self._noted = {}, ()

    def until_given_back(self) -> "Noted":
        """To be held for as long as that may be."""
        return Noted(self, self._placed)

    def remember(self, parameters: Iterable[nn.Parameter]) -> None:
        """The gradients of these were made by torch or DDP."""
        others = _others(parameters := list(parameters))
        for parameter in parameters:
            if parameter.grad is not None:
                self._made[parameter] = weakref.ref(parameter.grad), others.get(parameter, 0)

    def _has_made(self, parameter: nn.Parameter, gradient: Tensor) -> bool:
        made = self._made.get(parameter)
        return made is not None and made[0]() is gradient


class Noted:
    """Lets what was noted be given back where nobody has by the time that it is let go of: after an error."""

    def __init__(self, owner: Placed, placed: dict[nn.Parameter, Tensor]):
        self._owner, self._placed = owner, placed

    def __del__(self) -> None:
        if self._owner._placed is self._placed:
            self._owner.give_back()


def _is_held(parameter: nn.Parameter) -> bool:
    """Whether something in Python refers to what lies in its `.grad`, which is to get the next values too."""
    return sys.getrefcount(parameter.grad) > sys.getrefcount(_NOBODYS.grad)


def _others(parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, int]:
    """How many tensors lie in the memory of each one's `.grad` that are no `.grad` of these: views of it, say."""
    with_memory = [p for p in parameters if p.grad is not None and p.grad.layout is torch.strided]
    gradients = Counter(_memory(p.grad) for p in with_memory)  # type: ignore[arg-type]
    return {p: _tensors_in(p.grad) - gradients[_memory(p.grad)] for p in with_memory}  # type: ignore[arg-type]


def _memory(tensor: Tensor) -> int:
    storage: Any = tensor.untyped_storage()
    return storage._cdata  # type: ignore[no-any-return]


def _tensors_in(bucket: Tensor) -> int:
    storage: Any = bucket.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata)


def chunks(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Parameters of one dtype and device whose gradients make a message."""
    chunk: list[nn.Parameter] = []
    for parameter in parameters:
        other = chunk and (parameter.dtype, parameter.device) != (chunk[0].dtype, chunk[0].device)
        if other or sum(p.numel() for p in chunk) > _CHUNK_NUMBERS:
            yield chunk
            chunk = []
        chunk.append(parameter)
    if chunk:
        yield chunk
