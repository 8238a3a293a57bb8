"""What goes from iteration to iteration: its tensors and form, and what can be wrong with it.

A state is a tensor or a tree of tensors (tuples, lists, dicts).
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from fullframe.errors import DeviceError, GradientError
from fullframe.ranks.tags import line
from fullframe.spatial.tensor import local_or_whole

_MOST_NODES = 200  # of the state's graph that are looked through for an earlier result
_MADE_AT = "fullframe: unrolled at"


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors of a state."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def form_of(tree: Any) -> tuple[Any, list[Any]]:
    """What no iteration changes: how it is nested, in whatever order dicts have their keys, and the shapes."""
    leaves, spec = tree_flatten(_in_order(tree))
    return spec, [tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves]


def _in_order(tree: Any) -> Any:
    """The same with the keys of dicts in one order."""
    if type(tree) is dict:
        return {key: _in_order(tree[key]) for key in sorted(tree, key=repr)}
    return type(tree)(map(_in_order, tree)) if type(tree) in (tuple, list) else tree


def told(form: tuple[Any, list[Any]], other: tuple[Any, list[Any]]) -> str:
    """A state's form, as far as it differs from another's."""
    if form[0] != other[0]:
        return f"{len(form[1])} parts ({form[0]})"
    number = next(number for number, (a, b) in enumerate(zip(form[1], other[1], strict=True)) if a != b)
    return f"shape {form[1][number]}" + (f" (part {number})" if len(form[1]) > 1 else "")


def moved(tree: Any, device: torch.device) -> Any:
    """The tree with its tensors on the device."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), tree)


def require_device(block: nn.Module, state: torch.device) -> None:
    """Raises DeviceError where weights and state are on different devices."""
    parameter = next(block.parameters(), None)
    if parameter is not None and parameter.device != state:
        raise DeviceError(
            f"the state is on {state} and the weights of {type(block).__name__} on {parameter.device}; move one of "
            "them, or give unroll the devices: placement=[...]"
        )


def note_made(tensors: Sequence[Tensor]) -> None:
    """Remember with the graph of a result which line of the user's has made it, for `require_live`."""
    for tensor in tensors:
        node: Any = local_or_whole(tensor).grad_fn
        if node is not None:
            node.metadata[_MADE_AT] = line()


def require_live(tensors: Sequence[Tensor]) -> None:
    """Raises GradientError where the state hangs on an earlier result whose graph a backward pass has freed."""
    for tensor in tensors:
        nodes: deque[Any] = deque([local_or_whole(tensor).grad_fn])
        seen, made_at = 0, ""
        while nodes and seen < _MOST_NODES:
            node = nodes.popleft()
            if node is None:
                continue
            seen += 1
            made_at = made_at or node.metadata.get(_MADE_AT, "")
            if made_at and _is_freed(node):
                raise GradientError(
                    f"the state hangs on the result of an earlier call at {made_at}, whose graph a backward pass has "
                    "freed, so the next one would end with 'Trying to backward through the graph a second time'; "
                    "give unroll state.detach() to start anew from its values, or call backward once, on the sum of "
                    "the losses"
                )
            nodes += [following for following, _ in node.next_functions]


def _is_freed(node: Any) -> bool:
    """Whether backward has let go of what the node saved; a node that saves nothing cannot tell.

    What is there is not unpacked: that of a recomputed block would be computed for it, with the block's messages.
    """
    try:
        for name in dir(node):
            if name.startswith("_raw_saved_"):
                saved = getattr(node, name)
                if getattr(saved, "data", saved) is None:  # freed, or never there
                    getattr(node, name.removeprefix("_raw"))
    except RuntimeError:
        return True
    return False
