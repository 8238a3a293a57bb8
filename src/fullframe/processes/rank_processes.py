"""The ranks of one attempt as processes of this machine: started, watched and ended together."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped, unused-ignore]

from fullframe.errors import MeshError
from fullframe.processes.exit_reasons import COMMAND, RESTART_REASON, STOPPED
from fullframe.processes.orphans import LAUNCHER

_LOCAL = "127.0.0.1"  # not the name, which may mean an IPv6 address that nobody listens on
_OWN_BYTES = 100 * 2**20  # at least, of a process that has loaded torch: 145 MiB that it shares with no other, measured
_REAP_SECONDS = 30.0  # a process that waits in the kernel, for a GPU say, does not even die of SIGKILL


@dataclass(frozen=True)
class Death:
    """A rank that ended with an error, or with code 0 before the others had done what they needed it for."""

    rank: int
    code: int  # the exit code, or minus the signal that it died of
    seconds: float  # when; the rank's own account where it left one
    report: Mapping[str, Any]  # what the rank said of it; empty where it had no time to
    last_words: str  # the end of its stderr, where that went into a file

    def __str__(self) -> str:
        if self.report:
            return f"rank {self.rank}: {self.report['summary'].splitlines()[0]}"
        if self.code == 0:
            return f"rank {self.rank} ended by itself, with exit code 0, while the others went on"
        return f"rank {self.rank} died ({_signal_name(-self.code) if self.code < 0 else f'exit code {self.code}'})"


@dataclass(frozen=True)
class Place:
    """Which of a job's machines this one is, and where the store is through which all ranks find each other.

    `listening` is the store's socket on the machine that holds it, None on the others.
    """

    node: int
    nodes: int
    address: str
    port: int
    listening: socket.socket | None


def only_machine() -> Place:
    """The place of a machine that has the job for itself."""
    listening = socket.create_server((_LOCAL, 0))
    return Place(0, 1, _LOCAL, listening.getsockname()[1], listening)


def environment_of(job: str, attempt: int, reason: str) -> dict[str, str]:
    """What ranks are told of their launcher's attempt, counted from 0, and why the one before ended."""
    return {
        "TORCHELASTIC_RUN_ID": job,
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        RESTART_REASON: reason,
        COMMAND: json.dumps(sys.argv[1:]),
    }


def set_defaults(ranks: int) -> None:
    """What the ranks of a machine inherit, unless the user has set it."""
    # Without this every rank would start a thread for every core of the machine.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(len(os.sched_getaffinity(0)) // ranks, 1)))
    # The ranks must walk through a set of names in one order.
    os.environ.setdefault("PYTHONHASHSEED", "0")


class Ranks:
    """`count` processes `python *arguments`, with the environment that torchrun would give them.

    They are this machine's of the job; every machine of `place` starts as many.

    The first shares this terminal, the others write into `folder`. Every rank leads a session of its own, so that
    Ctrl-C reaches it only through `send`. Leaving the `with` block kills those that did not end well, with their
    children. Raises MeshError for more of them than this machine has memory for before their first tensor.
    """

    def __init__(
        self,
        count: int,
        arguments: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        place: Place | None = None,
    ):
        _require_memory(count)
        folder.mkdir(parents=True)
        self._folder = folder
        self._deaths: dict[int, Death] = {}
        # The ranks start before this process has loaded torch: they find a socket that listens, and wait.
        place = only_machine() if place is None else place
        shared = {
            "WORLD_SIZE": str(place.nodes * count),
            "LOCAL_WORLD_SIZE": str(count),
            "GROUP_RANK": str(place.node),
            "GROUP_WORLD_SIZE": str(place.nodes),
            "MASTER_ADDR": place.address,
            "MASTER_PORT": str(place.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            LAUNCHER: str(os.getpid()),
            **environment,
        }
        self._first = place.node * count
        self._processes = [self._start(rank, arguments, shared) for rank in range(count)]
        self._store = None if place.listening is None else _store(place.listening)

    def _start(self, rank: int, arguments: Sequence[str], shared: Mapping[str, str]) -> "subprocess.Popen[bytes]":
        """The rank by its number on this machine."""
        own = {"RANK": str(self._first + rank), "LOCAL_RANK": str(rank)}
        own["TORCHELASTIC_ERROR_FILE"] = str(self._report(rank))
        with contextlib.ExitStack() as files:
            # Append: two descriptors of one file must not write over each other.
            out = files.enter_context(open(self._log(rank, "out"), "ab")) if rank else None
            err = files.enter_context(open(self._log(rank, "err"), "ab")) if rank else None
            return subprocess.Popen(
                [sys.executable, *arguments],
                env={**os.environ, **shared, **own},
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def running(self) -> bool:
        """Whether any rank still runs."""
        self.deaths()
        return any(process.poll() is None for process in self._processes)

    def codes(self) -> list[int | None]:
        """Exit codes by rank, None for a rank that runs."""
        return [process.poll() for process in self._processes]

    def deaths(self) -> list[Death]:
        """The ranks that ended with an error so far; and where one says that it lost another, those that just left."""
        for rank, process in enumerate(self._processes):
            code = process.poll()
            if code not in (None, 0, STOPPED):
                self._note(rank, code)
        if any(death.report.get("consequence") for death in self._deaths.values()):
            for rank, process in enumerate(self._processes):
                if process.poll() == 0:
                    self._note(rank, 0)
        return list(self._deaths.values())

    def _note(self, rank: int, code: int) -> None:
        if rank not in self._deaths:
            report = _read_report(self._report(rank))
            seconds = float(report.get("seconds", time.time()))
            self._deaths[rank] = Death(self._first + rank, code, seconds, report, _tail(self._log(rank, "err")))

    def send(self, number: int) -> None:
        """Send a signal to every rank that runs."""
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            if process.poll() not in (0, STOPPED):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # also what a dead rank left: its loader's workers
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_REAP_SECONDS)

    def _log(self, rank: int, kind: str) -> Path:
        return self._folder / f"rank-{rank}.{kind}"

    def _report(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.json"


def _require_memory(ranks: int) -> None:
    most = psutil.virtual_memory().total // _OWN_BYTES
    if ranks > most:
        raise MeshError(
            f"{ranks} ranks on this machine need more memory than it has, before their first tensor; start {most} at "
            "the very most"
        )


def _store(listening: socket.socket) -> Any:
    """The store through which the ranks find each other: it lies in this process, so that any rank may die."""
    from torch.distributed import TCPStore

    port = listening.getsockname()[1]
    return TCPStore(_LOCAL, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def _read_report(path: Path) -> dict[str, Any]:
    """What a rank wrote into its error file, in the format of torch's launcher; {} where it wrote nothing."""
    try:
        message = json.loads(path.read_text())["message"]
        return {"summary": message["message"], **message["extraInfo"]}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _tail(path: Path, lines: int = 30) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else ""
