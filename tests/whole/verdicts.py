"""On the ranks: run the cases of a chunk of entries one by one, agree on each, and write down what came of it.

A rank that hangs cannot answer, so every line goes to a file at once; a thread ends a rank that makes no progress.
"""

import json
import os
import threading
import time
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import fullframe as ff
from fullframe.errors import FullframeError, UnsupportedOp
from fullframe.ranks.mesh import forget_meshes
from tests.whole.cases import Case, Mesh, cases, described, sample_of
from tests.whole.database import Entry, entries
from tests.whole.programs import Answers, NotApplicable, Program, averaged, difference, digest, is_random, quietly

STALLED_SECONDS = 30.0
STALLED_EXIT = 17
SOURCE = "fullframe"


class Outcome(NamedTuple):
    """Of one case on one rank: `kind` is compared over the ranks by the parent."""

    verdict: str
    detail: str = ""


def names() -> list[str]:
    """The names of all entries, in torch's order."""
    return list(entries())


def run_chunk(pending: list[tuple[str, int]], mesh: Mesh, most: int, folder: str) -> None:
    """Run the cases of each entry from the given number on; the results go to `folder`/RANK.jsonl."""
    known = entries()  # before the clock runs: it takes seconds
    clock = _Clock()
    with (Path(folder) / f"{dist.get_rank()}.jsonl").open("a") as file:
        for name, first in pending:
            entry = known[name]
            clock.touch()
            for number, case in enumerate(cases(entry, mesh, most)):
                if number >= first:
                    clock.touch()
                    _one(file, clock, entry, number, case, mesh)
            _line(file, end=name, first=first)
            entry.forget()
    clock.stop()


class _Clock:
    """Ends this process when nobody touches it for a while: the parent then knows which case hung."""

    def __init__(self) -> None:
        self._on = True
        self.touch()
        threading.Thread(target=self._watch, daemon=True).start()

    def touch(self) -> None:
        self._last, self._limit = time.monotonic(), STALLED_SECONDS

    def hurry(self) -> None:
        """This rank has raised: the others raise soon as well, or wait for it for ever."""
        self._last, self._limit = time.monotonic(), STALLED_SECONDS / 5

    def stop(self) -> None:
        self._on = False

    def _watch(self) -> None:
        while self._on:
            time.sleep(0.5)
            crowd = os.getloadavg()[0] / (os.cpu_count() or 1)  # of processes for each core
            if self._on and time.monotonic() - self._last > self._limit * min(max(1.0, crowd), 6.0):
                os._exit(STALLED_EXIT)


def _line(file: Any, **facts: Any) -> None:
    file.write(json.dumps(facts) + "\n")
    file.flush()


def _one(file: Any, clock: _Clock, entry: Entry, number: int, case: Case, mesh: Mesh) -> None:
    sample = sample_of(entry, case)
    facts = {**case.facts(), "main": case.dtype == str(entry.main).removeprefix("torch.")}
    _line(file, begin=entry.name, number=number, case=facts, text=described(entry, case, sample, mesh),
          numel=sum(t.numel() for t in sample.tensors()))  # fmt: skip
    program = Program(entry, case, sample, mesh)

    def raising(error: Exception) -> None:
        _line(file, raised=_shown(error), number=number, entry=entry.name)
        if not isinstance(error, UnsupportedOp):
            clock.hurry()

    def survived() -> None:
        _line(file, survived=entry.name, number=number)

    outcome = quietly(_compared, program, survived, raising)
    _line(file, done=entry.name, number=number, verdict=outcome.verdict, detail=outcome.detail)


def _compared(program: Program, survived: Callable[[], None], raising: Callable[[Exception], None]) -> Outcome:
    plain, raised = _attempt(program, None, True)
    random = raised is None and is_random(program, plain)
    survived()
    if isinstance(raised, NotApplicable) or _beyond_plain_torch(program, raised):
        return Outcome("skipped", str(raised)[:200])
    graph = raised is None and not plain.no_backward
    device_mesh = ff.init_mesh(height=program.mesh[0], width=program.mesh[1])
    split, error = _attempt(program, device_mesh, graph)
    if error is not None:
        raising(error)  # the others may never answer
    drawn = int(torch.randint(2**40, ())) if error is None else 0
    # What each rank computes from gathered tensors is compared with plain torch: LAPACK's last bits differ with the
    # alignment of memory.
    told = digest(split.whole) if error is None and not program.case.gather else 0
    kinds, draws, digests = _everyone(_code(error), drawn, told)
    if len(set(kinds)) > 1 or (error is not None and not isinstance(error, UnsupportedOp)):
        forget_meshes()  # a message may lie between the ranks
        _everyone(0)
    if len(set(kinds)) > 1 and _told(kinds, raised):
        return Outcome("error agrees", f"{type(raised).__name__} on some ranks, of which the others were told")
    if len(set(kinds)) > 1:
        return Outcome("disagree", "completed" if error is None else _shown(error))
    if error is not None:
        return _on_error(error, raised)
    gradients = averaged(split.gradients) if set(split.gradients) == set(plain.gradients) else split.gradients
    split.gradients = gradients
    if raised is not None:
        return Outcome("wrong", f"torch raises {type(raised).__name__}: {str(raised)[:200]}; here it is accepted")
    if len(set(draws)) > 1:
        return Outcome("disagree", "the random state differs over the ranks afterwards")
    if len(set(digests)) > 1:
        return Outcome("disagree", "a whole result differs over the ranks")
    found = difference(program, plain, split, random)
    return Outcome("wrong", found) if found else Outcome("exact", "random" if random else "")


def _beyond_plain_torch(program: Program, raised: Exception | None) -> bool:
    """Whether plain torch cannot run a sample that it is meant to run."""
    case = program.case
    return raised is not None and case.call == "function" and case.values == "given"


def _attempt(program: Program, on: Any, gradients: bool) -> tuple[Answers, Exception | None]:
    try:
        return program.run(on, gradients=gradients), None
    except Exception as error:
        return Answers(), error


def _code(error: Exception | None) -> int:
    if error is None:
        return 0
    if isinstance(error, FullframeError):
        return 1 if isinstance(error, UnsupportedOp) else 2
    return 3 + zlib.crc32(type(error).__name__.encode())


def _told(kinds: tuple[int, ...], raised: Exception | None) -> bool:
    """Whether only some ranks met torch's error, in their part of the data, and the others ended because of it."""
    return raised is not None and set(kinds) == {2, _code(raised)}


_agreement: list[Any] = []


def _everyone(*facts: int) -> list[tuple[int, ...]]:
    """Each fact of all ranks, by fact; a group of its own, so that no message of fullframe's meets these."""
    if not _agreement:
        _agreement.append(dist.new_group())
    mine = torch.tensor(facts)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine, group=_agreement[0])
    return list(zip(*(each.tolist() for each in gathered), strict=True))


def _on_error(error: Exception, raised: Exception | None) -> Outcome:
    if isinstance(error, UnsupportedOp):
        return Outcome("refused" if raised is None else "error agrees", f"{error.function}: {error.reason}")
    if raised is not None and isinstance(error, type(raised)):
        return Outcome("error agrees", type(error).__name__)
    plain = f"; torch raises {type(raised).__name__}: {str(raised)[:100]}" if raised is not None else ""
    return Outcome("foreign", _shown(error) + plain)


def _shown(error: Exception) -> str:
    """The exception, and the innermost line of the package that it went through."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f"/{SOURCE}/" in f.filename]
    where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno} {frames[-1].name}" if frames else ""
    message = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {message}{where}"
