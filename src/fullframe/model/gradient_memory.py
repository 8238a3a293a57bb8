"""The memory in which gradients lie: DDP's buckets, what others have kept of them, what users have put into `.grad`."""

import sys
import weakref
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullframe.ranks.waiting import waiting_for_ranks

_CHUNK_NUMBERS = 1 << 22  # of a message in which gradients travel together
_NOBODYS = nn.Parameter(torch.zeros(()))
_NOBODYS.grad = torch.zeros(())  # to which nothing else refers
_NONE = (lambda: None), 0, 0  # in the place of what was made


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
                held[bucket] = _tensors_in(_memory(bucket))
        for parameter, place in self._places.items():
            if parameter.grad is not None and parameter.grad.data_ptr() == place.data_ptr():  # not another's place
                held[place._base] -= 1  # type: ignore[index]
        return held


class Placed:
    """What users have put into `.grad` themselves, pieces of one tensor with all gradients say, or hold of it.

    DDP puts its own in its place when it is made, when it makes its buckets again in a forward pass, and in backward.
    """

    def __init__(self) -> None:
        # By the parameter's id: what torch or DDP has made, its memory, and how many others lay there.
        self._made: dict[int, tuple[weakref.ref[Tensor], int, int]] = {}
        self._placed: dict[nn.Parameter, Tensor] = {}  # what they have not
        self._noted: Collection[nn.Parameter] = ()  # until they are given back

    def note(self, parameters: Collection[nn.Parameter]) -> None:
        """Before any of that."""
        self._placed, self._noted = {}, parameters
        free = sys.getrefcount(_NOBODYS.grad)
        for parameter, (memory, others) in zip(parameters, _others(parameters), strict=True):
            is_held = sys.getrefcount(parameter.grad) > free  # by something in Python, which is to get the next values
            gradient, (made, place, before) = parameter.grad, self._made.get(id(parameter), _NONE)
            is_made = made() is gradient and memory == place and others <= before
            if gradient is not None and (is_held or not is_made):
                self._placed[parameter] = gradient
                self._made.pop(id(parameter), None)

    def give_back(self, *call: Any) -> None:
        """Afterwards, or before a module's `call`: it has DDP's values, and is what lies in `.grad`.

        What else lies there is no one's.
        """
        if call and not torch.is_grad_enabled():  # DDP puts nothing there, and nothing was noted for this call
            return
        (placed, self._placed), (noted, self._noted) = (self._placed, {}), (self._noted, ())
        for parameter, own in placed.items():
            if parameter.grad is not None and parameter.grad is not own:
                parameter.grad = own.copy_(parameter.grad)
        self.remember(noted, placed)

    def until_given_back(self) -> "Noted":
        """To be held for as long as that may be."""
        return Noted(self, self._placed)

    def remember(self, parameters: Collection[nn.Parameter], but: Container[nn.Parameter] = ()) -> None:
        """The gradients of these `but` some were made by torch or DDP."""
        for parameter, others in zip(parameters, _others(parameters), strict=True):
            if parameter.grad is not None and parameter not in but:
                self._made[id(parameter)] = weakref.ref(parameter.grad), *others


class Noted:
    """Lets what was noted be given back where nobody has by the time that it is let go of: after an error."""

    def __init__(self, owner: Placed, placed: dict[nn.Parameter, Tensor]):
        self._owner, self._placed = owner, placed

    def __del__(self) -> None:
        if self._owner._placed is self._placed:
            self._owner.give_back()


def _others(parameters: Iterable[nn.Parameter]) -> list[tuple[int, int]]:
    """The memory of each one's `.grad`, and how many tensors there are no `.grad` of these: views of it, say."""
    gradients = (parameter.grad for parameter in parameters)
    memory = [0 if g is None or g.layout is not torch.strided else _memory(g) for g in gradients]
    others = {each: _tensors_in(each) - own for each, own in Counter(memory).items() if each}
    return [(each, others.get(each, 0)) for each in memory]


def _memory(tensor: Tensor) -> int:
    storage: Any = tensor.untyped_storage()
    return storage._cdata  # type: ignore[no-any-return]


def _tensors_in(memory: int) -> int:
    return torch._C._storage_Use_Count(memory)


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


def means_over_ranks(gradients: list[Tensor]) -> list[Tensor]:
    """The means of a chunk's gradients over all ranks, by one message."""
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients]) / dist.get_world_size()
    with waiting_for_ranks():
        dist.all_reduce(flat)
    means = flat.split([gradient.numel() for gradient in gradients])
    return [mean.view(gradient.shape) for mean, gradient in zip(means, gradients, strict=True)]
