"""What a simulation says of one strategy on one device: plain data."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

OUTSIDE_ALLOCATOR = ("context", "nccl")  # terms that no torch counter shows


@dataclass(frozen=True, kw_only=True)
class Moment:
    """When in a step ("forward", "backward", "recompute" of activations within it, "update") and in which module."""

    step: int  # counted from 1; 0 is before the first
    phase: str
    module: str


@dataclass(frozen=True, kw_only=True)
class LiveTensor:
    """A tensor that was live at the peak, and the module that made it."""

    bytes: int
    shape: tuple[int, ...]
    dtype: str
    category: str
    module: str


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One rank's memory and time over two steps.

    peak_bytes:     the most that torch has allocated at once (`torch.cuda.max_memory_allocated`)
    reserved_bytes: the most that torch's allocator holds (`torch.cuda.max_memory_reserved`)
    bytes:          `peak_bytes` by category
    step_seconds:   of the second step; `seconds` by kind
    moment:         where the peak is
    largest:        the ten largest tensors at the peak, largest first
    modules:        bytes of activations by the module that made them, when most activations are held
    terms:          what no trace of tensors shows, by name; those of OUTSIDE_ALLOCATOR come on top of `reserved_bytes`,
                    the others are part of it
    parameters:     numbers in the model's parameters, all ranks' together
    notes:          what was taken for granted, in sentences
    """

    peak_bytes: int
    reserved_bytes: int
    bytes: Mapping[str, int]
    step_seconds: float
    seconds: Mapping[str, float]
    moment: Moment
    largest: tuple[LiveTensor, ...]
    modules: Mapping[str, int]
    terms: Mapping[str, int]
    parameters: int
    notes: tuple[str, ...] = ()

    @property
    def device_bytes(self) -> int:
        """What the device must have: reserved by the allocator, and what lies beside it."""
        return self.reserved_bytes + sum(self.terms.get(name, 0) for name in OUTSIDE_ALLOCATOR)

    def to_json(self) -> str:
        """One JSON object with every field, and `device_bytes`."""
        return json.dumps(asdict(self) | {"device_bytes": self.device_bytes}, indent=2)
