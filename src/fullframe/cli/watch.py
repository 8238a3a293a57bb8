"""`fullframe watch`: a run as it goes, or the GPUs of this machine, in a terminal."""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from fullframe.errors import DeviceError, RunError

if TYPE_CHECKING:
    from fullframe.observation.summary import Finding

_GPUS = "gpus"
_GPU_SECONDS = 5.0  # between two looks at the GPUs while a run is watched
_WIDTH = 120  # where there is no terminal


@dataclass(frozen=True, kw_only=True)
class Watch:
    """Show how a run goes, or how it went: progress, loss, images per second, where a step's time and memory go.

    On a terminal it is drawn again and again until the run ends, or q is pressed; anywhere else a line is printed now
    and then. It only reads the run directory, from any machine that sees it. `fullframe watch gpus` shows who holds
    memory on the GPUs of this machine; nothing is ended, the command that would end a left-over process is named.
    """

    run_dir: Annotated[Positional[str], arg(metavar="RUN|gpus")]
    """A run directory; or gpus (./gpus for a run directory of that name)."""
    once: bool = False
    """Print how it is now and end."""
    every: Annotated[float, arg(metavar="SECONDS")] = 1.0
    """Time between two looks."""
    json: bool = False
    """Print how it is now as one JSON value on stdout, and end."""

    def run(self) -> int:
        """Watch until the end."""
        if not self.every > 0:
            raise RunError(f"--every must be greater than 0, got {self.every:g}")
        return self._gpus() if self.run_dir == _GPUS else self._run(Path(self.run_dir))

    def _run(self, path: Path) -> int:
        from rich.console import Console

        from fullframe.observation.run_files import RunReader
        from fullframe.observation.summary import summarize
        from fullframe.observation.watch.loop import show_once, watch_lines, watch_screen
        from fullframe.observation.watch.snapshot import as_data

        reader = RunReader(path)
        if self.json:
            run = reader.read()
            print(json.dumps(as_data(run, summarize(run))))
            return 0
        console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH)
        if self.once:
            show_once(reader.read(), console, _troubles()())
        elif console.is_terminal:
            watch_screen(reader, console, self.every, _troubles())
        else:
            watch_lines(reader, sys.stdout, self.every)
        return 0

    def _gpus(self) -> int:
        from rich.console import Console

        from fullframe.observation.gpus import gpus
        from fullframe.observation.watch.gpu_view import gpu_lines
        from fullframe.observation.watch.loop import glyphs_for, redraw

        found = gpus()
        if self.json:
            print(json.dumps([asdict(gpu) for gpu in found]))
            return 0
        console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH)
        if self.once or not console.is_terminal:
            for line in gpu_lines(found, console.width, 10_000, glyphs_for(console)):
                console.print(line, no_wrap=True, crop=True)
        else:
            redraw(lambda width, height, glyphs: gpu_lines(gpus(), width, height, glyphs), console, self.every)
        return 0


def _troubles() -> "Callable[[], list[Finding]]":
    """What is wrong with the processes on this machine's GPUs, looked at now and then; nothing where there are none."""
    from fullframe.observation.gpus import gpus
    from fullframe.observation.watch.gpu_view import gpu_findings

    known: list[Finding] = []
    looked, answers = -_GPU_SECONDS, True

    def look() -> "list[Finding]":
        nonlocal known, looked, answers
        if answers and time.monotonic() - looked >= _GPU_SECONDS:
            looked = time.monotonic()
            try:
                known = list(gpu_findings(gpus()))
            except DeviceError:
                answers = False
        return known

    return look
