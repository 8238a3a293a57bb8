"""Torch functions on split tensors, told to the clock: Python's share of a step."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fullframe.simulation.clock.roofline import StepClock
from fullframe.simulation.fake.replaced import replaced
from fullframe.spatial.tensor import SpatialTensor


@contextmanager
def functions_told_to(clock: StepClock, *listeners: Callable[[Any, Any, Any], None]) -> Iterator[None]:
    """Inside, each function on split tensors in which the host issues an op costs what `Device.host` says.

    Of functions within functions the outermost counts, and one that only looks at a tensor does not. `listeners`
    get those that count, their arguments and results.
    """
    original = SpatialTensor.__torch_function__

    def counted(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if clock.in_function:
            return original(func, types, args, kwargs)
        clock.in_function, before = True, clock.host_seconds
        try:
            result = original(func, types, args, kwargs)
        finally:
            clock.in_function = False
            issued = clock.host_seconds > before
            if issued:
                clock.issue(clock.device.host.function_seconds)
        if issued:
            for listener in listeners:
                listener(func, args, result)
        return result

    with replaced(SpatialTensor, "__torch_function__", classmethod(counted)):
        yield
