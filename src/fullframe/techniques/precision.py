"""The dtype in which a step computes: autocast, TF32, and the loss scale that fp16 needs.

The scale follows Micikevicius et al., Mixed Precision Training (2018), as `torch.amp.GradScaler` does: halved when a
gradient overflows, doubled after a long run without. Overflow is found in what all ranks summed up, so it is one
number on all of them.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from fullframe.strategy import Precision

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@contextmanager
def computing(precision: Precision, device_type: str) -> Iterator[None]:
    """Inside, forward passes compute in `precision`; "fp32" is IEEE fp32, also where cuDNN would take TF32."""
    matmul: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before = matmul.fp32_precision, cudnn.fp32_precision
    matmul.fp32_precision = cudnn.fp32_precision = "ieee" if precision == "fp32" else "tf32"
    try:
        with torch.autocast(device_type, _AUTOCAST.get(precision), enabled=precision in _AUTOCAST):
            yield
    finally:
        matmul.fp32_precision, cudnn.fp32_precision = before


class LossScale:
    """What the loss is multiplied by before backward, so that small fp16 gradients do not vanish; a power of 2.

    It is started once the first microbatch shows how many elements are summed: the gradient of a sum over a million
    pixels is a million times that of the mean, and would overflow 20 times before the scale fits.
    """

    _FIRST = 2.0**16
    _GROWTH_STEPS = 2000

    def __init__(self) -> None:
        self.value = self._FIRST
        self._good_steps = 0
        self._mean = 0.0  # the scale at which the loss is the mean itself; 0 before the start

    @property
    def started(self) -> bool:
        """Whether it knows how many elements are summed."""
        return self._mean > 0

    @property
    def falling(self) -> bool:
        """Whether an overflow may be the scale's fault; below the mean itself it is the model's."""
        return 0 < self._mean < self.value

    def start(self, count: float) -> float:
        """The scale for a loss summed over about `count` elements; as it was, once started."""
        if not self.started:
            self._mean = 1 / 2.0 ** math.ceil(math.log2(max(count, 1.0)))
            self.value = self._FIRST * self._mean
        return self.value

    def update(self, overflowed: bool) -> None:
        """Learn how a step went, the same on all ranks."""
        self._good_steps = 0 if overflowed else self._good_steps + 1
        if overflowed:
            self.value /= 2
        elif self._good_steps == self._GROWTH_STEPS:
            self.value, self._good_steps = self.value * 2, 0

    def state_dict(self) -> dict[str, Any]:
        """The scale, and how long it has held."""
        return {"value": self.value, "good_steps": self._good_steps, "mean": self._mean}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`."""
        self.value, self._good_steps, self._mean = state["value"], state["good_steps"], state["mean"]
