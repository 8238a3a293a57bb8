"""The autograd graph that a tensor holds: how far back it reaches, how many nodes it has, what they saved."""

import heapq
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_STEPS = 400  # nodes that are looked at on the way back
_NODES = 50_000
_ACCUMULATES = 2**63  # nodes of parameters have no number of their own, but the largest there is

next_number = torch._C._autograd._get_sequence_nr


def oldest_node(node: Any, newest: int) -> int:
    """The smallest number of a node that was found on the way back, always from the oldest one known."""
    oldest: int = min(node._sequence_nr(), newest)
    heap, seen, taken = [(oldest, 0, node)], {node}, 0
    while heap and taken < _STEPS:
        number, _, node = heapq.heappop(heap)
        oldest = min(oldest, number)
        for other, _ in node.next_functions:
            if other is not None and other not in seen:
                taken += 1
                number = other._sequence_nr()
                if number < _ACCUMULATES:
                    seen.add(other)
                    heapq.heappush(heap, (number, taken, other))
    return oldest


def nodes_since(node: Any, number: int) -> list[Any]:
    """The nodes of a graph that were made from `number` on."""
    stack, found = [node], {node}
    while stack and len(found) < _NODES:
        for other, _ in stack.pop().next_functions:
            if other is not None and other not in found and number <= other._sequence_nr() < _ACCUMULATES:
                found.add(other)
                stack.append(other)
    return [node for node in found if node._sequence_nr() >= number]


def saved_tensors(node: Any) -> Iterator[Tensor]:
    """What a node keeps for backward; nothing once backward has freed it."""
    for name in dir(node):
        if name.startswith("_saved_") or name == "saved_tensors":
            try:
                value = getattr(node, name)
            except RuntimeError:  # freed
                return
            yield from (one for one in (value if isinstance(value, tuple | list) else (value,)) if _is_plain(one))


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, torch.nn.Parameter)
