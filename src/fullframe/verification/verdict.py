"""What a comparison of one split step with one process found: plain data, and the rules by which it is judged.

No torch here: whoever prints a verdict needs none.
"""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from fullframe.wording import in_json

# Where theory says zero (the gradient of a bias before batch norm, say) a tensor holds rounding noise alone. Its peers
# say how large that may be: what else its module holds, or the middle one of all tensors of its kind.
_ZERO = 1e-12  # of the peers: noise, measured against them
_FLOOR = 1e-3  # of the peers: the least that a difference is measured against

NARROW = ("torch.float32", "torch.float16", "torch.bfloat16", "torch.complex64")  # less than double precision


class Place(NamedTuple):
    """A tensor that goes into or comes out of a module: which of them, in which call of the module."""

    kind: str  # "input" or "output"
    path: str  # of the module; "" is the model
    call: int  # counted from 0
    leaf: int  # among the tensors of the nested arguments or results
    class_name: str
    caller: str | None  # path of the module whose forward called this one; None: the recipe's loss
    caller_class: str


@dataclass(kw_only=True)
class Value:
    """One tensor of the step in one process; the same object in several places is one value."""

    shape: tuple[int, ...]
    dtype: str
    gradient_order: int | None = None  # when its gradient was complete, counted in backward; None: it has none
    is_view: bool = False  # no hook of it is called where it is written to afterwards (an in-place ReLU)
    requires_grad: bool = True


class Found(NamedTuple):
    """How far a tensor, or this rank's part of it, is from one process's."""

    max_abs: float
    scale: float  # the largest reference value, huge stand-ins for infinity left out
    floating: bool = True
    problem: str = ""  # what is wrong besides the numbers
    local_shape: tuple[int, ...] = ()  # of the part that is furthest off
    rank: int = 0  # that holds it

    def joined(self, other: "Found") -> "Found":
        """What two ranks found, as one."""
        worse = max(self, other, key=lambda found: (bool(found.problem), found.max_abs))
        return worse._replace(scale=max(self.scale, other.scale))

    def relative(self, peers: float) -> float:
        """The difference over the scale, where `peers` tells noise from numbers; infinite for whole numbers."""
        if self.problem:
            return math.inf
        if self.max_abs == 0:
            return 0.0
        scale = peers if self.scale <= _ZERO * peers else max(self.scale, _FLOOR * peers)
        return self.max_abs / scale if self.floating and scale else math.inf


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One gradient or buffer, split against one process."""

    name: str
    shape: tuple[int, ...]
    max_abs: float
    relative: float  # of the largest value in one process
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class FirstDifference:
    """Where the numbers part: the first tensor, in order of execution, that is beyond the tolerance."""

    phase: str  # "forward", "buffer", "loss", "backward", "parameter"
    module: str | None  # path of the module to look at; "" is the model, None the recipe's loss
    class_name: str
    tensor: str  # which tensor differs, in words
    shape: tuple[int, ...]  # in one process
    local_shape: tuple[int, ...]  # of the part that is furthest off
    rank: int  # that holds that part
    dtype: str
    max_abs: float
    relative: float
    message: str


@dataclass(frozen=True, kw_only=True)
class Loss:
    """The mean loss of the job's batch."""

    one_process: float
    split: float
    max_abs: float
    relative: float


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """The op that has no exact rule."""

    message: str
    function: str
    module: str
    placements: tuple[str, ...]
    fix: str


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What one step proved. `exact` means that nothing compared is beyond the tolerance."""

    exact: bool
    loss: Loss | None = None
    first_difference: FirstDifference | None = None
    refused: Refusal | None = None
    parameters: tuple[Difference, ...] = ()  # gradients, largest relative difference first
    buffers: tuple[Difference, ...] = ()
    values: int = 0  # module inputs and outputs compared, forward
    gradients: int = 0  # of those values, compared in backward
    mesh: Mapping[str, int]
    device: str
    tolerance: float
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 exact, 1 not exact, 2 refused."""
        return 2 if self.refused else 0 if self.exact else 1

    def to_json(self) -> str:
        """One JSON object; what is not a finite number is null."""
        return in_json(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Verdict":
        """The verdict that `to_json` wrote; a difference that is null is infinite."""
        fields = json.loads(text)
        for name, kind in (("loss", Loss), ("first_difference", FirstDifference), ("refused", Refusal)):
            fields[name] = None if fields[name] is None else _read(kind, fields[name])
        for name in ("parameters", "buffers"):
            fields[name] = tuple(_read(Difference, item) for item in fields[name])
        return cls(**fields | {"notes": tuple(fields["notes"])})


def _read(kind: Any, fields: dict[str, Any]) -> Any:
    infinite = {name: math.inf for name in ("max_abs", "relative", "split") if name in fields and fields[name] is None}
    tuples = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    return kind(**fields | infinite | tuples)


def middle(scales: Iterable[float]) -> float:
    """The scale of the middle one of tensors of one kind."""
    found = [scale for scale in scales if scale > 0]
    return median(found) if found else 0.0


def named_differences(
    found: Mapping[str, Found], shapes: Mapping[str, tuple[int, ...]], missing: Mapping[str, str]
) -> list[Difference]:
    """Gradients or buffers by name, largest relative difference first; `missing` says why one was not compared."""
    general = middle(item.scale for item in found.values() if item.floating)
    modules: dict[str, float] = {}
    for name, item in found.items():
        owner = name.rpartition(".")[0]
        if item.floating:
            modules[owner] = max(modules.get(owner, 0.0), item.scale)
    differences = [
        Difference(
            name=name,
            shape=shapes[name],
            max_abs=item.max_abs,
            relative=item.relative(max(general, modules.get(name.rpartition(".")[0], 0.0))),
            problem=item.problem,
        )
        for name, item in found.items()
    ]
    differences += [
        Difference(name=name, shape=shapes[name], max_abs=0.0, relative=0.0, problem=why)
        for name, why in missing.items()
    ]
    return sorted(differences, key=lambda difference: -difference.relative)
