"""Other tensors in the place of a module's parameters and buffers, for a while."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn


@contextmanager
def lent(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, `module` has `tensors`, by name, in the place of its own, wherever it holds those.

    `torch.func.functional_call` does the same, and leaves them in modules that are registered under two names.
    """
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    instead = {id(own[name]): tensor for name, tensor in tensors.items()}
    places = [
        (table, name, value)
        for each in module.modules()
        for table in (each._parameters, each._buffers)
        for name, value in table.items()
        if id(value) in instead
    ]
    try:
        for table, name, value in places:
            table[name] = instead[id(value)]  # type: ignore[assignment]
        yield
    finally:
        for table, name, value in places:
            table[name] = value  # type: ignore[assignment]
