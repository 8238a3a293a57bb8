"""How a run looks: a live bar on a terminal, plain lines anywhere else."""

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

_NOT_MEASURED = {"step", "loss", "grad_norm", "skipped", "step_seconds"}
_QUIET_SECONDS = 5.0


class Display(Protocol):
    """Shows records and messages between `with` and its end."""

    def record(self, record: Mapping[str, Any]) -> None:
        """Show one step."""

    def message(self, text: str) -> None:
        """Show one line."""

    def __enter__(self) -> object: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def display(steps: int, stream: TextIO) -> Display:
    """The display for this stream."""
    return Bar(steps, stream) if stream.isatty() else Lines(steps, stream)


class Bar:
    """A progress bar with the latest numbers; messages and measurements scroll above it."""

    def __init__(self, steps: int, stream: TextIO):
        self._console = Console(file=stream, highlight=False)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task = self._progress.add_task("starting", total=steps)
        self._steps = steps

    def record(self, record: Mapping[str, Any]) -> None:
        description = f"loss {_number(record['loss'])}  {_number(record['step_seconds'])} s/step"
        self._progress.update(self._task, completed=record["step"], description=description)
        if _measured(record):
            self.message(_line(record, self._steps))

    def message(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)

    def __enter__(self) -> object:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()


class Lines:
    """One line every few seconds, and for every step on which something was measured."""

    def __init__(self, steps: int, stream: TextIO):
        self._steps, self._stream = steps, stream
        self._spoke = -_QUIET_SECONDS

    def record(self, record: Mapping[str, Any]) -> None:
        now = time.monotonic()
        if now - self._spoke >= _QUIET_SECONDS or _measured(record) or record["step"] == self._steps:
            self._spoke = now
            self.message(_line(record, self._steps))

    def message(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def __enter__(self) -> object:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.flush()


def _measured(record: Mapping[str, Any]) -> bool:
    return any(name not in _NOT_MEASURED for name in record)


def _line(record: Mapping[str, Any], steps: int) -> str:
    parts = [f"step {record['step']:>{len(str(steps))}}/{steps}", f"loss {_number(record['loss'])}"]
    parts += [f"{name} {_number(value)}" for name, value in record.items() if name not in _NOT_MEASURED]
    parts += [f"{_number(record['step_seconds'])} s/step"] + ["skipped"] * bool(record["skipped"])
    return "  ".join(parts)


def _number(value: float) -> str:
    return f"{value:.4g}"
