"""A rank that hangs makes all others wait for ever: after a set time every rank says where it is, and the job ends.

The ranks tell each other through files in the run directory, `stacks-rank-N.txt`, because the process group is what
they hang in. A rank that does not even write one is stopped, or stuck in code that holds the interpreter.
"""

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import NamedTuple

import torch
import torch.distributed as dist

from fullframe.spatial.tensor import module_path
from fullframe.training.failure import AGAIN, report

_SETTLE_SECONDS = 10.0  # how much later than the first a rank may notice
# Where the innermost line of Python is, while messages of other ranks, or a device that waits for them, are waited for.
_TORCH, _PACKAGE = str(Path(torch.__file__).parent), str(Path(__file__).parents[1])
_WAITING = tuple(f"{_TORCH}/{part}/" for part in ("distributed", "autograd", "nn/parallel"))
_WAITING += (f"{_PACKAGE}/spatial/", f"{_PACKAGE}/training/step.py")
_LIBRARY = (f"{_TORCH}/", f"{_PACKAGE}/", f"{Path(os.__file__).parent}/", "<")


class Whereabouts(NamedTuple):
    """Where a rank was when the time was over."""

    doing: str  # "step 12"
    where: str  # "job.py, line 9, in loss, module head.1 (Conv2d)"
    waits: bool  # for other ranks


class Watchdog:
    """Inside `with`, a thread watches that `beat` is called at least every `timeout_seconds` (0: it does not watch).

    When it is not: in a job of several ranks all of them write their stacks, name who holds up the others, and
    end with exit code 75, whatever they are doing; a process alone writes its stacks and says so.
    """

    def __init__(self, folder: Path, timeout_seconds: float, say: Callable[[str], None]):
        self._folder, self._timeout, self._say = folder, timeout_seconds, say
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._ended = threading.Event()
        self._main = threading.get_ident()
        self._thread = threading.Thread(target=self._watch, name="fullframe watchdog", daemon=True)

    def beat(self, doing: str) -> None:
        """The rank gets on, and does this now."""
        self._doing, self._since = doing, time.monotonic()

    def __enter__(self) -> "Watchdog":
        self.beat("starting")
        if self._timeout:
            with contextlib.suppress(OSError):
                stacks = _stacks(self._folder, self._rank)
                stacks.replace(stacks.with_stem(f"{stacks.stem}-before"))  # of an earlier hang
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        told = 0.0
        while not self._ended.wait(min(self._timeout / 4, 1.0)):
            since = self._since
            if time.monotonic() - since > self._timeout and since != told:
                told = since
                self._hangs(since)

    def _hangs(self, since: float) -> None:
        mine = self._write_stacks()
        if self._ranks == 1:
            stacks = _stacks(self._folder, self._rank)
            self._say(f"{mine.doing} has taken {self._timeout:g} s so far: {mine.where}; stacks are in {stacks}")
            return
        everyone = self._whereabouts(since)
        if self._since != since:  # it was only slow
            _stacks(self._folder, self._rank).unlink(missing_ok=True)
            return
        text = verdict(everyone, self._timeout, self._folder)
        report(f"error: {text}", text)
        os._exit(AGAIN)

    def _write_stacks(self) -> Whereabouts:
        frame = sys._current_frames().get(self._main)
        mine = Whereabouts(self._doing, _where(frame), _waits(frame))
        path = _stacks(self._folder, self._rank)
        partial = path.with_suffix(".partial")
        with contextlib.suppress(OSError), open(partial, "w") as file:
            file.write(json.dumps(mine._asdict()) + "\n\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
            os.replace(partial, path)
        return mine

    def _whereabouts(self, since: float) -> list[Whereabouts | None]:
        """Every rank's, None of one that has written nothing; waits for those a little behind."""
        deadline = time.monotonic() + min(self._timeout, _SETTLE_SECONDS)
        while True:
            everyone = [_read(_stacks(self._folder, rank)) for rank in range(self._ranks)]
            if all(everyone) or time.monotonic() > deadline or self._since != since:
                return everyone
            time.sleep(0.1)


def verdict(everyone: list[Whereabouts | None], timeout_seconds: float, folder: Path) -> str:
    """Who holds up the others: the ranks that do not wait for any other."""
    lines = []
    for rank, one in enumerate(everyone):
        if one is None:
            lines.append(f"rank {rank} does not answer: it is stopped, or stuck outside Python")
        elif not one.waits:
            lines.append(f"rank {rank} does not reach the others: {one.doing}, {one.where}")
    waiting = [(rank, one) for rank, one in enumerate(everyone) if one and one.waits]
    if waiting:
        rank, one = waiting[0]
        names = ", ".join(str(rank) for rank, _ in waiting)
        whom = "for that" if lines else "for each other: they do not run the same program, or a device hangs"
        lines.append(f"rank {names} waits {whom}: {one.doing}, {one.where}")
    return (
        f"the job hangs, no rank got on for {timeout_seconds:g} s; {'; '.join(lines)}. Stacks of all threads are in "
        f"{folder}/stacks-rank-*.txt; if a step may take so long, give --hang-timeout"
    )


def _stacks(folder: Path, rank: int) -> Path:
    return folder / f"stacks-rank-{rank}.txt"


def _read(path: Path) -> Whereabouts | None:
    try:
        with open(path) as file:
            return Whereabouts(**json.loads(file.readline()))
    except (OSError, ValueError, TypeError):
        return None


def _where(frame: FrameType | None) -> str:
    """The innermost line of the user's own code, else the innermost line; with the module whose forward runs."""
    if frame is None:
        return "nowhere"
    frames = list(_outwards(frame))
    chosen = next((one for one in frames if not one.f_code.co_filename.startswith(_LIBRARY)), frames[0])
    where = f"{chosen.f_code.co_filename}, line {chosen.f_lineno}, in {chosen.f_code.co_name}"
    module = module_path(frame)
    return f"{where}, module {module}" if module else where


def _waits(frame: FrameType | None) -> bool:
    return frame is not None and frame.f_code.co_filename.startswith(_WAITING)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
