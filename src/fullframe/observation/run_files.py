"""A run directory, read: while the run writes it, after it ended, after it died in the middle of a line.

Any file and any key may be absent, and any value may be of a wrong type; it is then as if it had not been measured.
Loads no torch.
"""

import math
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import psutil  # type: ignore[import-untyped, unused-ignore]

from fullframe.errors import RunError
from fullframe.observation.json_files import JsonLines, read_object, record, whole_number
from fullframe.observation.out_of_memory.account import OutOfMemory, read_out_of_memory
from fullframe.observation.table import Table
from fullframe.wording import plural

State = Literal["running", "finished", "stopped", "failed", "died", "unknown"]
_TABLE_FILES = ("run.json", "metrics.jsonl", "strategy.json")
_LOG_LINES = 400
_CLOCK_SECONDS = 2.0  # of a file system's times against the kernel's


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a simulation said of one rank, as far as run.json keeps it."""

    peak_bytes: int | None = None
    bytes: Mapping[str, int] = field(default_factory=dict)
    step_seconds: float | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """run.json: what is known of a run beside its steps. `changed` is when the file was written, seconds since 1970."""

    state: str = "unknown"
    reason: str = ""
    pid: int | None = None
    host: str = ""
    started: datetime | None = None
    ended: datetime | None = None
    recipe: str = ""
    arguments: tuple[str, ...] = ()
    commit: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    device: str = ""
    world_size: int | None = None
    steps: int | None = None
    step: int | None = None
    restarts: int = 0
    batch_size: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    prediction: Prediction | None = None
    changed: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ObservedStep:
    """One step as one rank observed it."""

    step: int
    time: float | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    peak_bytes: int | None = None
    bytes: Mapping[str, int] = field(default_factory=dict)
    modules: Mapping[str, int] = field(default_factory=dict)
    reserved_bytes: int | None = None
    limit_bytes: int | None = None
    host_bytes: int | None = None
    without_core_seconds: float | None = None
    gpu_percent: float | None = None
    others_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """What a run directory holds at one moment; `facts` and `strategy` are None where their file is not there.

    `observed` has a list for each rank that wrote one, steps growing; not for those that the run had before it went on
    with fewer. `unreadable` counts lines that are no JSON object; the last line of a file may just be half written and
    is not counted. `state` is "died" where run.json says that the run goes on and its process is gone.
    """

    path: Path
    state: State
    facts: Facts | None
    strategy: Mapping[str, Any] | None
    table: Table
    observed: Mapping[int, Sequence[ObservedStep]]
    leaks: Sequence[Mapping[str, Any]]
    log: Sequence[str]
    pictures: Sequence[Path]
    out_of_memory: OutOfMemory | None
    traces: Sequence[Path]
    unreadable: int
    written: float | None  # when the newest of its files changed, seconds since 1970

    @property
    def known(self) -> Facts:
        """What run.json says; where it is not there, nothing."""
        return self.facts or Facts()

    @property
    def step(self) -> int:
        """The last step that is known to be done."""
        done = self.table.steps[-1] if len(self.table) else 0
        return max(done, self.known.step or 0)

    @property
    def steps(self) -> int | None:
        """How many steps the run is to take."""
        return self.known.steps

    @property
    def prediction(self) -> Prediction | None:
        """What the plan expected of it, where there was one."""
        return self.known.prediction

    @property
    def goes_on(self) -> str:
        """How the run went on after a step that ran out of memory; "" where it did not, or did not run out."""
        lost, now = self.out_of_memory, whole_number((self.strategy or {}).get("microbatches"))
        before = None if lost is None else whole_number(lost.strategy.get("microbatches"))
        if lost is None or now is None or before is None or now <= before:
            return ""
        return f"going on with {now} microbatches in place of {before}"


class RunReader:
    """`read()` gives what `path` holds now; called again it reads only what was added since.

    Raises RunError where `path` is no run directory.
    """

    def __init__(self, path: Path):
        require_run(path)
        self.path = path
        self._metrics = JsonLines(path / "metrics.jsonl")
        self._of_ranks: dict[int, JsonLines] = {}
        self._observed: dict[int, list[ObservedStep]] = {}
        self._table, self._leaks = Table(), list[Mapping[str, Any]]()

    def read(self) -> RunFiles:
        """The directory now."""
        self._read_metrics()
        self._read_observed()
        facts = _facts(self.path / "run.json")
        lines = [self._metrics, *self._of_ranks.values()]
        ranks = (facts or Facts()).world_size or math.inf
        return RunFiles(
            path=self.path,
            state=state_of(facts),
            facts=facts,
            strategy=read_object(self.path / "strategy.json"),
            table=self._table,
            observed={rank: list(rows) for rank, rows in sorted(self._observed.items()) if rows and rank < ranks},
            leaks=list(self._leaks),
            log=_tail(self.path / "log.txt"),
            pictures=sorted(self.path.glob("*.png")),
            out_of_memory=read_out_of_memory(self.path),
            traces=sorted(self.path.glob("trace/*")),
            unreadable=sum(each.unreadable for each in lines),
            written=_newest(self.path),
        )

    def _read_metrics(self) -> None:
        fresh, again = self._metrics.fresh()
        if again:
            self._table, self._leaks = Table(), []
        for found in fresh:
            if "leak" in found:
                self._leaks.append(found)
            elif whole_number(found.get("step")) is not None:
                self._table.add(found)

    def _read_observed(self) -> None:
        for path in self.path.glob("observed/rank*.jsonl"):
            number = path.stem.removeprefix("rank")
            if not number.isdecimal():
                continue
            rank = int(number)
            fresh, again = self._of_ranks.setdefault(rank, JsonLines(path)).fresh()
            rows = self._observed.setdefault(rank, [])
            if again:
                rows.clear()
            for found in fresh:
                if whole_number(found.get("step")) is not None:
                    row = record(ObservedStep, found)
                    while rows and rows[-1].step >= row.step:
                        rows.pop()
                    rows.append(row)


def read_run(path: Path) -> RunFiles:
    """What `path` holds now. Raises RunError where it is no run directory."""
    return RunReader(path).read()


def state_of(facts: Facts | None) -> State:
    """The run's state; a run that goes on by its own account is dead where its process is not there any more.

    Only on the run's own host can that be seen.
    """
    if facts is None:
        return "unknown"
    if facts.state == "running":
        return "died" if facts.host == socket.gethostname() and not _lives(facts) else "running"
    for state in ("finished", "stopped", "failed"):
        if facts.state == state:
            return state
    return "unknown"


def _lives(facts: Facts) -> bool:
    if facts.pid is None:
        return True
    try:
        process = psutil.Process(facts.pid)
        # A process that began after run.json was written is another one that was given the same number.
        is_zombie = process.status() == psutil.STATUS_ZOMBIE
        return not is_zombie and bool(process.create_time() <= facts.changed + _CLOCK_SECONDS)
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def require_run(path: Path) -> None:
    """Raises RunError where `path` is no run directory, with one inside it where there is one."""
    if not path.is_dir():
        raise RunError(f"there is no run directory {path}; check the path")
    if any((path / name).exists() for name in _TABLE_FILES):
        return
    inside = [found for name in _TABLE_FILES for found in path.glob(f"*/{name}")]
    hint = "check the path"
    if inside:
        newest = max(inside, key=lambda file: file.stat().st_mtime).parent  # a report changes the folder alone
        hint = f"it holds {plural(len({file.parent for file in inside}), 'run')}, the newest is {newest}"
    raise RunError(f"{path} is no run directory, it has none of {', '.join(_TABLE_FILES)}; {hint}")


def _facts(path: Path) -> Facts | None:
    found = read_object(path)
    if found is None:
        return None
    try:
        changed = path.stat().st_mtime
    except OSError:
        changed = time.time()
    return facts_of(found, changed)


def facts_of(found: Mapping[str, Any], changed: float) -> Facts:
    """What is in run.json, which was written at `changed`, seconds since 1970."""
    return replace(record(Facts, found), changed=changed)


def _tail(path: Path) -> list[str]:
    """The last lines, of at most 64 KiB."""
    try:
        with open(path, "rb") as file:
            start = max(file.seek(0, os.SEEK_END) - 65536, 0)
            file.seek(start)
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    return lines[bool(start) :][-_LOG_LINES:]


def _newest(path: Path) -> float | None:
    times = []
    for found in (path / "metrics.jsonl", path / "run.json", path / "log.txt", *path.glob("observed/*.jsonl")):
        try:
            times.append(found.stat().st_mtime)
        except OSError:
            continue
    return max(times, default=None)
