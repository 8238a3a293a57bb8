"""Where the first value that is not finite came from: a parameter, a module's output, or a gradient."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_iter

from fullframe.errors import FullframeError
from fullframe.model.blocks import class_name
from fullframe.model.sharding.values import local_value
from fullframe.ranks.agreement import from_all_ranks
from fullframe.spatial.tensor import local_or_whole

_Found = tuple[int, str] | None  # how early, and what


def origin_of_nonfinite(model: nn.Module, batch: Any, forward: Callable[[], None]) -> str:
    """One sentence that names the first value that is not finite, the same on all ranks.

    All ranks call it, after a step whose gradients are still there. `model` is the plain model, `forward()` runs it
    on `batch` as the step did, but for gradients.
    """
    searches: list[Callable[[], _Found]] = [
        lambda: _first((f"parameter {name}", p) for name, p in model.named_parameters()),
        lambda: _first_output(model, forward),
        lambda: _first((f"the gradient of {name}", p.grad) for name, p in model.named_parameters()),
    ]
    text = "every parameter, module output and gradient is finite, so it is the loss itself"
    for search in searches:
        by_rank = from_all_ranks(search())
        earliest = min((found for found in by_rank if found), default=None)
        if earliest:
            ranks = ", ".join(str(rank) for rank, found in enumerate(by_rank) if found == earliest)
            text = f"the first that is not finite is {earliest[1]} on rank {ranks}"
            break
    leaves, _ = tree_flatten_with_path(batch)
    inputs = _first((f"the batch's {keystr(path)}", leaf) for path, leaf in leaves)
    named = sorted({found[1] for found in from_all_ranks(inputs) if found})
    return text + (f"; {', '.join(named)} is not finite either" if named else "")


def _first_output(model: nn.Module, forward: Callable[[], None]) -> _Found:
    """The first module, in the order in which they finish, whose output is not finite."""
    found: _Found = None
    finished = 0

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            nonlocal finished, found
            finished += 1
            if found is None and any(map(_is_broken, tree_iter(output))):
                found = finished, f"the output of module {name or '(the whole model)'} ({class_name(module)})"

        return look

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.callback(module.register_forward_hook(watch(name)).remove)
        try:
            forward()
        except RuntimeError as error:  # of a loss that asks for gradients (a penalty on them), after the model's part
            if isinstance(error, FullframeError):
                raise
    return found


def _first(values: Iterable[tuple[str, Any]]) -> _Found:
    return next(((number, name) for number, (name, value) in enumerate(values) if _is_broken(value)), None)


def _is_broken(value: Any) -> bool:
    if not isinstance(value, Tensor):
        return False
    tensor = local_value(local_or_whole(value))
    return (tensor.is_floating_point() or tensor.is_complex()) and not bool(torch.isfinite(tensor).all())
