"""Which parameters of a model are trained now, as users freeze, add and replace some; none may be lazy."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fullframe.errors import GradientError, ShapeError

Trained = dict[nn.Parameter, tuple[torch.dtype, torch.device]]  # torch takes hooks like DDP's off where these change


def trained(model: nn.Module) -> tuple[Trained, list[nn.Parameter]]:
    """The parameters that get a gradient, and the others; quicker than `model.parameters()`."""
    found: Trained = {}
    others: dict[nn.Parameter, None] = {}
    modules, seen = [model], {model}
    while modules:
        module = modules.pop()
        for parameter in module._parameters.values():
            if parameter is None:
                continue
            if parameter.requires_grad and not parameter.is_inference():
                found[parameter] = parameter.dtype, parameter.device
            else:
                others[parameter] = None
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                modules.append(child)
    return found, list(others)


def sparse_tables(model: nn.Module) -> dict[str, nn.Embedding | nn.EmbeddingBag]:
    """The modules by name whose weight is trained by sparse gradients."""
    every = ((name, each) for name, each in model.named_modules() if isinstance(each, (nn.Embedding, nn.EmbeddingBag)))
    return {name: each for name, each in every if each.sparse and each.weight.requires_grad}


def overlapping(named: Iterable[tuple[str, Tensor]]) -> str:
    """What shares memory with a parameter, in words, as after `one.data = other.data`; "" where each has its own.

    Parts of one memory that do not overlap are their own, and other tensors may share theirs with each other.
    """
    spans = defaultdict(list)
    for name, tensor in named:
        if type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and tensor.numel():
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            first, each = int(tensor.storage_offset()), tensor.element_size()
            storage: Any = tensor.untyped_storage()
            is_parameter = isinstance(tensor, nn.Parameter) or tensor.requires_grad
            spans[storage._cdata].append((first * each, (first + last + 1) * each, name, is_parameter))
    for shared in map(sorted, spans.values()):
        ends = {True: (0, ""), False: (0, "")}  # of parameters and others that begin before
        for begin, end, name, is_parameter in shared:
            for kind, (before, other) in ends.items():
                if begin < before and (kind or is_parameter):
                    return f"{other} and {name} share their memory"
            ends[is_parameter] = max(ends[is_parameter], (end, name))
    return ""


@contextmanager
def frozen(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Inside, DDP leaves them out; some may be frozen already."""
    before = [parameter.requires_grad for parameter in parameters]
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter, was in zip(parameters, before, strict=True):
            parameter.requires_grad_(was)


def late(model: nn.Module, parameters: Iterable[nn.Parameter], fault: str) -> GradientError:
    """What to say of parameters that none of the model's calls has shown; `fault` is what came of it."""
    unknown = set(parameters)
    names = ", ".join(name for name, parameter in model.named_parameters() if parameter in unknown)
    return GradientError(
        f"{names}: trained only since the model was last called, of which parts have been called on their own since; "
        f"{fault}. Call the model as a whole once after such a change, before parts of it"
    )


def require_shapes(model: nn.Module) -> None:
    """Raises ShapeError for lazy parameters, whose shapes the first call of the model is to decide."""
    if lazy := [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if is_lazy(tensor)]:
        raise ShapeError(
            f"{', '.join(lazy[:3])} {'is' if len(lazy) == 1 else 'are'} lazy, and without a shape until the "
            "first call; call the model on a small whole sample before fullframe.parallelize"
        )
