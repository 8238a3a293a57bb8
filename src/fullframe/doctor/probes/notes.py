"""What a rank notes while it trains: one JSON object a line, in a file of its own, so that also a rank that hangs or
dies has said what it saw. Knows no torch.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

E = TypeVar("E", bound="Event")


class Sketch(NamedTuple):
    """A tensor in a few numbers: equal tensors have equal sketches."""

    checksum: int  # of all bits
    norm: float
    sample: tuple[float, ...]  # evenly spaced elements


@dataclass(frozen=True, kw_only=True)
class Event:
    """One thing that a rank noted."""


@dataclass(frozen=True, kw_only=True)
class Job(Event):
    """What kind of job this rank finds itself in, when its first step ends."""

    ranks: int  # of the process group; 1 where there is none
    started: int  # ranks that the launcher started
    replica: int  # ranks of one replica hold parts of the same samples
    host: str
    torch: str
    backend: str  # "" without a process group
    device: str
    device_id: str = ""  # tells a GPU from any other; "" on the CPU
    frameworks: tuple[str, ...] = ()
    unused_are_sought: bool = False  # DistributedDataParallel(find_unused_parameters=True)
    unsynchronized: tuple[str, ...] = ()  # classes of the trained modules that no data parallel wrapper holds


@dataclass(frozen=True, kw_only=True)
class Weights(Event):
    """The model's parameters before the first update, and the optimizers' share of them."""

    parameters: Mapping[str, Sketch]
    frozen: tuple[str, ...] = ()
    frozen_in_optimizer: tuple[str, ...] = ()
    unknown_to_model: int = 0  # parameters of optimizers that no module has which was called
    elements: int = 0


@dataclass(frozen=True, kw_only=True)
class Backward(Event):
    """One call of backward."""

    loss: float
    attached: bool = True  # the loss has a graph
    nodes: int = 0  # of the loss's graph
    adds: bool = True  # to gradients that are there
    synchronizes: bool = True  # gradients are averaged in this pass, where a wrapper does that at all
    evaluating: tuple[str, ...] = ()  # trained modules in eval mode that then do something else
    scaled: bool = False  # by a GradScaler
    modules: tuple[str, ...] = ()  # batch norms that saw their input again in backward, and counted it


@dataclass(frozen=True, kw_only=True)
class Update(Event):
    """One step of an optimizer, as it began and ended."""

    number: int  # of this optimizer, from 1
    optimizer: int
    gradients: Mapping[str, Sketch]
    missing: tuple[str, ...] = ()  # trainable parameters without a gradient
    parameters: Mapping[str, Sketch] = field(default_factory=dict)  # afterwards
    unchanged: tuple[str, ...] = ()  # whose gradient was not zero
    rates: tuple[float, ...] = ()  # learning rates of the groups
    stale: tuple[str, ...] = ()  # whose gradient was never cleared since the last step
    alive: int = 0  # graph nodes that are still held once the step is done
    seconds: float = 0.0  # since the last step, or since the first batch was asked for
    held_by: str = ""  # a variable, or a container, that keeps a graph


@dataclass(frozen=True, kw_only=True)
class Untrained(Event):
    """Parameters with a gradient that no optimizer holds, once one has taken two steps."""

    names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Loader(Event):
    """An iteration over a DataLoader begins."""

    loader: int
    epoch: int  # of this loader, from 1
    samples: int | None  # of the dataset; None where it does not say
    workers: int
    sampler: str  # its class; of a stream the dataset's
    planned: tuple[int, ...] | None = None  # the samples of the whole epoch, where the sampler can be asked
    trains: bool = True  # grad mode is on
    listing: int = 0  # checksum of the files or numbers of samples that its dataset holds; 0 where it holds none


@dataclass(frozen=True, kw_only=True)
class BatchRead(Event):
    """A batch that the loop got of a DataLoader."""

    loader: int
    epoch: int
    number: int
    indices: tuple[int, ...] | None
    waited: float  # seconds
    contents: int  # checksum
    samples: int | None  # first dim of its largest tensor


@dataclass(frozen=True, kw_only=True)
class Scaling(Event):
    """Something was done with a GradScaler, or gradients were clipped."""

    action: str  # scale, unscale, clip, step, update
    scale: float = 0.0
    at_update: int = 0  # updates done before


@dataclass(frozen=True, kw_only=True)
class Oddity(Event):
    """Something that one rank alone can tell; `kind` is the finding's name."""

    kind: str
    text: str
    where: str = ""


@dataclass(frozen=True, kw_only=True)
class Repeated(Event):
    """The same step from the same seed, twice."""

    first: Mapping[str, float]
    second: Mapping[str, float]
    contents: tuple[int, int] | None = None  # checksums of the batch


@dataclass(frozen=True, kw_only=True)
class Memory(Event):
    """The most that this rank has held, by the names of what is measured, in bytes."""

    measured: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Failure(Event):
    """The exception that ended the rank."""

    kind: str
    text: str
    trace: str
    path: str | None = None
    line: int | None = None
    consequence: bool = False


@dataclass(frozen=True, kw_only=True)
class End(Event):
    """The rank has seen enough, or its program is through."""

    reason: str


_KINDS: dict[str, type[Event]] = {kind.__name__: kind for kind in Event.__subclasses__()}


class Notebook:
    """Writes a rank's notes; each is on the disk when `note` returns."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a", buffering=1)  # noqa: SIM115  # for as long as the process lives

    def note(self, event: Event) -> None:
        """Write one event."""
        self._file.write(json.dumps({"event": type(event).__name__, **asdict(event)}) + "\n")

    def close(self) -> None:
        """Nothing is written after it."""
        self._file.close()


class Notes:
    """The notes of one rank, in order."""

    def __init__(self, rank: int, events: Sequence[Event]):
        self.rank, self.events = rank, tuple(events)

    def of(self, kind: type[E]) -> list[E]:
        """All events of a kind."""
        return [event for event in self.events if isinstance(event, kind)]

    def one(self, kind: type[E]) -> E | None:
        """The first event of a kind, or None."""
        return next(iter(self.of(kind)), None)

    @property
    def replica(self) -> int:
        """Which replica's samples this rank reads."""
        job = self.one(Job)
        return self.rank if job is None else job.replica


def file_of_rank(folder: Path, rank: int) -> Path:
    """Where a rank's notes lie."""
    return folder / f"rank{rank}.jsonl"


def read_notes(folder: Path, ranks: int) -> list[Notes]:
    """The notes of all ranks; of one that wrote none, empty ones. A line that was cut off is left out."""
    found = []
    for rank in range(ranks):
        path = file_of_rank(folder, rank)
        lines = path.read_text().splitlines() if path.exists() else []
        found.append(Notes(rank, list(_events(lines))))
    return found


def _events(lines: Sequence[str]) -> Iterator[Event]:
    for line in lines:
        try:
            facts = json.loads(line)
        except json.JSONDecodeError:
            return
        yield _event(facts)


def _event(facts: dict[str, Any]) -> Event:
    kind = _KINDS[facts.pop("event")]
    return kind(**{name: _value(name, value) for name, value in facts.items()})


def _value(name: str, value: Any) -> Any:
    if name in ("gradients", "parameters") and isinstance(value, dict):
        return {key: Sketch(sketch[0], sketch[1], tuple(sketch[2])) for key, sketch in value.items()}
    return tuple(value) if isinstance(value, list) else value
