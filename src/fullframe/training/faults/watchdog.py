"""A rank that hangs makes all others wait for ever: after a set time every rank says where it is, and the job ends.

The ranks talk through files in the run directory, as they hang in the process group: a rank that has waited long
enough touches `stacks/alarm`, and every rank answers with `stacks/rank-N.txt`. One that does not answer is stopped, or
stuck in code that holds the interpreter.
"""

import contextlib
import faulthandler
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TextIO

import torch.distributed as dist

from fullframe.processes.exit_reasons import AGAIN, report
from fullframe.training.faults.whereabouts import frame_of, is_compiling, waits_for_ranks, where

_TICK_SECONDS = 1.0
_ANSWER_SECONDS = 10.0
_COMPILING = 10  # times the patience with a rank that compiles: an optimizer's first step may, for each shape it meets


class Whereabouts(NamedTuple):
    """Where a rank was when it was asked."""

    doing: str  # "step 12"
    idle_seconds: float  # since it last got on, or was seen to compile
    where: str  # "job.py, line 9, in loss, module head.1 (Conv2d)"
    waits: bool  # for other ranks


class Watchdog:
    """Inside `with`, a thread watches that `beat` is called at least every `timeout_seconds` (0: it does not watch).

    When it is not: in a job of several ranks all of them write their stacks, name who holds up the others, and
    end with exit code 75, whatever they are doing, unless one gets on and is only slow, or compiles; a process alone
    writes its stacks and says so.
    """

    def __init__(self, folder: Path, timeout_seconds: float, say: Callable[[str], None]):
        self._folder, self._timeout, self._say = folder / "stacks", timeout_seconds, say
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._ended = threading.Event()
        self._main = threading.get_ident()
        self._at_exit = contextlib.ExitStack()
        self._doing, self._since = "starting", time.monotonic()
        self._compiled = self._since  # when it was last seen to compile

    def beat(self, doing: str) -> None:
        """Say that this rank makes progress, and what it does now."""
        self._doing, self._since = doing, time.monotonic()

    def __enter__(self) -> "Watchdog":
        self.beat("starting")
        if self._timeout:
            self._folder.mkdir(exist_ok=True)
            with contextlib.suppress(OSError):
                self._file().replace(self._file("-before"))  # of an earlier hang
            stuck = self._at_exit.enter_context(open(self._file("-stuck"), "w"))
            thread = threading.Thread(target=self._watch, args=(stuck,), name="fullframe watchdog", daemon=True)
            self._at_exit.callback(self._stop, thread, stuck)
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._at_exit.close()

    def _stop(self, thread: threading.Thread, stuck: TextIO) -> None:
        self._ended.set()
        thread.join()
        faulthandler.cancel_dump_traceback_later()
        if not os.fstat(stuck.fileno()).st_size:
            Path(stuck.name).unlink(missing_ok=True)  # the run's directory may be gone

    def _watch(self, stuck: TextIO) -> None:
        answered, rang = _changed(self._folder / "alarm"), self._since
        while not self._ended.wait(min(self._timeout / 4, _TICK_SECONDS)):
            # Needs no interpreter: for a rank that is stuck in code which does not let go of its lock.
            faulthandler.dump_traceback_later(self._timeout, file=stuck)
            if time.monotonic() - self._since < _COMPILING * self._timeout and is_compiling():
                self._compiled = time.monotonic()
            if time.monotonic() - max(self._since, self._compiled, rang) > self._timeout:
                rang = time.monotonic()
                self._ring()
            elif _changed(self._folder / "alarm") != answered:
                answered = _changed(self._folder / "alarm")
                self._answer()

    def _ring(self) -> None:
        """This rank has waited long enough: ask all where they are, and end unless one of them gets on."""
        mine, since = self._answer(), self._since
        if self._ranks == 1:
            self._say(f"{mine.doing} has taken {self._timeout:g} s so far: {mine.where}; stacks are in {self._file()}")
            return
        (self._folder / "alarm").touch()
        everyone = self._everyone(since)
        if self._since != since:  # it was only slow
            return
        busy = [(rank, one) for rank, one in enumerate(everyone) if one and one.idle_seconds < self._timeout / 2]
        if busy:
            rank, one = busy[0]
            self._say(f"all wait for rank {rank}, which gets on: {one.doing}, {one.where}")
            return
        text = verdict(everyone, self._timeout, self._folder)
        report(f"error: {text}", text)
        os._exit(AGAIN)

    def _answer(self) -> Whereabouts:
        """Write where this rank is, with the stacks of all its threads."""
        frame = frame_of(self._main)
        idle_seconds = round(time.monotonic() - max(self._since, self._compiled), 1)
        mine = Whereabouts(self._doing, idle_seconds, where(frame), waits_for_ranks(self._main, frame))
        partial = self._file(".partial")
        with contextlib.suppress(OSError), open(partial, "w") as file:
            file.write(json.dumps(mine._asdict()) + "\n\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
            os.replace(partial, self._file())
        return mine

    def _everyone(self, since: float) -> list[Whereabouts | None]:
        """Where every rank is, None for one that does not answer; returns early when this rank makes progress."""
        asked = _changed(self._folder / "alarm") - min(self._timeout / 4, _TICK_SECONDS)  # some rang a little earlier
        deadline = time.monotonic() + min(self._timeout, _ANSWER_SECONDS)
        while True:
            everyone = [_read(self._folder / f"rank-{rank}.txt", asked) for rank in range(self._ranks)]
            if all(everyone) or time.monotonic() > deadline or self._since != since:
                return everyone
            time.sleep(0.1)

    def _file(self, kind: str = "") -> Path:
        return self._folder / f"rank-{self._rank}{kind}.txt"


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
        f"{folder}; if a step may take so long, give --hang-timeout"
    )


def _changed(path: Path) -> float:
    """When a file was last written, by the file system's clock, which all ranks share; 0 where there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _read(path: Path, asked: float) -> Whereabouts | None:
    """What a rank has answered since the time `asked`; None where it has not."""
    try:
        with open(path) as file:
            if os.fstat(file.fileno()).st_mtime < asked:
                return None
            return Whereabouts(**json.loads(file.readline()))
    except (OSError, ValueError, TypeError):
        return None
