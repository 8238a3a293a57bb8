"""How runs stand: from their directories, and from Slurm's queue where they were launched on it.

Accounting is not asked, which many clusters do not have. Of a file that has not changed nothing is read again.
"""

import fnmatch
import os
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from fullframe.errors import LaunchError
from fullframe.launching.job import read_launch
from fullframe.launching.slurm import Queued, queue
from fullframe.observation.json_files import mapping, number, parsed, record, whole_number
from fullframe.observation.run_files import Facts, facts_of, state_of

STATES = ("running", "starting", "pending", "requeued", "stopped", "finished", "failed", "died", "lost", "unknown")
_RUN_FILE = "run.json"
_SKIPPED = {"checkpoints", "observed", "stacks", "trace", "__pycache__"}
_DEPTH = 4  # folders below the given one in which runs are looked for
_RECENT = 20  # steps, of which the pace is the median
_TAIL_BYTES = 16384
_PEAK = re.compile(r'"peak_bytes": (\d+)')  # all of a rank's lines read as JSON would take long
_WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "SUSPENDED", "CONFIGURING", "RESV_DEL_HOLD")
_UNDER_WAY = ("RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING", "RESIZING", "STOPPED")
_WARNINGS = ("warning: ", "error: ", "started again: ", "skipped: ", "out of memory")


@dataclass(frozen=True, kw_only=True)
class JobRow:
    """One run. What is not known is None.

    state:      one of STATES; "lost": it was submitted, is in no queue and has written nothing; "died": it says that
                it runs, and its process, container or job is gone; "unknown": Slurm does not answer, or it runs on
                Kubernetes and writes elsewhere
    peak_bytes: the most that a rank has held; predicted_bytes: what was predicted of it
    """

    run: str
    state: str
    reason: str
    job: str | None
    step: int | None
    steps: int | None
    loss: float | None
    images_per_second: float | None
    peak_bytes: int | None
    predicted_bytes: int | None
    requeues: int | None
    restarts: int | None
    warning: str | None
    started: str | None
    values: tuple[str, ...]


class Files:
    """Ends of files, read again only when they have changed."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[tuple[int, int], Any]] = {}

    def read(self, path: Path, parse: Callable[[str], Any], whole: bool = False) -> Any:
        """What `parse` makes of the file's last kilobytes, or of all of it; of "" where it cannot be read."""
        try:
            found = os.stat(path)
            stamp = found.st_mtime_ns, found.st_size
            if path not in self._known or self._known[path][0] != stamp:
                with open(path, "rb") as file:
                    file.seek(0 if whole else max(found.st_size - _TAIL_BYTES, 0))
                    self._known[path] = stamp, parse(file.read().decode(errors="replace"))
            return self._known[path][1]
        except OSError:
            return parse("")


def jobs(folders: Sequence[Path], files: Files) -> tuple[list[JobRow], str]:
    """The runs in these folders and below, and why Slurm was of no help, "" where it was, or was not needed.

    Raises LaunchError for a folder that is none.
    """
    found: list[tuple[Path, Mapping[str, Any], int]] = []
    for folder in folders:
        if not folder.is_dir():
            raise LaunchError(f"there is no folder {folder}; name one that holds runs")
        found += _runs_below(folder)
    queued, problem = dict[tuple[str, int], Queued](), ""
    if any(launch.get("on") == "slurm" and launch.get("job_id") for _, launch, _ in found):
        try:
            queued = {(job.array or job.job, job.task): job for job in queue()}
        except LaunchError as error:
            problem = str(error)
    return [_row(path, launch, task, queued, problem, files) for path, launch, task in found], problem


def selected(rows: Iterable[JobRow], states: Sequence[str], patterns: Sequence[str]) -> list[JobRow]:
    """Those in one of the states, and of a name that holds one of the patterns; all where none is given."""
    return [
        row
        for row in rows
        if (not states or row.state in states)
        and (not patterns or any(fnmatch.fnmatchcase(row.run, f"*{pattern}*") for pattern in patterns))
    ]


def _runs_below(folder: Path, depth: int = _DEPTH) -> Iterator[tuple[Path, Mapping[str, Any], int]]:
    """Each run's directory, the launch that it is of ({} for none), and its number in it."""
    launch = read_launch(folder)
    places = [str(run["place"]) for run in launch.get("runs", ())]
    for task, place in enumerate(places):
        yield folder / place, launch, task
    if not places and (folder / _RUN_FILE).exists():
        yield folder, {}, 0
    if depth and "." not in places:
        with os.scandir(folder) as entries:
            names = [e.name for e in entries if e.name not in _SKIPPED and e.is_dir(follow_symlinks=False)]
        for name in sorted(names):
            if name not in places and not name.startswith("."):
                with suppress(PermissionError):  # another user's
                    yield from _runs_below(folder / name, depth - 1)


def _row(
    path: Path,
    launch: Mapping[str, Any],
    task: int,
    queued: Mapping[tuple[str, int], Queued],
    problem: str,
    files: Files,
) -> JobRow:
    facts = _facts(path / _RUN_FILE, files)
    last: Mapping[str, Any] = files.read(path / "metrics.jsonl", _last_step)
    job = launch.get("job_id")
    entry = queued.get((str(job), task)) if job else None
    state, reason = _state(facts, launch, entry, problem)
    known = facts or Facts()
    (peak, pace), batch = _observed(path, files), known.batch_size
    seconds = pace or number(last.get("step_seconds"))
    steps = [step for step in (whole_number(last.get("step")), known.step) if step is not None]
    values = launch["runs"][task]["values"] if launch else ()
    in_array = bool(launch) and launch["runs"][0]["place"] != "."
    return JobRow(
        run=os.path.relpath(path),
        state=state,
        reason=reason,
        job=f"{job}_{task}" if job and in_array else job,
        step=max(steps, default=None),  # of the last ones a full disk may have no record
        steps=known.steps,
        loss=number(last.get("loss")),
        images_per_second=batch / seconds if batch and seconds and seconds > 0 else None,
        peak_bytes=peak,
        predicted_bytes=known.prediction.peak_bytes if known.prediction else None,
        requeues=None if facts is None else _requeues(facts),
        restarts=None if facts is None else facts.restarts,
        warning=files.read(path / "log.txt", _last_warning),
        started=known.started.isoformat() if known.started else None,
        values=tuple(values),
    )


def _facts(path: Path, files: Files) -> Facts | None:
    """What run.json says; None where there is none."""
    found = files.read(path, parsed, whole=True)
    try:
        return facts_of(found, path.stat().st_mtime) if found else None
    except OSError:
        return None


def _state(facts: Facts | None, launch: Mapping[str, Any], entry: Queued | None, problem: str) -> tuple[str, str]:
    """The state, and what is to be said of it."""
    said, reason = ("", "") if facts is None else (facts.state, facts.reason)
    if launch.get("on") != "slurm":
        return _state_beside_slurm(facts, launch)
    if not launch.get("job_id"):
        return "lost", "Slurm has given it no id; submit it again"
    if entry is not None and entry.state in _WAITING:
        return ("requeued" if facts else "pending"), entry.reason
    if entry is not None and entry.state in _UNDER_WAY:
        own = facts is not None and facts.environment.get("SLURM_JOB_ID") == entry.job
        ends = (entry.state == "COMPLETING" and bool(said)) or (own and said == "finished")
        return (said if said == "running" or ends else "starting"), reason
    if said and said != "running":
        return said, reason
    if problem:
        return "unknown", "Slurm does not answer"
    ended = "is in the queue no more" if entry is None else entry.state.lower()
    if said:
        return "died", f"its job {ended}"
    return "lost", f"its job {ended} and has written nothing; see slurm-*.log"


def _state_beside_slurm(facts: Facts | None, launch: Mapping[str, Any]) -> tuple[str, str]:
    on, code, state = launch.get("on"), launch.get("exit_code"), state_of(facts)
    # A container's process is not seen here.
    if on == "docker" and code is not None and state in ("running", "unknown"):
        return ("died" if facts else "lost"), f"docker has ended with exit code {code}"
    if facts is not None:
        return state, _died(facts) if state == "died" else facts.reason
    if on == "docker":
        waits = state_of(record(Facts, mapping(launch.get("launcher")))) == "running"
        return ("starting", "") if waits else ("lost", "what waited for docker is gone; launch it again")
    if on == "kubernetes" and not launch.get("job_id"):
        return "lost", "kubectl has not taken it; launch it again"
    if on == "kubernetes":
        return "unknown", f"what it writes lies on the cluster's volume; see kubectl get {launch['job_id']}"
    return state, ""


def _died(facts: Facts) -> str:
    return f"process {facts.pid} is gone" + (f"; {facts.reason}" if facts.reason else "")


def _requeues(facts: Facts) -> int:
    said = facts.environment.get("SLURM_RESTART_COUNT", "")
    return int(said) if said.isdecimal() else 0


def _observed(path: Path, files: Files) -> tuple[int | None, float | None]:
    """The most bytes that any rank has said it held, and the seconds from step to step, the loader's wait included."""
    found = [files.read(rank, _peak_and_pace, whole=True) for rank in (path / "observed").glob("rank*.jsonl")]
    peaks = [peak for peak, _ in found if peak is not None]
    paces = [pace for _, pace in found if pace is not None]
    return max(peaks, default=None), max(paces, default=None)


def _peak_and_pace(text: str) -> tuple[int | None, float | None]:
    peak = max(map(int, _PEAK.findall(text)), default=None)  # on a CPU of few lines, the first of which is the second
    said = [(whole_number(line.get("step")), number(line.get("time"))) for line in _lines(text[-_TAIL_BYTES:])]
    timed = [(step, time) for step, time in said if step is not None and time is not None]
    recent = pairwise(timed[-_RECENT:])  # of every second step, or fewer, once the file has been thinned
    paces = [(after[1] - before[1]) / (after[0] - before[0]) for before, after in recent if after[0] > before[0]]
    return peak, statistics.median(paces) if paces else None  # whatever lay between, an evaluation or a new start


def _last_step(text: str) -> dict[str, Any]:
    return next((line for line in reversed(list(_lines(text))) if "step" in line), {})


def _lines(text: str) -> Iterator[dict[str, Any]]:
    """The whole objects among the lines: the first and the last may be cut off."""
    for line in text.splitlines():
        found = parsed(line)
        if found:
            yield found


def _last_warning(text: str) -> str | None:
    lines = [line for line in text.splitlines() if any(sign in line for sign in _WARNINGS)]
    return lines[-1][len("2026-01-01 00:00:00 ") :] if lines else None
