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

    def numpy(fake: FakeTensor, *, force: bool = False) -> Any:
        values = numbers(fake)
        with torch._C._DisableTorchDispatch():
            return values.numpy(force=force)

    with replaced(FakeTensor, "numpy", numpy):
        yield
