"""What was put into a place: how many bytes, how many autograd nodes, of what kind, and its tensors."""

import gc
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import _lru_cache_wrapper as lru_cache_wrapper
from itertools import islice
from types import FunctionType
from typing import Any

import numpy as np
from torch import Tensor, nn

from fullframe.observation.leaks.graph import nodes_since, saved_tensors
from fullframe.observation.leaks.walk import Spot, built_in, inside, plain, size_of

_DEPTH = 6
_OBJECTS = 5_000


@dataclass(frozen=True, kw_only=True)
class Weight:
    """What one step has put into a place.

    what:    "tensor", "array", "function" or "object": the first of these that is among it
    tensors: the largest ones first
    """

    bytes: int
    nodes: int
    what: str
    tensors: tuple[Tensor, ...]


def new_elements(container: Any, before: int) -> list[Any]:
    """What was put last into a container that had `before` elements, where that can be told."""
    if isinstance(container, lru_cache_wrapper):
        of_results = (found for found in gc.get_referents(container) if isinstance(found, dict))
        size = container.cache_info().currsize
        results = next((found for found in of_results if len(found) == size), {})
        return list(islice(reversed(results.items()), size - before))
    count, own = size_of(container) - before, built_in(type(container))
    if own is dict:
        return list(islice(reversed(dict.values(container)), count))
    if own is set:
        return list(islice(set.__iter__(container), count))
    return [own.__getitem__(container, -number) for number in range(1, count + 1)]


def weigh(values: list[Any], sequence: int) -> Weight:
    """What these values hold, graphs from node number `sequence` on; functions with what they capture."""
    storages: dict[int, int] = {}
    tensors, nodes, others, kinds = list[Tensor](), set[Any](), 0, set[str]()
    for value in _reached(values):
        if isinstance(value, Tensor):
            held = plain(value)
            if isinstance(held, nn.Parameter):
                continue
            kinds.add("tensor")
            tensors.append(value)
            nodes.update(nodes_since(held.grad_fn, sequence) if held.grad_fn is not None else ())
            _count(held, storages)
        elif isinstance(value, np.ndarray):
            kinds.add("array")
            base: Any = value
            while isinstance(base, np.ndarray) and base.base is not None:
                base = base.base
            if isinstance(base, Tensor):
                _count(base, storages)
            else:
                others += value.nbytes
        else:
            kinds.add("function" if isinstance(value, FunctionType) else "object")
            others += sys.getsizeof(value, 0)
    for node in islice(nodes, _OBJECTS):
        for saved in saved_tensors(node):
            _count(saved, storages)
    first = next((kind for kind in ("function", "tensor", "array") if kind in kinds), "object")
    largest = tuple(sorted(tensors, key=lambda tensor: -plain(tensor).numel()))
    return Weight(bytes=sum(storages.values()) + others, nodes=len(nodes), what=first, tensors=largest)


def _count(tensor: Tensor, storages: dict[int, int]) -> None:
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return
    storages[storage._cdata] = storage.nbytes()


def _reached(values: list[Any]) -> Iterator[Any]:
    spot = Spot(None, "", 0)
    stack, seen = [(value, 0) for value in values], set[int]()
    while stack and len(seen) < _OBJECTS:
        value, depth = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        if depth < _DEPTH and not isinstance(value, nn.Module):
            stack += [(one, depth + 1) for one, _, _ in inside(value, type(value), spot)]
