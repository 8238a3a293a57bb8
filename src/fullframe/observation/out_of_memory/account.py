"""What was noted when a step ran out of memory, read from the run's directory; anything may be missing or wrong there.

Each rank that ran out wrote oom/rank<k>.json; oom.json is the note of the one that was first, with what would fit.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fullframe.observation.json_files import read_object, record, whole_number

NOTES = "oom"  # folder of the ranks' notes
SUMMARY, PAGE = "oom.json", "oom.html"
EVALUATION = "evaluation"  # the phase of what is no step


@dataclass(frozen=True, kw_only=True)
class Live:
    """What was live at a peak; `when` says of which step, or that a simulation says so."""

    when: str = ""
    peak_bytes: int | None = None
    bytes: Mapping[str, int] = field(default_factory=dict)
    modules: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Way:
    """A strategy that would fit, by simulation: in a few words, as a command, what a rank then needs, and how fast."""

    words: str = ""
    command: str = ""
    device_bytes: int | None = None
    step_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class OutOfMemory:
    """One step, or the evaluation after it, that ran out of memory.

    A size is None where it is not known, as of the CPU, whose allocator counts nothing.

    rank, others:    the first rank that ran out in that step, and those that did as well
    phase:           of the step, or EVALUATION; line, source: of the recipe; module: whose forward ran
    allocated_bytes: in tensors, reserved_bytes by torch's allocator, others_bytes by other processes on the device
    ways:            what would fit; problem: why there is none, "" before anybody asked
    """

    step: int
    attempt: int = 0
    rank: int = 0
    others: tuple[int, ...] = ()
    time: float = 0.0
    error: str = ""
    devices: str = ""
    batch_size: int | None = None
    strategy: Mapping[str, Any] = field(default_factory=dict)
    phase: str = ""
    line: str = ""
    source: str = ""
    module: str = ""
    asked_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    limit_bytes: int | None = None
    free_bytes: int | None = None
    others_bytes: int | None = None
    host_bytes: int | None = None
    live: Live = field(default_factory=Live)
    ways: tuple[Way, ...] = ()
    problem: str = ""

    @property
    def unused_bytes(self) -> int | None:
        """What torch's allocator held in no tensor: where that is much, memory was there, in pieces too small."""
        if self.reserved_bytes is None or self.allocated_bytes is None:
            return None
        return max(self.reserved_bytes - self.allocated_bytes, 0)

    @property
    def is_fragmented(self) -> bool:
        """Whether what was asked for would have fitted into what was reserved and unused, in one piece."""
        return bool(self.unused_bytes and self.asked_bytes and self.unused_bytes >= self.asked_bytes)

    @property
    def key(self) -> tuple[int, int]:
        """Which of several: later ones are larger."""
        return self.attempt, self.step


def read_out_of_memory(run_dir: Path) -> OutOfMemory | None:
    """The last time a step ran out of memory; None where none did."""
    notes = sorted(filter(None, map(_read, run_dir.glob(f"{NOTES}/rank*.json"))), key=lambda note: note.time)
    newest = max((note.key for note in notes), default=None)
    told = _read(run_dir / SUMMARY)
    if newest is None or (told is not None and told.key >= newest):
        return told
    first, *others = (note for note in notes if note.key == newest)
    return of_record(asdict(first) | {"others": sorted(note.rank for note in others)})


def _read(path: Path) -> OutOfMemory | None:
    found = read_object(path)
    return None if found is None else of_record(found)


def of_record(found: Mapping[str, Any]) -> OutOfMemory | None:
    """From JSON; None where the step is not known."""
    return None if whole_number(found.get("step")) is None else record(OutOfMemory, found)
