"""`x.numpy()` of a fake tensor, which torch refuses: matching by SciPy wants arrays, and so do metrics."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fullframe.simulation.fake.replaced import replaced


@contextmanager
def arrays_of_fakes(numbers: Callable[[FakeTensor], Tensor]) -> Iterator[None]:
    """Inside, a fake tensor's array is that of `numbers(tensor)`."""
    array_of: Any = Tensor.numpy

    def numpy(tensor: Tensor, *, force: bool = False) -> Any:
        if not isinstance(tensor, FakeTensor):
            return array_of(tensor, force=force)
        values = numbers(tensor)
        with torch._C._DisableTorchDispatch():
            return array_of(values, force=force)

    with replaced(Tensor, "numpy", numpy):
        yield
