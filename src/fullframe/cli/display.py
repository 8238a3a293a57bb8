"""How a run looks: a live bar on a terminal, plain lines anywhere else, one object as JSON."""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from fullframe.errors import RunError
from fullframe.training.run_directory import OF_STEP
from fullframe.wording import in_json, plural

_QUIET_SECONDS = 5.0


class Display:
    """Shows records and messages between `with` and its end.

    On a terminal a bar with the latest numbers, above which messages and measurements scroll; anywhere else one line
    every few seconds, and for every step on which something was measured.
    """

    def __init__(self, steps: int, stream: TextIO):
        self._steps, self._stream = steps, stream
        self._spoke = -_QUIET_SECONDS
        self._bar = _bar(steps, stream) if stream.isatty() else None

    def record(self, record: Mapping[str, Any]) -> None:
        """Show one step."""
        now = time.monotonic()
        is_due = any(name not in OF_STEP for name in record)
        if self._bar is not None:
            description = f"loss {_number(record['loss'])}  {_number(record['step_seconds'])} s/step"
            self._bar.update(self._bar.task_ids[0], completed=record["step"], description=description)
        elif now - self._spoke >= _QUIET_SECONDS or record["step"] == self._steps:
            is_due = True
        if is_due:
            self._spoke = now
            self.message(_line(record, self._steps))

    def samples(self, done: int, samples: int | None) -> None:
        """Show how far an evaluation has come."""
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, total=samples, description="evaluating")
        elif now - self._spoke >= _QUIET_SECONDS or done == samples != 1:
            self._spoke = now
            self.message(
                f"{plural(done, 'sample')} so far" if samples is None else f"{done} of {plural(samples, 'sample')}"
            )

    def message(self, text: str) -> None:
        """Show one line."""
        if self._bar is not None:
            self._bar.console.print(Text(text), soft_wrap=True)
        else:
            print(text, file=self._stream, flush=True)

    def __enter__(self) -> "Display":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _bar(steps: int, stream: TextIO) -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    bar = Progress(*columns, console=Console(file=stream, highlight=False))
    bar.add_task("starting", total=steps)
    return bar


def _line(record: Mapping[str, Any], steps: int) -> str:
    parts = [f"step {record['step']:>{len(str(steps))}}/{steps}", f"loss {_number(record['loss'])}"]
    parts += [measures(record)] * any(name not in OF_STEP for name in record)
    parts += [f"{_number(record['step_seconds'])} s/step"] + ["skipped"] * bool(record["skipped"])
    return "  ".join(parts)


def measures(record: Mapping[str, Any]) -> str:
    """What `evaluate` measured, among a record's other numbers."""
    return "  ".join(f"{name} {_number(value)}" for name, value in record.items() if name not in OF_STEP)


def _number(value: float) -> str:
    return f"{value:.4g}"


def print_error(text: str) -> None:
    """Print what ends a command that was asked for JSON."""
    print(json.dumps({"error": text}))


def said_of_failure(as_json: bool) -> Callable[[str], None]:
    """What a launcher does with the reason why its ranks failed, which stderr has: says it where JSON was asked for."""
    return print_error if as_json else lambda reason: None


@contextmanager
def writing(path: Path, option: str) -> Iterator[None]:
    """Raises RunError in place of an OSError that a file which `option` names meets."""
    try:
        yield
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}; name another file with {option}") from error


def require_writable(path: Path | None, option: str) -> None:
    """Raises RunError where `path`, which is written when all is done, cannot be."""
    if path is not None and path.is_dir():
        raise RunError(f"cannot write {path}: it is a folder; name a file with {option}")
    if path is not None and not os.access(path if path.exists() else path.parent, os.W_OK):
        where = "it" if path.exists() else f"the folder {path.parent}"
        raise RunError(f"cannot write {path}: {where} cannot be written, or is not there; name another with {option}")


def print_json(fields: Mapping[str, Any]) -> None:
    """Print one object; a value that is not finite as null, which JSON knows."""
    print(in_json(fields))
