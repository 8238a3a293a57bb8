"""What wants numbers of fake tensors at once: arrays (SciPy's matching, metrics), text, `torch.tensor` of a list."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fullframe.simulation.fake.numbers import forget, known
from fullframe.simulation.fake.replaced import replaced


@contextmanager
def arrays_of_fakes(numbers: Callable[[FakeTensor], Tensor]) -> Iterator[None]:
    """Inside, a fake tensor's array is that of `numbers(tensor)`; what decides of nothing gets a 1 in its place.

    That are a number in a text (`f"{loss:.3f}"`), and one in a list of which `torch.tensor` makes a tensor.
    """

    def numpy(fake: FakeTensor, *, force: bool = False) -> Any:
        values = numbers(fake)
        with torch._C._DisableTorchDispatch():
            return values.numpy(force=force)

    def formatted(fake: FakeTensor, spec: str) -> str:
        if fake.dim():
            return object.__format__(fake, spec)
        with torch._C._DisableTorchDispatch():
            return format(_one(fake).item(), spec)

    with (
        replaced(FakeTensor, "numpy", numpy),
        replaced(FakeTensor, "__format__", formatted),
        replaced(torch, "tensor", partial(_made, torch.tensor)),
        replaced(torch, "as_tensor", partial(_made, torch.as_tensor)),
    ):
        yield


def _made(make: Callable[..., Tensor], data: Any, *args: Any, **kwargs: Any) -> Tensor:
    unknown = list[Tensor]()

    def number(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [number(each) for each in value]
        if not isinstance(value, FakeTensor) or value.numel() != 1:
            return value
        if known(value) is None:
            unknown.append(value)
        return _one(value)

    made = make(number(data) if isinstance(data, (list, tuple)) else data, *args, **kwargs)
    if unknown:
        forget(made)
    return made


def _one(fake: Tensor) -> Tensor:
    """A real tensor of the one number of a fake tensor where it is known, else of a 1."""
    values = known(fake)
    with torch._C._DisableTorchDispatch():
        return torch.ones(fake.shape, dtype=fake.dtype) if values is None else values
