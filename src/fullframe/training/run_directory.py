"""What a run writes beside its checkpoints: strategy.json, run.json, metrics.jsonl, log.txt. Rank 0 writes.

A launcher looks into it before any rank starts, so that this module loads no torch.
"""

import errno
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, Literal

from fullframe.errors import RunError, StrategyError
from fullframe.processes.lock import ProcessLock
from fullframe.processes.whole_files import replace_end, replace_text
from fullframe.strategy import Strategy
from fullframe.training.run_file import LOCK, RunFile, read_json, read_run_file
from fullframe.wording import in_json

_BLOCK_BYTES = 65536  # of metrics.jsonl, that are read at a time from its end
_SAID_ELSEWHERE = ("data", "depth", "height", "width", "stages", "precision")  # by the checkpoint, where they differ
# What a record of metrics.jsonl holds of every step; whatever else is there was measured by `evaluate`.
OF_STEP = frozenset(("step", "loss", "grad_norm", "skipped", "step_seconds", "learning_rate"))
Resume = bool | Literal["auto"]  # "auto": go on if there is a run, else start one


class RunDirectory:
    """A run's files under `path`; made on all ranks by `opened`.

    `trouble` is why rank 0 cannot write, "" as long as it can. The other ranks are in the middle of their next step
    when it finds out, so that it is not raised but left to be agreed on.
    """

    def __init__(self, path: Path, writes: bool):
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.file = RunFile(path, writes)
        self.trouble = ""
        self._writes = writes
        self._metrics = path / "metrics.jsonl"

    def take_up(self, strategy: Strategy) -> str:
        """What there was to go on with has been taken up: from here on the run is this one, by `strategy`.

        All ranks call it; gives what the run was told otherwise before, "" where nothing is known of that. Raises
        RunError on all of them where it cannot be written.
        """
        from fullframe.ranks.agreement import on_first_rank

        def write() -> str:
            before = _told(self.path, self.file.before)
            try:
                write_strategy(self.path, strategy)
            except OSError as error:
                raise _unusable(self.path, error) from error
            return _differences(before, _told(self.path, read_run_file(self.path)))

        changed = on_first_rank(write)
        self.file.accepted = True
        return changed

    def append(self, record: Mapping[str, Any]) -> None:
        """Add a line to metrics.jsonl; a value that is not finite is written as null, which JSON knows."""
        self._add(self._metrics, in_json(record))

    def records(self) -> Iterator[dict[str, Any]]:
        """The lines of metrics.jsonl, oldest first; where `forget_after` has left none cut off."""
        if self._metrics.exists():
            with open(self._metrics) as file:
                yield from map(json.loads, file)

    def last_record(self) -> dict[str, Any]:
        """That of the last step; {} where there is none."""
        with suppress(OSError), open(self._metrics, "rb") as file:
            for _, line in _from_the_end(file):
                if _step_of(line) < math.inf and (record := json.loads(line)).keys() >= {"step", "loss"}:
                    return dict(record)
        return {}

    def put_in_place(self, record: Mapping[str, Any]) -> None:
        """Replace the line of the last step; what came after that, a leak that was found say, stays."""
        number = record["step"]

        def changed(line: bytes) -> bytes:
            is_step = (found := json.loads(line)).get("step") == number and "loss" in found
            return (in_json(record) + "\n").encode() if is_step else line

        self._end_anew(number - 1, lambda lines: map(changed, lines))

    def log(self, message: str) -> None:
        """Add a line to log.txt, with the time."""
        self._add(self.path / "log.txt", f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message}")

    def _add(self, path: Path, line: str) -> None:
        if not self._writes or self.trouble:
            return
        try:
            with open(path, "a") as file:
                file.write(line + "\n")
        except OSError as error:
            remedy = "make room, then go on with --resume"
            if error.errno == errno.ENOENT:
                remedy = "the run directory is gone; put it back and go on with --resume, or begin anew"
            self.trouble = f"cannot write {path}: {error.strerror}; {remedy}"

    def forget_after(self, step: int) -> None:
        """Drop the metrics of later steps, which a resumed run will do again, and a line that a crash cut off."""
        self._end_anew(step, lambda lines: ())

    def _end_anew(self, step: int, end: Callable[[list[bytes]], Iterable[bytes]]) -> None:
        """Put `end` of the lines of later steps in their place. The lines before them are copied and not read."""
        if not self._writes or not self._metrics.exists():
            return
        later: list[bytes] = []  # the last one first
        with open(self._metrics, "rb") as file:
            size_bytes = kept_bytes = file.seek(0, os.SEEK_END)
            for start, line in _from_the_end(file):
                if _step_of(line) <= step and line.endswith(b"\n"):
                    break
                kept_bytes = start
                later.append(line)
        if kept_bytes < size_bytes:
            whole = [line for line in reversed(later) if _step_of(line) < math.inf and line.endswith(b"\n")]
            replace_end(self._metrics, kept_bytes, b"".join(end(whole)))


@contextmanager
def opened(path: Path, strategy: Strategy, resume: Resume, *, recipe: str = "") -> Iterator[tuple[RunDirectory, bool]]:
    """The run directory, made or found again, and whether there is a run to go on with; all ranks call it.

    Raises RunError on all ranks when it holds a run and `resume` is not asked for, or the other way round, when that is
    a run of another recipe than the file `recipe`, where a rank does not see it, and while another process writes into
    it.
    """
    import torch.distributed as dist

    from fullframe.ranks.agreement import on_first_rank
    from fullframe.training.same_start import require_shared

    locks: list[ProcessLock] = []

    def prepare() -> bool:
        try:
            check_run_directory(path, resume)
            begun = _has_steps(path)
            if begun:
                _require_same_recipe(path, recipe)
            path.mkdir(parents=True, exist_ok=True)
            locks.append(ProcessLock(path / LOCK))
            _require_alone(path, locks[0])
            if not begun and resume is not True:  # else once what is there has been taken up
                write_strategy(path, strategy)
            return begun
        except OSError as error:
            raise _unusable(path, error) from error

    try:
        begun = on_first_rank(prepare)
        require_shared(path)
        yield RunDirectory(path, writes=dist.get_rank() == 0), begun or resume is True
    finally:
        for lock in locks:
            lock.release()


def _unusable(path: Path, error: OSError) -> RunError:
    return RunError(f"cannot use the run directory {path}: {error.strerror or error}; name another, or make room there")


def _require_same_recipe(path: Path, recipe: str) -> None:
    """By the file's name alone: a folder may have been moved, and is named from wherever one stands."""
    before = str(read_run_file(path).get("recipe") or "")
    if before and recipe and Path(before).name != Path(recipe).name:
        raise RunError(
            f"{path} holds a run of {before}, not of {recipe}; name another directory, or, where the file has a new "
            'name, write that for "recipe" into run.json'
        )


def _require_alone(path: Path, lock: ProcessLock) -> None:
    if lock.is_held:
        other = read_run_file(path)
        who = f" (process {other['pid']} on {other.get('host', '?')})" if other.get("pid") else ""
        raise RunError(f"another run{who} is writing into {path}; let it end or stop it, or name another directory")


def write_strategy(path: Path, strategy: Strategy) -> None:
    """Write strategy.json: how the run goes on from here."""
    replace_text(path / "strategy.json", strategy.to_json() + "\n")


def _told(path: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
    """What the run in `path`, of which run.json has these `facts`, was told that changes its numbers."""
    strategy, values = read_json(path / "strategy.json"), facts.get("values")
    told = {name: value for name, value in strategy.items() if name not in _SAID_ELSEWHERE}
    return told if values is None else told | {"--set": " ".join(sorted(values)) or None}


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    changed = [name for name in now if name in before and before[name] != now[name]]
    return ", ".join(f"{name} was {before[name]} and is {now[name]}" for name in changed)


def strategy_of_restart(path: Path, strategy: Strategy, batch_size: int) -> Strategy:
    """`strategy` with microbatches of as few samples as the run in `path` had come to; all ranks call it.

    Where the replicas have become fewer, each goes through its larger part of the batch in more slices.
    """
    from fullframe.ranks.agreement import on_first_rank

    def kept() -> int:
        try:
            before = Strategy.from_json((path / "strategy.json").read_text())
        except (OSError, StrategyError):
            return strategy.microbatches
        if before.data == strategy.data:
            return before.microbatches
        samples, slices = batch_size // strategy.data, before.microbatches * before.data
        return next((n for n in range(1, samples + 1) if samples % n == 0 and n * strategy.data >= slices), samples)

    return replace(strategy, microbatches=on_first_rank(kept))


def check_run_directory(path: Path, resume: Resume) -> None:
    """Raises RunError where `path` is no folder, and unless it holds a run exactly when one is to be resumed."""
    if path.exists() and not path.is_dir():
        raise _unusable(path, NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)))
    if resume == "auto":
        return
    has_steps = _has_steps(path)
    if has_steps and not resume:
        raise RunError(f"{path} already holds a run; go on with it by --resume (resume=True) or name another directory")
    # A run that ended before its first step left nothing worth refusing, but it may be resumed.
    if resume and not has_steps and not (path / "strategy.json").exists():
        raise RunError(f"{path} holds no run to resume; check the path, or start one without --resume")


def last_step(path: Path) -> int:
    """The last step that the run in `path` has recorded; 0 where there is none."""
    with suppress(OSError), open(path / "metrics.jsonl", "rb") as file:
        return int(next((step for _, line in _from_the_end(file) if (step := _step_of(line)) < math.inf), 0))
    return 0


def _from_the_end(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The lines of a file from the last on, and where each begins."""
    end, rest = file.seek(0, os.SEEK_END), b""
    while end:
        start = max(end - _BLOCK_BYTES, 0)
        file.seek(start)
        lines = (file.read(end - start) + rest).splitlines(keepends=True)
        at, end = end + len(rest), start
        rest = lines.pop(0) if start else b""  # it may begin before
        for line in reversed(lines):
            at -= len(line)
            yield at, line


def _has_steps(path: Path) -> bool:
    return (path / "metrics.jsonl").exists() or (path / "checkpoints").exists()


def _step_of(line: bytes) -> float:
    try:
        record = json.loads(line)
        return float(record["step"] if "step" in record else record["after_step"])  # the latter is no step itself
    except (ValueError, KeyError, TypeError):
        return math.inf
