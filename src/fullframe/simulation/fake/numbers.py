"""What is known of the numbers in small fake tensors: of axes, sizes, strides that a program puts there to read them.

Known are those that are made of sizes and of Python's numbers, drawn ones, those of a model's buffers, and what is
computed of known ones. A view knows what its base knows; both have their numbers in one memory, which ends to be known
when it is written to from elsewhere.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_iter

FEW = 1024  # elements
_UNSET = ("empty", "new_empty", "resize", "set_")  # ops that make tensors without numbers, or of others' memory


DRAWN = "what a step does depends on numbers that it draws: another step may take more, or less"


class _Memory:
    """Of numbers that are known, until something else is written there; whether they follow from drawn ones."""

    def __init__(self, is_drawn: bool = False) -> None:
        self.is_known, self.is_drawn = True, is_drawn


class _Known(NamedTuple):
    values: Tensor
    memory: _Memory


def known(tensor: Tensor) -> Tensor | None:
    """The numbers of a fake tensor, or of a small real one; None where they are not known."""
    if not isinstance(tensor, FakeTensor):
        return tensor if tensor.numel() <= FEW and tensor.is_cpu and type(tensor) is Tensor else None
    found: _Known | None = getattr(tensor, "_fullframe_known", None)
    return found.values if found is not None and found.memory.is_known else None


def know(fake: Tensor, values: Tensor, of: Sequence[Any] = (), drawn: bool = False) -> None:
    """Say what numbers a fake tensor has, if they are few; `of` are the fakes that may have its memory."""
    if values.numel() > FEW or not values.is_cpu or not isinstance(fake, FakeTensor):
        return
    place = values.untyped_storage()._cdata
    memories = (each._fullframe_known.memory for each in _known_ones(of) if _place(each) == place)
    memory = next(memories, None) or _Memory(drawn or are_drawn(of))
    fake._fullframe_known = _Known(values, memory)  # type: ignore[attr-defined]


def take(tensor: Tensor, values: Tensor) -> None:
    """As `raw_bytes.take`: the first rank, too, knows what this one does."""
    held: _Known | None = getattr(tensor, "_fullframe_known", None)
    is_known = held is not None and held.memory.is_known
    tensor.copy_(values)
    if held is not None:
        held.memory.is_known = is_known


def are_drawn(tree: Any) -> bool:
    """Whether any known numbers in nested values follow from drawn ones."""
    return any(each._fullframe_known.memory.is_drawn for each in _known_ones(tree))


def numbers_of(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]] | None:
    """The arguments with numbers in the place of fake tensors; None where one's are not known."""
    for arg in args:
        if isinstance(arg, FakeTensor) and "_fullframe_known" not in arg.__dict__:
            return None  # as of most, and at once
    try:
        return [_number(arg) for arg in args], {name: _number(arg) for name, arg in kwargs.items()}
    except NotKnown:
        return None


def computed(func: Any, numbers: tuple[list[Any], dict[str, Any]]) -> Any:
    """What an op gives of known numbers, unseen by any mode; raises NotKnown where the CPU has no such kernel, say."""
    try:
        with torch._C._DisableTorchDispatch():
            return func(*numbers[0], **numbers[1])
    except Exception as error:
        raise NotKnown from error


def follow(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], numbers: tuple[list[Any], dict[str, Any]] | None, out: Any
) -> None:
    """After an op that gave `out`: what is known of that, and of what the op has written to."""
    if func is torch.ops.c10d.broadcast_.default:
        return  # the first rank, too, knows what this one does
    if _writes_unsaid(func):
        forget([args, kwargs])
    elif written := written_by(func):
        into = [args[n] if n < len(args) else kwargs.get(name) for n, name in written]
        if not _follow_into(func, args, kwargs, into, numbers):
            forget(into)
    elif numbers is not None and _is_few(out) and not _is_unset(func, kwargs):
        with suppress(NotKnown):
            for fake, values in zip(tree_iter(out), tree_iter(computed(func, numbers)), strict=True):
                if isinstance(fake, Tensor):
                    know(fake, values, args, _is_drawing(func))


def _follow_into(
    func: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    into: list[Any],
    numbers: tuple[list[Any], dict[str, Any]] | None,
) -> bool:
    """Whether what an op has written to fake tensors could be written to their numbers, and so to those of views."""
    whole = any(isinstance(each, Tensor) and not isinstance(each, FakeTensor) for each in tree_iter(into))
    if numbers is None or whole or torch.Tag.inplace_view in func.tags or _is_unset(func, kwargs):
        return False
    try:
        computed(func, numbers)
    except NotKnown:
        return False
    if _is_drawing(func) or are_drawn(args):
        for fake in _known_ones(into):
            fake._fullframe_known.memory.is_drawn = True
    return True


class NotKnown(Exception):
    """The numbers that an op gives are not known."""


def _number(value: Any) -> Any:
    if isinstance(value, Tensor):
        found = known(value)
        if found is None:
            raise NotKnown
        return found
    return [_number(each) for each in value] if type(value) in (list, tuple) else value


def _known_ones(tree: Any) -> Iterator[Any]:
    for leaf in tree_iter(tree):
        if isinstance(leaf, FakeTensor) and known(leaf) is not None:
            yield leaf


def _place(fake: Any) -> int:
    return fake._fullframe_known.values.untyped_storage()._cdata  # type: ignore[no-any-return]


def forget(tree: Any) -> None:
    """The numbers of the fake tensors in nested values are not known any more."""
    for fake in _known_ones(tree):
        fake._fullframe_known.memory.is_known = False


def _is_few(out: Any) -> bool:
    sizes = [leaf.numel() for leaf in tree_iter(out) if isinstance(leaf, Tensor)]
    return len(sizes) > 0 and max(sizes) <= FEW


def _is_unset(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether it gives no numbers of its own, or draws them from a generator that is not to be disturbed."""
    return kwargs.get("generator") is not None or func._opname.startswith((*_UNSET, "lift"))


@functools.cache
def _is_drawing(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


@functools.cache
def written_by(func: Any) -> list[tuple[int, str]]:
    """The arguments that an op says it writes to, by place and name."""
    arguments = enumerate(func._schema.arguments)
    return [(n, a.name) for n, a in arguments if a.alias_info is not None and a.alias_info.is_write]


@functools.cache
def _writes_unsaid(func: Any) -> bool:
    """Whether it may write to more than it says: messages, and running averages."""
    return func.namespace not in ("aten", "prim") or func._opname.endswith("batch_norm")
