"""The ranks of a rehearsal, started, watched and ended here, and what became of each."""

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fullframe.doctor.probes.notes import End, Failure, Notes, file_of_rank, read_notes
from fullframe.doctor.rehearsal.rank import Request, stack_file
from fullframe.doctor.rehearsal.recipe_steps import SMALL, WHOLE
from fullframe.processes.rank_processes import Death, Ranks

_POLL_SECONDS = 0.1
_LEFT_ALONE_SECONDS = 20.0  # for ranks that still run when one is through


class Outcome(NamedTuple):
    """The notes of all ranks of both sizes, and where those stood that had to be ended."""

    small: list[Notes]
    whole: list[Notes]
    stacks: dict[int, str]


def rehearsal(request: Request, arguments: Sequence[str], *, patience_seconds: float) -> Outcome:
    """Run `python *arguments` as ranks that take `request`, until all have ended or none gets on any more.

    They are given up when none has noted anything for `patience_seconds`, or some are through and the others have
    noted nothing for 20 seconds.
    """
    folder = Path(request.folder)
    threads = str(max(len(os.sched_getaffinity(0)) // request.ranks, 1))
    environment = {
        "TORCHELASTIC_RUN_ID": folder.name,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads),
        "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"),  # as `fullframe train` sets them
    }
    with Ranks(request.ranks, arguments, folder / "output", environment) as ranks:
        stuck = _watch(ranks, folder, request.ranks, patience_seconds)
        stacks = _stacks(ranks, folder, stuck) if stuck else {}
        deaths = {death.rank: death for death in ranks.deaths()}
    small, whole = (read_notes(folder / name, request.ranks) for name in (SMALL, WHOLE))
    return Outcome(small, [_with_death(notes, deaths.get(notes.rank)) for notes in whole], stacks)


def _watch(ranks: Ranks, folder: Path, count: int, patience_seconds: float) -> list[int]:
    """The ranks that run and do not get on."""
    newest, since = 0.0, time.monotonic()
    while ranks.running():
        time.sleep(_POLL_SECONDS)
        codes = ranks.codes()
        running = [rank for rank, code in enumerate(codes) if code is None]
        found = max(_last_note(folder, rank) for rank in range(count))
        if found != newest:  # by the file system's clock, which may be another than ours
            newest, since = found, time.monotonic()
        idle = time.monotonic() - since
        if idle > patience_seconds or (len(running) < count and idle > _LEFT_ALONE_SECONDS):
            return running
    return []


def _last_note(folder: Path, rank: int) -> float:
    files = [file_of_rank(folder / name, rank) for name in (SMALL, WHOLE)]
    return max((file.stat().st_mtime for file in files if file.exists()), default=folder.stat().st_mtime)


def _stacks(ranks: Ranks, folder: Path, stuck: Sequence[int]) -> dict[int, str]:
    ranks.send(signal.SIGUSR2)
    time.sleep(1.0)
    found = {}
    for rank in stuck:
        file = stack_file(folder, rank)
        text = file.read_text() if file.exists() else ""
        frames = [line.strip() for line in text.splitlines() if line.strip().startswith("File ")]
        own = [frame for frame in frames if "/torch/" not in frame and "/fullframe/" not in frame]
        if frames:
            found[rank] = (own or frames)[0].removeprefix("File ")
    return found


def _with_death(notes: Notes, death: Death | None) -> Notes:
    """A rank that a signal ended, or that was ended before it could say why, has noted nothing of it."""
    if death is None or notes.one(Failure) or notes.one(End):
        return notes
    last = death.last_words.splitlines()[-1:] or [""]
    failure = Failure(kind="Death", text=f"{death}: {last[0]}".rstrip(": "), trace=death.last_words)
    return Notes(notes.rank, [*notes.events, failure])
