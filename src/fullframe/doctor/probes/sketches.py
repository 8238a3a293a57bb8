"""Tensors in a few numbers, and how much of the autograd graph is alive."""

import gc
import sys
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from fullframe.data.nested import tensors_in
from fullframe.doctor.probes.notes import Sketch
from fullframe.model.sharding.values import local_value, shard_of
from fullframe.spatial.gradients import graph_behind

_HERE = "/fullframe/doctor/"
_SAMPLE = 16
_SETTLED = 4  # steps, after which growth is a leak's
_MOST_NODES = 100_000
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
_CHECKED_ELEMENTS = 1 << 16  # of each tensor of a batch


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a parameter or gradient."""
    plain = local_value(tensor).detach().resolve_conj()
    return plain.coalesce().values() if plain.is_sparse else plain


def part_of(tensor: Tensor) -> str:
    """Which part of a sharded tensor this rank holds: ranks that name the same part must hold the same."""
    return "".join(f"[{dim}:{at}]" for dim, at in shard_of(tensor))


def sketch(tensor: Tensor) -> Sketch:
    """Checksum, 2-norm and some elements."""
    flat = local(tensor).reshape(-1)
    if not flat.numel():
        return Sketch(0, 0.0, ())
    real = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    every = max(real.numel() // _SAMPLE, 1)
    sample = tuple(real[::every][:_SAMPLE].double().tolist())
    numbers = real if real.is_floating_point() else real.double()
    return Sketch(checksum(real), float(torch.linalg.vector_norm(numbers, dtype=torch.float64)), sample)


def checksum(tensor: Tensor) -> int:
    """The sum of the elements, their bits read as whole numbers."""
    flat = local(tensor).reshape(-1)
    real = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    words = real.view(_WORDS[real.element_size()])
    return int(words.sum(dtype=torch.int64)) if real.numel() else 0


def checksum_of_batch(batch: Any) -> int:
    """Of all tensors in a nested batch, and of their shapes."""
    total = 0
    for number, tensor in enumerate(tensors_in(batch), start=1):
        flat = local(tensor).reshape(-1)[:_CHECKED_ELEMENTS].contiguous()
        total = (total * 31 + number * checksum(flat) + hash(tuple(tensor.shape))) % (2**61 - 1)
    return total


def graph(*starts: Any) -> Iterator[Any]:
    """The nodes of the graphs behind some `grad_fn`, at most 100,000."""
    return islice(graph_behind(starts), _MOST_NODES)


def graph_nodes(*starts: Any) -> int:
    """How many they are."""
    return sum(1 for _ in graph(*starts))


class LiveGraphs:
    """How much of the graph is still held by Python's tensors at the end of each step, and by whom."""

    def __init__(self) -> None:
        self._before: list[weakref.ref[Tensor]] = []
        self._nodes = self._counts = 0

    def count(self) -> tuple[int, str]:
        """Nodes that are alive, and what holds a tensor that was there at the last count too; "" for nothing."""
        kinds = {Tensor, *_subclasses(Tensor)}  # a look-up is faster than to ask for every object
        alive = [found for found in gc.get_objects() if type(found) in kinds and _has_graph(found)]
        old = {id(tensor) for reference in self._before if (tensor := reference()) is not None}
        self._before = [weakref.ref(tensor) for tensor in alive]
        nodes = graph_nodes(*(tensor.grad_fn for tensor in alive))
        self._counts += 1
        grown, self._nodes = nodes > self._nodes, nodes
        if not grown or self._counts < _SETTLED:
            return nodes, ""
        likely = sorted(reversed(alive), key=lambda one: (-graph_nodes(one.grad_fn), id(one) not in old))
        names = (_holder(tensor) for tensor in likely[:8])
        return nodes, next(filter(None, names), "")


def _subclasses(kind: type) -> Iterator[type]:
    children: list[type] = kind.__subclasses__()
    for child in children:
        yield child
        yield from _subclasses(child)


def _has_graph(tensor: Tensor) -> bool:
    try:
        return tensor.grad_fn is not None
    except (RuntimeError, ReferenceError):  # a dead proxy, a tensor in the making
        return False


def _holder(tensor: Tensor) -> str:
    """A name under which `tensor`, or a container that has it, can be found; "" where there is none."""
    containers = [found for found in gc.get_referrers(tensor) if isinstance(found, (list, tuple, set, dict, deque))]
    return next(filter(None, (_name_of(wanted) for wanted in (*containers, tensor))), "")


def _name_of(wanted: object, depth: int = 1) -> str:
    """A variable of the running functions, of a module or of an object that is `wanted`."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if _HERE not in frame.f_code.co_filename:
            for name in _keys(frame.f_locals, wanted):
                return f"{name} in {frame.f_code.co_name}, {frame.f_code.co_filename}"
        frame = frame.f_back
    for owner in gc.get_referrers(wanted):
        if isinstance(owner, dict):
            for name in _keys(owner, wanted):
                if "__name__" in owner:
                    return f"{name} of the module {owner['__name__']}"
                for holder in gc.get_referrers(owner):
                    if getattr(holder, "__dict__", None) is owner:
                        return f"{type(holder).__name__}.{name}"
                if depth:
                    return _name_of(owner, depth - 1)
        elif hasattr(owner, "__dict__"):
            for name in _keys(vars(owner), wanted):
                return f"{type(owner).__name__}.{name}"
    return ""


def _keys(names: Mapping[Any, Any], wanted: object) -> list[str]:
    return [str(name) for name, value in names.items() if value is wanted and not str(name).startswith("__")]
