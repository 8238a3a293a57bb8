"""run.json: what a run is and how it stands, for whoever looks at it from outside; replaced atomically.

A launcher writes it too, when its ranks have ended, so that this module loads no torch.
"""

import json
import os
import platform
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from fullframe import __version__
from fullframe.errors import FullframeError
from fullframe.processes.exit_reasons import StartAgain, is_machines_fault, users_words
from fullframe.processes.lock import is_held
from fullframe.processes.place import restarts
from fullframe.processes.stop_signals import Stopped
from fullframe.processes.whole_files import replace_text

_NAME = "run.json"
LOCK = "run.lock"  # held by the process that writes
_REASON = 2000  # characters of it that are kept; a missing key's message names all the others
_SECONDS = 1.0  # between two times that the last step is written
_SCHEDULERS = ("SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_JOB_NODELIST", "SLURM_RESTART_COUNT", "JOB_COMPLETION_INDEX",
               "CUDA_VISIBLE_DEVICES")  # fmt: skip


class RunFile:
    """The run.json of the run in `path`; on ranks that do not write, nothing happens.

    A disk that is full is told by metrics.jsonl, so that here a file that cannot be written is left as it is.
    """

    def __init__(self, path: Path, writes: bool):
        self._path, self._writes, self._written = path, writes, 0.0
        self._step = 0
        self.before: Mapping[str, Any] = {}  # what it said when this run began
        self.accepted = False  # what there was to go on with was taken up
        self.is_done = False  # there was nothing left to do

    def begin(self, facts: Mapping[str, Any]) -> None:
        """The run goes on from here. A launcher's new start keeps when it began."""
        before = read_run_file(self._path) if restarts() else {}
        standing = {"state": "running", "reason": "", "pid": os.getpid(), "host": socket.gethostname()}
        began = {"started": before.get("started", _now()), "ended": None, "restarts": restarts()}
        environment = {name: os.environ[name] for name in _SCHEDULERS if os.environ.get(name)}
        known = {"prediction": before.get("prediction"), "environment": environment}
        self._write({**standing, **began, **facts, "step": 0, **known})

    def step(self, number: int, now: bool) -> None:
        """The last step that was done; written once a second at most, unless it is to be `now`."""
        self._step = number
        if now or time.monotonic() - self._written >= _SECONDS:
            self.update()

    def update(self, **fields: Any) -> None:
        """Change these fields."""
        if self._writes:
            self._write(read_run_file(self._path) | {"step": self._step} | fields)

    @contextmanager
    def standing(self, facts: Mapping[str, Any]) -> Iterator[None]:
        """Around a run: how it ends is written, and passed on. Where its launcher may start it again, it still runs.

        A run that is refused before it is `accepted`, or has nothing left to do, leaves what is said of the one before.
        """
        before = self.before = read_run_file(self._path) if self._writes else {}
        self.begin(facts)
        try:
            yield
        except Stopped as stopped:
            self._end("stopped", f"by {stopped.signal.name}; go on with --resume")
            raise
        except StartAgain as again:
            self.update(reason=f"to be started again: {again.reason}")
            raise
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
            reason = reason if len(reason) <= _REASON else f"{reason[:_REASON]} ..."
            if isinstance(error, FullframeError) and not self.accepted and before.get("state", "running") != "running":
                self._write(before)
                raise
            if isinstance(error, Exception) and is_machines_fault(error):
                self.update(reason=reason)
            else:
                self._end("failed", reason)
            raise
        if self.is_done and before:
            ended = before.get("ended") or _now()
            self._write(before | {"state": "finished", "ended": ended, "step": self._step})
        else:
            self.update(state="finished", ended=_now())  # and the reason, where it is not that all steps are done

    def _end(self, state: str, reason: str) -> None:
        self.update(state=state, reason=reason, ended=_now())

    def _write(self, fields: Mapping[str, Any]) -> None:
        if not self._writes:
            return
        self._written = time.monotonic()
        _replace(self._path, fields)


def read_run_file(path: Path) -> dict[str, Any]:
    """The run.json of the run in `path`; {} where there is none that can be read."""
    return read_json(path / _NAME)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; {} where there is none that can be read."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def note_end(path: Path, reason: str) -> None:
    """The ranks of the run in `path` have ended for good, and the one that writes could not say so."""
    found = read_run_file(path)
    if found.get("state") == "running" and not is_held(path / LOCK):  # else it is another run's
        _replace(path, found | {"state": "failed", "reason": reason, "ended": _now()})


def note_prediction(path: Path, prediction: Mapping[str, Any]) -> None:
    """What was predicted of the run in `path`, as `Prediction.as_dict` gives it."""
    found = read_run_file(path)
    kept = {name: prediction.get(name) for name in ("peak_bytes", "bytes", "step_seconds", "seconds")}
    if found:
        _replace(path, found | {"prediction": kept})


def facts(*, device: str, world_size: int, steps: int) -> dict[str, Any]:
    """What `fit` knows of a run before its first step."""
    import torch

    versions = {"python": platform.python_version(), "torch": torch.__version__, "fullframe": __version__}
    place = {"device": device, "world_size": world_size, "steps": steps}
    return {"recipe": "", "arguments": users_words(), "commit": None, "versions": versions, **place}


def commit_of(folder: Path) -> str | None:
    """The git commit that `folder` is at, with "+" where files in it were changed since; None outside git."""
    try:
        head = _git(folder, "rev-parse", "HEAD")
        return head + "+" * bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *words: str) -> str:
    said = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True, timeout=5)
    return said.stdout.strip()


def _replace(path: Path, fields: Mapping[str, Any]) -> None:
    with suppress(OSError):
        replace_text(path / _NAME, json.dumps(fields, indent=1) + "\n")


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")
