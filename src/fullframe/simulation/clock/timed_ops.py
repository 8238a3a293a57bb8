"""The clock that runs each distinct op of the step once on this machine's own device, in the place of a roofline.

The code for CUDA is written with care and has never run on a GPU.
"""

import math
import os
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fullframe.simulation.clock.ops import Op
from fullframe.simulation.clock.roofline import StepClock
from fullframe.simulation.devices.calibration import clock_of, on_threads
from fullframe.simulation.devices.table import Cluster, Device
from fullframe.technique import Precision
from fullframe.techniques.precision import Fp32Math, fp32_math

_REPEATS = 5
_ENOUGH_SECONDS = 0.01
_DRAWN = 4096  # random numbers

Timings = dict[Hashable, float]  # of an op on so many threads, in TF32 or not, with the shapes, strides, dtypes it got


class MeasuredClock(StepClock):
    """A StepClock whose ops are timed on real tensors of the same shapes; messages are counted as StepClock does.

    `timings` is filled and may be shared by the clocks of many strategies. What cannot be run alone falls back on the
    roofline and is counted in `guessed`. Ranks on the CPU get the threads that `fullframe train` gives them.
    """

    def __init__(
        self,
        cluster: Cluster | Device,
        precision: Precision = "fp32",
        mesh: tuple[int, ...] = (1, 1, 1),
        timings: Timings | None = None,
        stages: int = 1,
    ):
        super().__init__(cluster, precision, mesh, stages=stages)
        self.timings: Timings = {} if timings is None else timings
        self.guessed: dict[str, str] = {}  # op: why it could not be run
        self._place = torch.device("cuda" if self.device.is_cuda else "cpu")
        sharing = min(math.prod(mesh) * stages, self.cluster.devices_per_node)
        cores = len(os.sched_getaffinity(0)) // sharing
        self._threads = torch.get_num_threads() if self.device.is_cuda else max(cores, 1)
        self._precision = precision
        self._in_tf32 = self.device.is_cuda and precision != "fp32"

    def op_seconds(
        self, op: Op, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any
    ) -> list[tuple[str, float, str]]:
        key = (func, self._threads, self._in_tf32, _signature(args), _signature(tuple(kwargs.items())))
        if key not in self.timings:
            try:
                self.timings[key] = self._measure(func, args, kwargs)
            except Exception as error:  # an op may want what tensors of zeros and ones do not give it
                self.guessed[str(func)] = f"{type(error).__name__}: {error}"
                guessed = super().op_seconds(op, func, args, kwargs, out)
                self.timings[key] = sum(seconds for kind, seconds, _ in guessed if kind == op.kind)
        return [(op.kind, self.timings[key], "bytes" if op.operations is None else "arithmetic")]

    def _measure(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> float:
        as_trained = fp32_math(Fp32Math.of(self._precision))
        with on_threads(self._threads), as_trained, _disable_current_modes(), torch.no_grad():
            args = self._real(tuple(args))
            kwargs = {name: self._real(value) for name, value in kwargs.items()}
            func(*args, **kwargs)
            best, spent, runs = float("inf"), 0.0, 0
            while runs < _REPEATS and spent < _ENOUGH_SECONDS:
                took = self._seconds_of(func, args, kwargs)
                best, spent, runs = min(best, took), spent + took, runs + 1
        return max(best - self.device.launch_seconds, 0.0)

    def _seconds_of(self, func: Any, args: Any, kwargs: dict[str, Any]) -> float:
        if self._place.type == "cpu":
            now = clock_of(self._place)
            started = now()
            func(*args, **kwargs)
            return now() - started
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        func(*args, **kwargs)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def _real(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._filled(value)
        if isinstance(value, (list, tuple)):
            return type(value)(self._real(item) for item in value)
        if isinstance(value, torch.device):
            return self._place
        return value

    def _filled(self, like: Tensor) -> Tensor:
        """Numbers from a half to one, or zeros, which every index op takes, in `like`'s strides."""
        extent = 1 + sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True))
        extent = extent if like.numel() else 0
        if not (like.dtype.is_floating_point or like.dtype.is_complex):
            return torch.zeros(extent, dtype=like.dtype, device=self._place).as_strided(like.shape, like.stride())
        drawn = torch.empty(min(extent, _DRAWN), device=self._place).uniform_(0.5, 1.0).to(like.dtype)
        times = -(-extent // _DRAWN)  # the same again and again, for drawing takes longer than most ops
        flat = torch.empty(times * len(drawn), dtype=like.dtype, device=self._place)
        flat.view(times, len(drawn)).copy_(drawn)
        return flat.as_strided(like.shape, like.stride())


def _signature(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return tuple(value.shape), tuple(value.stride()), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(_signature, value))
    return value if isinstance(value, Hashable) else str(value)
