"""What a simulation says of one strategy on one device: plain data."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from fullframe.training.evaluation import NEEDS_LESS
from fullframe.wording import GIB

KEPT_FREE = 0.06  # of a device's memory by a plan: benchmarks/prediction is at most 5.1 % below what was measured
OUTSIDE_ALLOCATOR = ("context", "nccl")  # terms that no torch counter shows


@dataclass(frozen=True, kw_only=True)
class Moment:
    """When in a step and in which module.

    phase: "forward", "backward", "recompute" of activations within it, "update"; "evaluation"
    """

    step: int  # counted from 1; 0 is before the first
    phase: str
    module: str


@dataclass(frozen=True, kw_only=True)
class LiveTensor:
    """A tensor that was live at the peak: its bytes, shape and dtype, and the module that made it.

    category: as in `Prediction.bytes`
    """

    bytes: int
    shape: tuple[int, ...]
    dtype: str
    category: str
    module: str


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One rank's memory and time over two steps, or more where modules keep more after each.

    peak_bytes:     the most that torch has allocated at once (`torch.cuda.max_memory_allocated`)
    reserved_bytes: the most that torch's allocator holds (`torch.cuda.max_memory_reserved`)
    bytes:          `peak_bytes` by category
    step_seconds:   of the last step; `seconds` by kind
    host_seconds:   what the host works in that step: Python, and to issue what the device then does
    limits:         of `seconds`, of all kernels but the optimizer's, by what limits them: "arithmetic" of the matrix
                    units, "bytes" that are read and written, "kernel": what the shortest one takes
    moment:         where the peak is
    largest:        the ten largest tensors at the peak, largest first
    modules:        bytes of activations by the module that made them, when most activations are held
    terms:          what no trace of tensors shows, by name; those of OUTSIDE_ALLOCATOR come on top of `reserved_bytes`,
                    the others are part of it
    parameters:     numbers in the model's parameters, all ranks' together
    notes:          what was taken for granted, in sentences
    evaluation:     memory, as above, while the recipe's evaluation takes a sample after these steps; None without one,
                    or where it could not be simulated, which `notes` say
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
    host_seconds: float = 0.0
    limits: Mapping[str, float] = field(default_factory=dict)
    evaluation: "Prediction | None" = None

    @property
    def bound_by_host(self) -> bool:
        """Whether the host works longer on a step than the device and its messages, which then wait for it."""
        return self.host_seconds > self.step_seconds - self.seconds.get("launch", 0.0)

    @property
    def step_bytes(self) -> int:
        """What the device must have for the steps: reserved by the allocator, and what lies beside it."""
        return self.reserved_bytes + sum(self.terms.get(name, 0) for name in OUTSIDE_ALLOCATOR)

    @property
    def device_bytes(self) -> int:
        """What the device must have: for the steps, or for the evaluation where that is more."""
        return max(self.step_bytes, 0 if self.evaluation is None else self.evaluation.device_bytes)

    def to_json(self) -> str:
        """One JSON object: `as_dict`."""
        return json.dumps(self.as_dict(), indent=2)

    def as_dict(self) -> dict[str, Any]:
        """Every field, `device_bytes`, `step_bytes` and `bound_by_host`."""
        found = {name: getattr(self, name) for name in ("device_bytes", "step_bytes", "bound_by_host")}
        return asdict(self) | found


_MUCH_TURNING = 0.05  # of a step


def said_of_host(prediction: Prediction) -> str:
    """A sentence about a step that is bound by the host; "" of any other."""
    if not prediction.bound_by_host:
        return ""
    others = prediction.step_seconds - prediction.seconds.get("launch", 0.0)
    return (
        f"bound by the host: it works {1e3 * prediction.host_seconds:.3g} ms on a step that takes the device "
        f"{1e3 * others:.3g} ms; with a larger frame, more samples a rank or fewer ranks the device would wait less"
    )


def said_of_layout(prediction: Prediction) -> str:
    """A sentence about a step of which much goes into turning maps for the matrix units; "" of any other."""
    share = prediction.seconds.get("layout", 0.0) / max(prediction.step_seconds, 1e-12)
    if share < _MUCH_TURNING:
        return ""
    return (
        f"{share:.0%} of the step brings the channels of maps side by side for the tensor cores, and back; "
        "model.to(memory_format=torch.channels_last) spares it, where convolutions are not in groups"
    )


def said_of_evaluation(prediction: Prediction) -> str:
    """A sentence about an evaluation that takes more than a step; "" where none does."""
    evaluation = prediction.evaluation
    if evaluation is None or evaluation.device_bytes <= prediction.step_bytes:
        return ""
    where = f", most in {evaluation.moment.module}" if evaluation.moment.module else ""
    return (
        f"the evaluation takes more than a step, which takes {prediction.step_bytes / GIB:.3f} GiB: "
        f"{evaluation.device_bytes / GIB:.3f} GiB{where}. {NEEDS_LESS}"
    )
