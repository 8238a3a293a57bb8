"""What ranks along one axis send each other of whole tensors and plain objects: from stage to stage, or to all.

Through the channel as every message is: a rank that runs another program, or meets an error, is found by who waits.
Where the other ranks are not real, as in a simulation, what comes from them is like what this rank has.
"""

import pickle
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fullframe.ranks.channel import announce
from fullframe.ranks.collectives import all_gather_no_grad, device_of_facts
from fullframe.ranks.exchange import InFlight, Message
from fullframe.ranks.hearing import arrived
from fullframe.ranks.memory_format import memory_format_of
from fullframe.ranks.mesh import Axis

T = TypeVar("T")


class Form(NamedTuple):
    """What is known of a tensor before it is there."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    memory_format: torch.memory_format
    on_host: bool = False  # also where messages go between GPUs

    @classmethod
    def of(cls, tensor: Tensor) -> "Form":
        return cls(tuple(tensor.shape), tensor.dtype, memory_format_of(tensor), tensor.is_cpu)

    def empty(self, device: torch.device) -> Tensor:
        """A tensor of this form, to be written to; `device` is that of what is not on the host."""
        place = "cpu" if self.on_host else device
        return torch.empty(self.shape, dtype=self.dtype, device=place, memory_format=self.memory_format)


def are_real(axis: Axis) -> bool:
    """Whether the other ranks of the axis are there."""
    return axis.channel.tagged or axis.size == 1


def send(axis: Axis, peer: int, tensors: Sequence[Tensor], kind: str) -> InFlight:
    """Send tensors to the rank with coordinate `peer`, which knows their forms; wait for the result in due course."""
    return InFlight(axis, [Message(peer, tensor.detach()) for tensor in tensors], [], kind)


def receive(axis: Axis, peer: int, forms: Sequence[Form], kind: str, device: torch.device) -> list[Tensor]:
    """What `send` sends, on this device or, where it was there, on the host."""
    return InFlight(axis, [], [Message(peer, form.empty(device)) for form in forms], kind).wait()


def send_some(axis: Axis, peer: int, tensors: Sequence[Tensor | None], kind: str) -> list[InFlight]:
    """Send those that are there to the rank with coordinate `peer`, which knows the forms of all."""
    there = torch.tensor([tensor is not None for tensor in tensors], dtype=torch.uint8, device=_place(axis))
    flags = [send(axis, peer, [there], f"flags of {kind}")] if are_real(axis) else []
    return [*flags, send(axis, peer, [tensor for tensor in tensors if tensor is not None], kind)]


def receive_some(axis: Axis, peer: int, forms: Sequence[Form], kind: str, device: torch.device) -> list[Tensor | None]:
    """What `send_some` sends, None where there is nothing; in a simulation all."""
    there = [1] * len(forms)
    if are_real(axis):
        of_flags = Form((len(forms),), torch.uint8, torch.contiguous_format)
        there = _facts(axis, peer, of_flags, f"flags of {kind}").tolist()
    wanted = [form for form, is_there in zip(forms, there, strict=True) if is_there]
    came = iter(receive(axis, peer, wanted, kind, device))
    return [next(came) if is_there else None for is_there in there]


def send_object(axis: Axis, peer: int, value: Any, kind: str) -> InFlight:
    """Send a plain object, pickled, to the rank with coordinate `peer`."""
    raw = _raw(value, axis)
    size = torch.tensor([raw.numel()], device=raw.device)
    send(axis, peer, [size], f"size of {kind}").wait()
    return send(axis, peer, [raw], kind)


def receive_object(axis: Axis, peer: int, kind: str) -> Any:
    """What `send_object` sends."""
    size = _facts(axis, peer, Form((1,), torch.int64, torch.contiguous_format), f"size of {kind}")
    form = Form((int(size),), torch.uint8, torch.contiguous_format)
    return pickle.loads(bytes(_facts(axis, peer, form, kind).cpu().numpy()))


def _facts(axis: Axis, peer: int, form: Form, kind: str) -> Tensor:
    """What the rank with coordinate `peer` sends for the host to read."""
    (came,) = receive(axis, peer, [form], kind, torch.device(_place(axis)))
    return arrived(came, axis.channel)


def objects_of_all(axis: Axis, value: T) -> list[T]:
    """A plain object of every rank of the axis, by coordinate."""
    if axis.size == 1 or not are_real(axis):
        return [value] * axis.size
    raw = _raw(value, axis)
    size = torch.tensor([raw.numel()], device=raw.device)
    sizes = arrived(all_gather_no_grad(size, axis.group, "sizes of what stages say"), axis.channel)
    padded = raw.new_zeros(int(sizes.max()))
    padded[: raw.numel()] = raw
    everyone = all_gather_no_grad(padded, axis.group, "what stages say").cpu().numpy()
    return [pickle.loads(bytes(one[: int(size)])) for one, size in zip(everyone, sizes, strict=True)]


def flags_of_any(axis: Axis, flags: Sequence[bool], elsewhere: Sequence[bool] | None = None) -> list[bool]:
    """For each flag whether it is set on any rank of the axis; on ranks that are not real as `elsewhere` says."""
    if not are_real(axis):
        return list(elsewhere or flags)
    if axis.size == 1 or not flags:
        return list(flags)
    mine = torch.tensor(flags, dtype=torch.uint8, device=_place(axis))
    everyone = arrived(all_gather_no_grad(mine, axis.group, "flags of stages"), axis.channel)
    return [bool(flag) for flag in everyone.amax(0).tolist()]


def from_one(axis: Axis, owner: int, tensors: Sequence[Tensor], forms: Sequence[Form], device: Any) -> list[Tensor]:
    """The tensors of the rank with coordinate `owner`, on all ranks of the axis."""
    kind = f"results of stage {owner}"
    if axis.coordinate != owner:
        return receive(axis, owner, forms, kind, device)
    others = [peer for peer in range(axis.size) if peer != owner]
    InFlight(axis, [Message(peer, t.detach()) for peer in others for t in tensors], [], kind).wait()
    return list(tensors)


def summed_at(axis: Axis, owner: int, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The sums over the ranks of the axis, at the one with coordinate `owner`; the others keep their own."""
    kind = f"gradients of the results of stage {owner}"
    if axis.coordinate != owner:
        send(axis, owner, tensors, kind).wait()
        return list(tensors)
    totals = list(tensors)
    for peer in range(axis.size):
        if peer != owner:
            others = receive(axis, peer, [Form.of(t) for t in tensors], kind, tensors[0].device) if tensors else []
            totals = [total + other for total, other in zip(totals, others, strict=True)]
    return totals


class telling_others(AbstractContextManager[None]):
    """An error inside is this stage's alone: the ranks that wait for it learn of it."""

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception):
            announce(error, even_ours=True)


def _raw(value: Any, axis: Axis) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(_place(axis))


def _place(axis: Axis) -> Any:
    """Where messages of what the host knows lie: where they are sent, that `arrived` may wait for them."""
    return axis.channel.device or device_of_facts(axis.group, "cuda")
