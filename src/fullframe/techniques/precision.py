"""The dtype in which a step computes: autocast, TF32, and the loss scale that fp16 needs.

The scale follows Micikevicius et al., Mixed Precision Training (2018), as `torch.amp.GradScaler` does: halved when a
gradient overflows, doubled after a long run without. Overflow is found in what all ranks summed up, so it is one
number on all of them.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch

from fullframe.technique import Precision

T = TypeVar("T")

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Fp32Math(NamedTuple):
    """How this process multiplies fp32 numbers: torch's settings, which hold in all its threads."""

    kinds: tuple[str, ...]  # "ieee", "tf32", "bf16" or "none" of each in `_settings()`
    matmul: str | None  # `torch.get_float32_matmul_precision()`; None where it contradicts `kinds` and cannot be read
    cudnn: bool | None  # `torch.backends.cudnn.allow_tf32`; None likewise

    @classmethod
    def now(cls) -> "Fp32Math":
        """As it is set now."""
        kinds = tuple(setting.fp32_precision for setting in _settings())
        return cls(kinds, _read(torch.get_float32_matmul_precision), _read(lambda: torch.backends.cudnn.allow_tf32))

    @classmethod
    def of(cls, precision: Precision) -> "Fp32Math":
        """IEEE fp32 everywhere for "fp32"; else TF32 on GPUs, and what is set on CPUs."""
        if precision == "fp32":
            return cls(("ieee",) * len(_settings()), "highest", False)
        now = cls.now()
        return cls(("tf32",) * 3 + now.kinds[3:], "medium" if now.matmul == "medium" else "high", True)

    def set(self) -> None:
        """From now on. The older switches follow, as torch refuses to tell what two of its settings contradict."""
        if self.matmul is not None:
            torch.set_float32_matmul_precision(self.matmul)
        if self.cudnn is not None:
            torch.backends.cudnn.allow_tf32 = self.cudnn
        for setting, kind in zip(_settings(), self.kinds, strict=True):
            if setting.fp32_precision != kind:
                setting.fp32_precision = kind


def _settings() -> tuple[Any, ...]:
    gpu: Any = torch.backends.cudnn
    cpu: Any = torch.backends.mkldnn
    return torch.backends.cuda.matmul, gpu.conv, gpu.rnn, cpu.matmul, cpu.conv, cpu.rnn


def _read(switch: Callable[[], T]) -> T | None:
    try:
        return switch()
    except RuntimeError:
        return None


@contextmanager
def fp32_math(wanted: Fp32Math) -> Iterator[None]:
    """Inside, fp32 numbers are multiplied as `wanted`: in forward, backward and recompute, also on autograd's threads.

    That of "fp32" is IEEE fp32, also where cuDNN would take TF32.
    """
    before = Fp32Math.now()
    if before == wanted:
        yield
        return
    wanted.set()
    try:
        yield
    finally:
        before.set()


@contextmanager
def computing(precision: Precision, device_type: str) -> Iterator[None]:
    """Inside, forward passes compute in `precision`. Backward wants `fp32_math` around it, and no autocast."""
    with (
        fp32_math(Fp32Math.of(precision)),
        torch.autocast(device_type, _AUTOCAST.get(precision), enabled=precision in _AUTOCAST),
    ):
        yield


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
        self._is_new = False  # started, and no step is done since

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
            self._mean = 1 / 2.0 ** math.ceil(math.log2(count if 1 < count < math.inf else 1.0))
            self.value, self._is_new = self._FIRST * self._mean, True
        return self.value

    def update(self, overflowed: bool, counted: bool = True) -> None:
        """Learn how a step went, the same on all ranks; where nothing was `counted`, or no number, that is no start."""
        is_new, self._is_new = self._is_new, False
        if is_new and not counted:
            self.value, self._mean = self._FIRST, 0.0
            return
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
