"""What the ranks did when, as a Chrome trace: a row for each tensor's name, negotiation and collectives as bars."""

import contextlib
import json
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fullframe.errors import ArgumentError


class Timeline:
    """Records spans while it is on; a file of one JSON array, which chrome://tracing and Perfetto open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._file: Any = None
        self._rows: dict[str, int] = {}
        self._marks_cycles = False

    def start(self, path: Path, mark_cycles: bool = False) -> None:
        """Begin to write `path`. Raises ValueError where a file is being written, or this one cannot be."""
        with self._lock:
            if self._file is not None:
                raise ValueError("a timeline is being written; call stop_timeline() first")
            try:
                self._file, self._rows, self._marks_cycles = path.open("w"), {}, mark_cycles
            except OSError as error:
                fix = "give start_timeline, or HOROVOD_TIMELINE, a file in a folder that exists"
                raise ArgumentError(f"the timeline {path} cannot be written ({error.strerror}); {fix}") from error
            self._file.write("[\n")

    @property
    def is_on(self) -> bool:
        """Whether a file is being written."""
        return self._file is not None

    def stop(self) -> None:
        """End the file; nothing where none is written."""
        with self._lock:
            if self._file is not None:
                self._file.write("{}]\n")  # an object without a phase is skipped by viewers
                self._file.close()
                self._file = None

    @contextlib.contextmanager
    def span(self, names: str | Sequence[str], activity: str) -> Iterator[None]:
        """Record what is done inside, in the rows `names`; "" is the row of the rounds."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            if self._file is not None:
                for name in [names] if isinstance(names, str) else names:
                    self.record(name, activity, begin)

    def record(self, name: str, activity: str, begin: float) -> None:
        """Record what was done since `begin`, of `time.perf_counter`."""
        if self._file is None or (not name and not self._marks_cycles):
            return
        end = time.perf_counter()
        with self._lock:
            if self._file is not None:
                self._write(name or "rounds", activity, begin, end)

    def _write(self, name: str, activity: str, begin: float, end: float) -> None:
        row = self._rows.get(name)
        if row is None:
            row = self._rows[name] = len(self._rows)
            said = {"name": "process_name", "ph": "M", "pid": row, "args": {"name": name}}
            self._file.write(json.dumps(said) + ",\n")
        micros = {"ts": 1e6 * begin, "dur": 1e6 * (end - begin)}
        self._file.write(json.dumps({"name": activity, "ph": "X", "pid": row, "tid": 0, **micros}) + ",\n")
