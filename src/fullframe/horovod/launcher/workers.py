"""One worker of a job as a process, here or through ssh; its output goes line by line to ours, its rank in front."""

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, BinaryIO, TextIO

from fullframe.errors import LaunchError
from fullframe.horovod.launcher.hosts import Seat

# What goes along to another host, beside what is set for the job.
_ALONG = ("HOROVOD_", "NCCL_", "GLOO_", "CUDA_", "OMP_", "TORCH", "PYTHON", "PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
_GRACE_SECONDS = 5.0
_SPEAKING_SECONDS = 1.0  # for the last words of one that has ended; its children may hold the pipe
_LOST_ANOTHER = re.compile(rb"[\w.]*HorovodInternalError\b")  # at the end of a traceback
_KINDS = "stdout", "stderr"
_lock = threading.Lock()


def is_here(host: str) -> bool:
    """Whether a host's name means this machine."""
    return host in ("localhost", socket.gethostname(), socket.getfqdn()) or host.startswith("127.")


class Worker:
    """A running command. `name` is the worker's for as long as it lives, whatever its rank becomes."""

    def __init__(
        self,
        name: str,
        seat: Seat,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        ssh_port: int | None = None,
        output: Path | None = None,
        stdout: TextIO = sys.stdout,
    ):
        self.name, self.seat = name, seat
        self._says_it_lost_another = False
        files = [None, None] if output is None else _files(output / f"rank.{seat.rank}")
        here = is_here(seat.host)
        words = list(command) if here else _ssh(seat.host, ssh_port, command, environment)
        try:
            self._process = subprocess.Popen(
                words,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # so that its children end with it
            )
        except OSError as error:
            raise LaunchError(f"{words[0]} cannot be started: {error.strerror}") from error
        self._pumps = []
        streams = (self._process.stdout, stdout), (self._process.stderr, sys.stderr)
        for kind, (source, sink), file in zip(_KINDS, streams, files, strict=True):
            assert source is not None
            pump = threading.Thread(target=self._pump, args=(kind, source, sink, file), daemon=True)
            pump.start()
            self._pumps.append(pump)

    @property
    def code(self) -> int | None:
        """The exit code, 128 + the signal for one that died of it; None while it runs."""
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    @property
    def lost_another(self) -> bool:
        """Whether it ended for no more than that another worker is gone."""
        if self.code != 1:
            return False
        self.drain(_SPEAKING_SECONDS)
        return self._says_it_lost_another

    def send(self, number: int) -> None:
        """Send a signal to the worker and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def drain(self, seconds: float = _GRACE_SECONDS) -> None:
        """Wait until what it printed is printed."""
        for pump in self._pumps:
            pump.join(seconds)

    def _pump(self, kind: str, source: IO[bytes], sink: TextIO, file: IO[bytes] | None) -> None:
        with source:
            for line in source:
                if line.startswith(b"Traceback") or _LOST_ANOTHER.match(line):
                    self._says_it_lost_another = not line.startswith(b"Traceback")
                if file is not None:
                    file.write(line)
                    file.flush()
                    continue
                text = line.decode(errors="replace")
                with _lock:
                    sink.write(f"[{self.seat.rank}]<{kind}>:{text}" + ("" if text.endswith("\n") else "\n"))
                    sink.flush()
        if file is not None:
            file.close()


def end(workers: Sequence[Worker]) -> None:
    """End all that still run: told first, killed after a few seconds, with their children."""
    running = [worker for worker in workers if worker.code is None]
    for worker in running:
        worker.send(signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_SECONDS
    while any(worker.code is None for worker in running) and time.monotonic() < deadline:
        time.sleep(0.05)
    for worker in workers:
        worker.send(signal.SIGKILL)
    for worker in workers:
        worker.drain()


def _files(folder: Path) -> list[BinaryIO]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [(folder / kind).open("ab") for kind in _KINDS]
    except OSError as error:
        raise LaunchError(f"cannot write into {folder}: {error.strerror}; name another --output-filename") from error


def _ssh(host: str, port: int | None, command: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    kept = {name: value for name, value in os.environ.items() if name.startswith(_ALONG)}
    sets = " ".join(f"{name}={shlex.quote(value)}" for name, value in {**kept, **environment}.items())
    line = f"cd {shlex.quote(os.getcwd())} && exec env {sets} {shlex.join(command)}"
    ports = [] if port is None else ["-p", str(port)]
    # -tt: the connection's end is the end of the command.
    return ["ssh", "-tt", "-o", "BatchMode=yes", *ports, host, line]
